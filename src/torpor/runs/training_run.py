"""One training run, from checked inputs to a verified Hugging Face folder, whatever is trained.

OUTPUT/
    run.json          the configuration that the run was started with
    tokens/           the tokenized data
    checkpoints/      what an interrupted run continues from
    metrics.jsonl     one line per step and per evaluation; tensorboard/ holds the same
    dormancy.json     the proof that the MTP layers slept, per rank
    export/           the trained model as a Hugging Face folder
    export.json       the step and the settings that the export is of
    verify.json       the comparison of the export with the model it started from
    summary.json      how the run ended
"""

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torpor.checkpoints.families import count_mtp_layers
from torpor.checkpoints.folder import Folder
from torpor.errors import ConfigError, MTPChangedError
from torpor.megatron import checkpointing, parallel
from torpor.megatron.host import prepare_host
from torpor.megatron.parallel import Layout
from torpor.runs.inputs import folder_digest
from torpor.runs.ranks import Ranks
from torpor.runs.result import Ended, RunResult, summarize
from torpor.runs.run_export import check_verified, export_run, is_exported, read_finished
from torpor.runs.run_folder import check_output, open_run_folder, write_json
from torpor.training import data
from torpor.training.config import RunConfig
from torpor.training.progress import RunLog

if TYPE_CHECKING:
    import torch

    from torpor.dormancy import DormantMTP
    from torpor.training.loop import Job

# Settings that may differ between the parts of one run: none decides which batch a step sees. Paths are
# compared by what lies there, and the layout by the checkpoint.
_FREE_SETTINGS = {
    *("output", "data", "text_key", "teacher_cache"),
    *("steps", "epochs", "save_every", "keep", "eval_every", "eval_batches", "log_every"),
    *("micro_batch_size", "recompute", "distributed_optimizer"),
    *("tensor_parallel", "pipeline_parallel", "expert_parallel", "context_parallel", "sequence_parallel"),
}


@dataclass(frozen=True)
class Recipe:
    """What one command does in its own way, its inputs opened and checked.

    Args:
        models: the folders of its models, by the setting that names them, the trained one first.
        layout: how the models are spread over the ranks.
        prepare_data: reads the data, with a folder to keep tokens in; rank 0 calls it before the others.
        build: makes the job of the data and the number of steps, and the handles of the models that sleep, by
            setting.
        export: writes a checkpoint (first argument) as a new folder (second); rank 0 calls it.
        merge: brings the chunks of a finished job into the form that is exported, where that is not the form
            that is trained; every rank calls it.
        notes: lines for the user.
    """

    models: Mapping[str, Folder]
    layout: Layout
    prepare_data: Callable[[Path], data.Windows]
    build: "Callable[[data.Windows, int], tuple[Job, dict[str, DormantMTP]]]"
    export: Callable[[Path, Path], None]
    merge: "Callable[[Sequence[torch.nn.Module]], None] | None" = None
    notes: Sequence[str] = ()

    @property
    def source(self) -> Folder:
        """The model that the run starts from."""
        return next(iter(self.models.values()))


def run_training(config: RunConfig, check_inputs: Callable[[], Recipe]) -> RunResult:
    """Run a recipe, or the rest of one that was interrupted. Every rank calls it.

    All input is checked before anything is built or written; a failure before the first step leaves nothing
    behind. An interrupted run continues from its last checkpoint.

    Args:
        config: what to do.
        check_inputs: opens and checks everything that can be checked without building a model, and writes
            nothing; called once Megatron-Core can be imported.

    Returns:
        How it ended, the same on every rank.

    Raises:
        ConfigError: the configuration or the data cannot be used.
        CheckpointError: a model folder or a checkpoint is damaged or does not fit.
        UnsupportedModelError: a model of a kind that is not known, or that dormancy cannot honour.
        MTPExecutedError: an MTP layer ran although it was asleep.
        MTPTrainedError: an MTP parameter was reached by the optimizer although it was asleep.
        MTPChangedError: an MTP tensor of the run or of the export differs from its source.
        TorporError: the loss became infinite or not a number.
    """
    with _exit_on_sigterm(), ExitStack() as stack:
        # Before the first import of Megatron-Core.
        prepare_host()
        latest = check_output(config)
        recipe = check_inputs()
        parallel.initialize(recipe.layout, config.seed)
        stack.callback(parallel.shutdown)
        ranks = Ranks()
        folder = stack.enter_context(open_run_folder(config, ranks))
        # Rank 0 writes the tokens that the others read.
        ranks.from_rank_0(lambda: recipe.prepare_data(config.output / "tokens") and None)
        windows = recipe.prepare_data(config.output / "tokens")
        steps = data.count_steps(config, windows)
        fingerprint = ranks.from_rank_0(lambda: _fingerprint(config, recipe, windows))
        finished = ranks.from_rank_0(lambda: read_finished(config, recipe.source, steps, fingerprint))
        if finished is not None:
            return finished
        run = _build(config, recipe, windows, steps, fingerprint, latest)
        folder.keep()
        ended = _train(config, run, steps, fingerprint)
        if ended.signal_number and ended.step < steps:
            return ranks.from_rank_0(lambda: summarize(config, ended, export=None))
        dormancy = _prove(config, run, ranks)
        with _checkpoint_to_export(config, recipe, run, ranks, steps, fingerprint) as checkpoint:
            verified = ranks.from_rank_0(
                lambda: export_run(
                    config,
                    recipe.source,
                    lambda out: recipe.export(checkpoint, out),
                    steps=steps,
                    fingerprint=fingerprint,
                )
            )

        def finish() -> RunResult:
            check_verified(config, recipe.source, verified)
            export = config.output / "export"
            result = summarize(config, ended, export=export, dormancy=dormancy, verified=verified)
            write_json(config.output / "summary.json", result.to_json())
            return result

        return ranks.from_rank_0(finish)


def say_tokens(every_s: float = 10.0) -> Callable[[int], None]:
    """Make a function that is told how many tokens there are so far, and tells the user now and then."""
    started = last = time.monotonic()

    def say(count: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= every_s:
            last = now
            print(
                f"tokenizing: {count:,} tokens, {count / (now - started):,.0f}/s", file=sys.stderr, flush=True
            )

    return say


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process through its clean-up; training has its own way with it."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _fingerprint(config: RunConfig, recipe: Recipe, windows: data.Windows) -> dict[str, Any]:
    """What must be the same in all parts of one run."""
    values = {
        **config.model_dump(mode="json", exclude=_FREE_SETTINGS.union(config.models)),
        **{role: folder_digest(folder) for role, folder in recipe.models.items()},
        "data": windows.digest(),
    }
    return dict(json.loads(json.dumps(values)))  # as it will be read back


@dataclass(frozen=True)
class _Run:
    """A run that is ready for its next step."""

    job: "Job"
    asleep: "dict[str, DormantMTP]"  # by setting; a model without MTP layers has no handle
    notes: list[str]
    start_step: int


def _build(
    config: RunConfig,
    recipe: Recipe,
    windows: data.Windows,
    steps: int,
    fingerprint: dict[str, Any],
    latest: Path | None,
) -> _Run:
    job, asleep = recipe.build(windows, steps)
    notes = [
        f"the {role} has no MTP layers: there is nothing to put to sleep"
        for role, folder in recipe.models.items()
        if config.freeze_mtp and not count_mtp_layers(folder).declared
    ]
    notes += [*recipe.notes, *windows.describe()]
    if latest is None:
        return _Run(job, asleep, notes, start_step=0)
    start_step = _resume(latest, job, asleep.get(config.models[0]), fingerprint)
    if start_step > steps:
        raise ConfigError(
            f"{latest} is {start_step} steps into the run, and the run has {steps}\n"
            "  Give more steps, or a new output folder."
        )
    return _Run(job, asleep, notes, start_step)


def _resume(latest: Path, job: "Job", handle: "DormantMTP | None", fingerprint: dict[str, Any]) -> int:
    source = handle.fingerprint() if handle else {}
    state = checkpointing.load_checkpoint(latest, job.chunks, job.optimizer, fingerprint=fingerprint)
    # Loading makes a new baseline; the proof is against the source, so the two must agree.
    for name, digest in (handle.fingerprint() if handle else {}).items():
        if digest != source[name]:
            raise MTPChangedError(
                f"{name} in {latest} differs from the folder that the run started from\n"
                f"  folder sha256 {source[name]}   checkpoint sha256 {digest}\n"
                "  The checkpoint or the folder was changed; start again in a new output folder."
            )
    job.scheduler.step(state.step)
    return state.step


def _train(config: RunConfig, run: _Run, steps: int, fingerprint: dict[str, Any]) -> Ended:
    from torpor.training.loop import Intervals, LoopHooks, StopRequest, train

    def save(step: int) -> None:
        checkpointing.save_checkpoint(
            config.output / "checkpoints",
            step,
            run.job.chunks,
            run.job.optimizer,
            consumed_samples=step * config.global_batch_size,
            fingerprint=fingerprint,
            keep=config.keep,
        )

    with (
        StopRequest() as stop,
        RunLog(
            config.output,
            steps=steps,
            start_step=run.start_step,
            every=config.log_every,
            is_speaker=parallel.global_rank() == 0,
        ) as log,
    ):
        for note in run.notes:
            log.say(note)
        if run.start_step:
            log.say(f"continuing after step {run.start_step}")
        outcome = train(
            run.job,
            steps=steps,
            start_step=run.start_step,
            intervals=Intervals(config.eval_every, config.eval_batches, config.save_every),
            hooks=LoopHooks(on_step=log.on_step, on_evaluation=log.on_evaluation, save=save),
            stop=stop,
        )
    return Ended(run.start_step, outcome.step, outcome.signal_number)


@contextmanager
def _checkpoint_to_export(
    config: RunConfig, recipe: Recipe, run: _Run, ranks: Ranks, steps: int, fingerprint: dict[str, Any]
) -> Iterator[Path]:
    """The newest checkpoint, or one of the merged model that lives as long as the block."""
    latest = checkpointing.find_latest(config.output / "checkpoints")
    assert latest is not None, "the loop saves after its last step"
    if recipe.merge is None or ranks.from_rank_0(lambda: is_exported(config, steps, fingerprint)):
        yield latest
        return
    merged = config.output / "merged"
    ranks.from_rank_0(lambda: shutil.rmtree(merged, ignore_errors=True))
    recipe.merge(run.job.chunks)
    yield checkpointing.save_checkpoint(merged, steps, run.job.chunks)
    ranks.from_rank_0(lambda: shutil.rmtree(merged))


def _prove(config: RunConfig, run: _Run, ranks: Ranks) -> list[dict[str, Any]] | None:
    """Check on every rank that the MTP layers slept; the reports of all ranks, None for an awake run."""
    if not config.freeze_mtp:
        return None
    everyone = ranks.gather(
        lambda: {role: handle.check(run.job.optimizer).to_json() for role, handle in run.asleep.items()}
    )
    if ranks.rank == 0:
        write_json(
            config.output / "dormancy.json",
            {"ranks": [{"rank": rank, **reports} for rank, reports in enumerate(everyone)]},
        )
    return everyone
