"""One distillation run, from a configuration to a verified Hugging Face folder.

OUTPUT/
    run.json          the configuration that the run was started with
    tokens/           the tokenized text
    checkpoints/      what an interrupted run continues from
    metrics.jsonl     one line per step and per evaluation; tensorboard/ holds the same
    dormancy.json     the proof that the MTP layers slept, per rank
    export/           the trained student as a Hugging Face folder
    export.json       the step and the settings that the export is of
    verify.json       the comparison of the export with the student it started from
    summary.json      how the run ended
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torpor.checkpoints.families import check_heads, count_mtp_layers, find_family
from torpor.checkpoints.folder import Folder, open_folder
from torpor.checkpoints.verify import VerifyResult, verify_folders
from torpor.errors import CheckpointError, ConfigError, MTPChangedError, TorporError
from torpor.megatron import checkpointing, parallel
from torpor.megatron.host import prepare_host
from torpor.megatron.models import build_model, build_transformer_config
from torpor.megatron.parallel import Layout
from torpor.megatron.weights import export_folder, load_weights
from torpor.training import data
from torpor.training.config import DistillConfig
from torpor.training.progress import RunLog, read_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torpor.dormancy import DormantMTP
    from torpor.training.loop import Job, Outcome

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Settings that may differ between the parts of one run: none decides which batch a step sees. Paths are
# compared by what lies there, and the layout by the checkpoint.
_FREE_SETTINGS = {
    *("teacher", "student", "output", "data", "text_key"),
    *("steps", "epochs", "save_every", "keep", "eval_every", "eval_batches", "log_every"),
    *("micro_batch_size", "recompute", "distributed_optimizer"),
    *("tensor_parallel", "pipeline_parallel", "expert_parallel", "sequence_parallel"),
}
# Norms, biases and router biases: their bytes tell two trained models apart without reading all of both.
_SMALL_TENSOR_BYTES = 2**16
_RANK_0_MAY_TAKE = timedelta(days=14)


@dataclass(frozen=True)
class DistillResult:
    """How a distillation ended.

    Args:
        output: the run folder.
        export: the trained student's folder, None if a signal ended the run early.
        steps: optimizer steps done.
        resumed_from: steps that earlier parts of the run had done.
        signal_number: the signal that ended the run early, or None.
        first_loss: mean KL divergence per token of the run's first step.
        last_loss: the same of the last.
        held_out: the last evaluation, by name.
        step_ms: median time of a step in this part of the run, in milliseconds.
        tokens_per_s: median rate.
        memory_bytes: peak of rank 0.
        frozen: whether the MTP layers slept.
        mtp_executions: MTP forwards outside inference, over all ranks and both models.
        mtp_tensors: MTP tensors of the export that are byte for byte the source's; None without a comparison.
        trunk_changed: trunk tensors of the export that differ from the source's; None without a comparison.
    """

    output: Path
    export: Path | None
    steps: int
    resumed_from: int
    signal_number: int | None
    first_loss: float | None
    last_loss: float | None
    held_out: dict[str, float]
    step_ms: float | None
    tokens_per_s: float | None
    memory_bytes: int | None
    frozen: bool
    mtp_executions: int | None
    mtp_tensors: int | None
    trunk_changed: int | None

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values; `ok` says whether the run is complete and its export in order."""
        values = asdict(self)
        values |= {"output": str(self.output), "export": str(self.export) if self.export else None}
        return {"ok": self.export is not None, **values}


@dataclass(frozen=True)
class _Inputs:
    """Everything that a run reads, opened and checked."""

    teacher: Folder
    student: Folder
    tokenizer: "PreTrainedTokenizerBase"
    sources: list[data.Source]
    layout: Layout
    latest: Path | None  # the checkpoint to continue from


def distill(config: DistillConfig) -> DistillResult:
    """Run a distillation, or the rest of one that was interrupted. Every rank calls it.

    All input is checked before anything is built or written; a failure before the first step leaves nothing
    behind. An interrupted run continues from its last checkpoint.

    Args:
        config: what to do.

    Returns:
        How it ended, the same on every rank.

    Raises:
        ConfigError: the configuration, the data or the tokenizers cannot be used.
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
        inputs = _check_inputs(config)
        parallel.initialize(inputs.layout, config.seed)
        stack.callback(parallel.shutdown)
        ranks = _Ranks()
        folder = stack.enter_context(_run_folder(config, ranks))
        windows = _prepare_windows(config, inputs, ranks)
        steps = data.count_steps(config, windows)
        fingerprint = ranks.from_rank_0(lambda: _fingerprint(config, inputs, windows))
        finished = ranks.from_rank_0(lambda: _finished_result(config, inputs, steps, fingerprint))
        if finished is not None:
            return finished
        run = _build(config, inputs, windows, steps, fingerprint)
        folder.keep()
        outcome = _train(config, run, steps, fingerprint)
        if outcome.signal_number and outcome.step < steps:
            return ranks.from_rank_0(lambda: _result(config, run, outcome, export=None))
        dormancy = _prove(config, run, ranks)
        verified = ranks.from_rank_0(lambda: _export(config, inputs, steps, fingerprint))
        return ranks.from_rank_0(lambda: _finish(config, run, outcome, dormancy, verified))


# --- before anything is built ---------------------------------------------------------------------------


def _check_inputs(config: DistillConfig) -> _Inputs:
    """Check whatever can be checked without building a model; nothing is written."""
    layout = Layout(
        tensor=config.tensor_parallel,
        pipeline=config.pipeline_parallel,
        expert=config.expert_parallel,
        sequence_parallel=config.sequence_parallel,
    )
    config.check_batch(layout.data(int(os.environ.get("WORLD_SIZE", "1"))))
    latest = _check_output(config)
    folders = {
        name: _check_model(name, getattr(config, name), config, layout) for name in ("teacher", "student")
    }
    sources = data.find_sources(config.data)
    data.check_not_empty(sources, config.text_key)
    tokenizers = {name: data.load_tokenizer(folder.path) for name, folder in folders.items()}
    data.check_tokenizers(
        tokenizers["teacher"],
        tokenizers["student"],
        (folders["teacher"].config["vocab_size"], folders["student"].config["vocab_size"]),
    )
    return _Inputs(folders["teacher"], folders["student"], tokenizers["student"], sources, layout, latest)


def _check_model(role: str, path: Path, config: DistillConfig, layout: Layout) -> Folder:
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "does not exist"
        raise ConfigError(f"`{role}`: {path} {what}\n  Give the path of a Hugging Face model folder.")
    folder = open_folder(path)
    # Before the whole map, whose complaint would not say that it is the heads that are missing.
    check_heads(folder)
    find_family(folder.config).name_map(folder.config).check(folder.tensors)
    build_transformer_config(folder.config, layout, _DTYPES[config.dtype], recompute=config.recompute)
    longest = folder.config.get("max_position_embeddings")
    if longest is not None and config.sequence_length > longest:
        raise ConfigError(
            f"`sequence_length` is {config.sequence_length}, and the {role}'s config.json allows "
            f"max_position_embeddings {longest}\n  Use a sequence_length of at most {longest}."
        )
    return folder


def _check_output(config: DistillConfig) -> Path | None:
    output = config.output
    if output.exists() and not output.is_dir():
        raise ConfigError(f"`output`: {output} is a file\n  Give the path of a folder.")
    # run.partial is what a kill leaves of the first file that a run writes.
    if not output.exists() or all(path.name == "run.partial" for path in output.iterdir()):
        return None
    if not (output / "run.json").is_file():
        raise ConfigError(
            f"`output`: {output} is not empty and holds no run of `torpor distill`\n"
            "  Give a new folder; nothing is overwritten."
        )
    return checkpointing.find_latest(output / "checkpoints")


def _finished_result(
    config: DistillConfig, inputs: _Inputs, steps: int, fingerprint: dict[str, Any]
) -> DistillResult | None:
    """What a complete run reported, if it is the run that is asked for and its export is in order."""
    summary, record = config.output / "summary.json", _export_record(config)
    if record is None or not summary.exists():
        return None
    differing = [name for name, value in fingerprint.items() if record["fingerprint"].get(name) != value]
    differing += ["steps"] if record["step"] != steps else []
    if differing:
        raise ConfigError(
            f"`output`: {config.output} holds a complete run of {record['step']} steps with other settings"
            f" or inputs: {', '.join(f'`{name}`' for name in differing)}\n  Give a new folder."
        )
    try:
        values = json.loads(summary.read_text(encoding="utf-8"))
        values.pop("ok")
        values |= {"output": config.output, "export": config.output / "export"}
        result = DistillResult(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{summary} is damaged: {error}\n  Remove it and give the same command again."
        ) from error
    _check_verified(config, _verify(config, inputs))
    return result


# --- ranks ----------------------------------------------------------------------------------------------


class _Ranks:
    """What the ranks tell each other beside training."""

    def __init__(self) -> None:
        self.rank = parallel.global_rank()
        self.size = parallel.world_size()
        # Tokenizing and exporting may take rank 0 longer than a training step may ever wait.
        self._group = (
            torch.distributed.new_group(backend="gloo", timeout=_RANK_0_MAY_TAKE) if self.size > 1 else None
        )

    def from_rank_0[T](self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and return its result on every rank; its error is raised on every rank."""
        result: list[Any] = [None, None]
        original: Exception | None = None
        if self.rank == 0:
            result[0], original = _attempt(action)
            result[1] = _carried(original, 0)
        if self.size > 1:
            torch.distributed.broadcast_object_list(result, src=0, group=self._group)
        _raise_alike(original, result[1])
        return result[0]

    def gather[T](self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and return all results; the first rank's error is raised on every rank.

        Args:
            action: something without collective calls, which a rank that fails would leave the others in.
        """
        result, original = _attempt(action)
        mine = (result, _carried(original, self.rank))
        everyone: list[Any] = [mine]
        if self.size > 1:
            everyone = [None] * self.size
            torch.distributed.all_gather_object(everyone, mine, group=self._group)
        for rank, (_, error) in enumerate(everyone):
            if error is not None:
                _raise_alike(original if rank == self.rank else None, error)
        return [value for value, _ in everyone]


def _attempt[T](action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, error


def _carried(error: Exception | None, rank: int) -> tuple[type[TorporError], str] | None:
    """An error in a form that other ranks can raise too."""
    if error is None:
        return None
    if isinstance(error, TorporError):
        return type(error), str(error)
    return TorporError, f"rank {rank} failed: {type(error).__name__}: {error}"


def _raise_alike(original: Exception | None, carried: tuple[type[TorporError], str] | None) -> None:
    """Raise an error that every rank raises now, in its original form where it comes from."""
    if carried is None:
        return
    kind, message = carried
    error = original if original is not None else kind(message)
    if isinstance(error, TorporError):
        error.is_on_every_rank = True
    raise error


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


class _RunFolder:
    """What a new run puts on disk before its first step, to be taken away again if there is none."""

    def __init__(self, output: Path):
        self._output = output
        self._made_parents = [path for path in (output, *output.parents) if not path.exists()]
        self._is_kept = False

    def keep(self) -> None:
        """From here on the folder holds something to continue from."""
        self._is_kept = True

    def remove(self) -> None:
        """Take away what was made, unless it is to be kept; the folder was missing or empty before."""
        if self._is_kept or not self._output.exists():
            return
        for path in self._output.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        with suppress(OSError):  # somebody else has put something beside it: theirs stays
            for path in self._made_parents:
                path.rmdir()


@contextmanager
def _run_folder(config: DistillConfig, ranks: _Ranks) -> Iterator[_RunFolder]:
    """Make the run folder on rank 0; an error before `keep` removes whatever was made."""
    folder = _RunFolder(config.output)
    if ranks.rank != 0 or (config.output / "run.json").exists():
        folder.keep()
    try:
        with ExitStack() as lock:
            ranks.from_rank_0(lambda: _make_run_folder(config, folder, lock))
            yield folder
    except BaseException:
        folder.remove()
        raise


def _make_run_folder(config: DistillConfig, folder: _RunFolder, lock: ExitStack) -> None:
    """Make the folder and hold it against other processes for as long as `lock` is open."""
    record = config.output / "run.json"
    try:
        config.output.mkdir(parents=True, exist_ok=True)
        # First of all: it tells a later start that the folder is a run's.
        if not record.exists():
            _write_json(record, config.model_dump(mode="json"))
        file = lock.enter_context(record.open("rb"))
    except OSError as error:
        raise ConfigError(
            f"`output`: {config.output} cannot be written: {error.strerror or error}\n"
            "  Give a folder that can."
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        folder.keep()  # it is the other process's
        raise ConfigError(
            f"`output`: another process is running in {config.output}\n"
            "  Wait for it to end, or give another folder."
        ) from None
    (config.output / "tokens").mkdir(exist_ok=True)


def _write_json(path: Path, values: Any) -> None:
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)


# --- building -------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """A run that is ready for its next step."""

    job: "Job"
    asleep: "dict[str, DormantMTP]"  # by role; a model without MTP layers has no handle
    start_step: int


def _prepare_windows(config: DistillConfig, inputs: _Inputs, ranks: _Ranks) -> data.PackedWindows:
    def prepare() -> data.PackedWindows:
        return data.prepare_windows(
            inputs.sources,
            config.text_key,
            inputs.tokenizer,
            vocab_size=inputs.student.config["vocab_size"],
            folder=config.output / "tokens",
            settings=config,
            on_progress=_say_tokens(),
        )

    ranks.from_rank_0(lambda: prepare() and None)
    return prepare()


def _say_tokens(every_s: float = 10.0) -> Callable[[int], None]:
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


def _fingerprint(config: DistillConfig, inputs: _Inputs, windows: data.PackedWindows) -> dict[str, Any]:
    """What must be the same in all parts of one run."""
    settings = config.model_dump(mode="json", exclude=_FREE_SETTINGS)
    values = {
        **settings,
        "teacher": _folder_digest(inputs.teacher),
        "student": _folder_digest(inputs.student),
        "data": windows.digest(),
    }
    return dict(json.loads(json.dumps(values)))  # as it will be read back


def _folder_digest(folder: Folder) -> str:
    digest = hashlib.sha256(folder.config_bytes)
    for name, entry in sorted(folder.tensors.items()):
        digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
        if entry.nbytes <= _SMALL_TENSOR_BYTES:
            digest.update(folder.read_bytes(name))
    return digest.hexdigest()


def _build(
    config: DistillConfig,
    inputs: _Inputs,
    windows: data.PackedWindows,
    steps: int,
    fingerprint: dict[str, Any],
) -> _Run:
    from torpor.dormancy import freeze_mtp
    from torpor.training.distillation import (
        build_distillation_model,
        distillation_objective,
        shapes_between_stages,
    )
    from torpor.training.loop import prepare_job

    dtype = _DTYPES[config.dtype]
    student = build_model(inputs.student.config, inputs.layout, dtype, recompute=config.recompute)
    load_weights(student, inputs.student)
    # Nothing of the teacher is kept for backward, so there is nothing to recompute.
    teacher = build_model(inputs.teacher.config, inputs.layout, dtype)
    load_weights(teacher, inputs.teacher)
    asleep = {
        role: freeze_mtp(chunks)
        for role, chunks in (("student", student), ("teacher", teacher))
        if config.freeze_mtp and chunks[0].config.mtp_num_layers
    }
    model = build_distillation_model(student[0], teacher[0], temperature=config.temperature)
    job = prepare_job(
        [model],
        config,
        windows,
        distillation_objective(),
        steps=steps,
        adjust_tensor_shapes=shapes_between_stages(
            model, sequence_length=config.sequence_length, micro_batch_size=config.micro_batch_size
        ),
    )
    run = _Run(job, asleep, start_step=0)
    if inputs.latest is not None:
        run.start_step = _resume(inputs.latest, run, fingerprint)
    if run.start_step > steps:
        raise ConfigError(
            f"{inputs.latest} is {run.start_step} steps into the run, and the run has {steps}\n"
            "  Give more steps, or a new output folder."
        )
    return run


def _resume(latest: Path, run: _Run, fingerprint: dict[str, Any]) -> int:
    handle = run.asleep.get("student")
    source = handle.fingerprint() if handle else {}
    state = checkpointing.load_checkpoint(latest, run.job.chunks, run.job.optimizer, fingerprint=fingerprint)
    # Loading makes a new baseline; the proof is against the source, so the two must agree.
    for name, digest in (handle.fingerprint() if handle else {}).items():
        if digest != source[name]:
            raise MTPChangedError(
                f"{name} in {latest} differs from the student's folder\n"
                f"  folder sha256 {source[name]}   checkpoint sha256 {digest}\n"
                "  The checkpoint or the folder was changed; start again in a new output folder."
            )
    run.job.scheduler.step(state.step)
    return state.step


# --- training -------------------------------------------------------------------------------------------


def _train(config: DistillConfig, run: _Run, steps: int, fingerprint: dict[str, Any]) -> "Outcome":
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
        if config.freeze_mtp:
            for role in ("student", "teacher"):
                if role not in run.asleep:
                    log.say(f"the {role} has no MTP layers: there is nothing to put to sleep")
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
    return outcome


# --- proof, export, summary -----------------------------------------------------------------------------


def _prove(config: DistillConfig, run: _Run, ranks: _Ranks) -> list[dict[str, Any]] | None:
    """Check on every rank that the MTP layers slept; the reports of all ranks, None for an awake run."""
    if not config.freeze_mtp:
        return None
    everyone = ranks.gather(
        lambda: {role: handle.check(run.job.optimizer).to_json() for role, handle in run.asleep.items()}
    )
    if ranks.rank == 0:
        _write_json(
            config.output / "dormancy.json",
            {"ranks": [{"rank": rank, **reports} for rank, reports in enumerate(everyone)]},
        )
    return everyone


def _export(
    config: DistillConfig, inputs: _Inputs, steps: int, fingerprint: dict[str, Any]
) -> VerifyResult | None:
    """Write the export and compare it with the student, if that has MTP layers to be compared."""
    checkpoint = checkpointing.find_latest(config.output / "checkpoints")
    assert checkpoint is not None, "the loop saves after its last step"
    out, stale = config.output / "export", config.output / "export.stale"
    wanted = {"step": steps, "fingerprint": fingerprint}
    # An earlier part of the run may have got as far, or may have ended with fewer steps.
    if _export_record(config) != wanted:
        shutil.rmtree(stale, ignore_errors=True)
        if out.exists():
            out.rename(stale)
        export_folder(checkpoint, inputs.student, out, mtp="source" if config.freeze_mtp else "live")
        _write_json(config.output / "export.json", wanted)
        shutil.rmtree(stale, ignore_errors=True)
    verified = _verify(config, inputs)
    if verified is not None:
        _write_json(config.output / "verify.json", verified.to_json())
    return verified


def _export_record(config: DistillConfig) -> dict[str, Any] | None:
    """Which step and settings the export is of; None if there is no export, or none that is known of."""
    record = config.output / "export.json"
    if not record.exists() or not (config.output / "export").exists():
        return None
    try:
        values = json.loads(record.read_text(encoding="utf-8"))
        return {"step": values["step"], "fingerprint": dict(values["fingerprint"])}
    except (ValueError, KeyError, TypeError):
        return None


def _verify(config: DistillConfig, inputs: _Inputs) -> VerifyResult | None:
    if not count_mtp_layers(inputs.student).declared:
        return None
    return verify_folders(inputs.student.path, config.output / "export")


def _check_verified(config: DistillConfig, verified: VerifyResult | None) -> None:
    if config.freeze_mtp and verified is not None and not verified.ok:
        raise MTPChangedError(
            f"{config.output / 'export'} differs from {config.student} where it must not; see "
            f"{config.output / 'verify.json'}\n"
            "  Do not ship this export. `torpor verify STUDENT EXPORT` lists every difference."
        )


def _finish(
    config: DistillConfig,
    run: _Run,
    outcome: "Outcome",
    dormancy: list[dict[str, Any]] | None,
    verified: VerifyResult | None,
) -> DistillResult:
    result = _result(
        config, run, outcome, export=config.output / "export", dormancy=dormancy, verified=verified
    )
    _check_verified(config, verified)
    _write_json(config.output / "summary.json", result.to_json())
    return result


def _result(
    config: DistillConfig,
    run: _Run,
    outcome: "Outcome",
    *,
    export: Path | None,
    dormancy: list[dict[str, Any]] | None = None,
    verified: VerifyResult | None = None,
) -> DistillResult:
    records = read_metrics(config.output / "metrics.jsonl")
    done = [record for record in records if record["kind"] == "step"]
    recent = [record for record in done if record["step"] > run.start_step]
    held_out = [record for record in records if record["kind"] == "evaluation"]
    checks = verified.to_json() if verified else None
    return DistillResult(
        output=config.output,
        export=export,
        steps=outcome.step,
        resumed_from=run.start_step,
        signal_number=outcome.signal_number if export is None else None,
        first_loss=done[0]["loss"] if done else None,
        last_loss=done[-1]["loss"] if done else None,
        held_out={
            name.removeprefix("held_out_"): value
            for name, value in (held_out[-1] if held_out else {}).items()
            if name.startswith("held_out_")
        },
        step_ms=statistics.median(r["step_ms"] for r in recent) if recent else None,
        tokens_per_s=statistics.median(r["tokens_per_s"] for r in recent) if recent else None,
        memory_bytes=max(r["memory_bytes"] for r in recent) if recent else None,
        frozen=config.freeze_mtp,
        mtp_executions=(
            sum(report["executions"] for reports in dormancy for report in reports.values())
            if dormancy is not None
            else None
        ),
        mtp_tensors=checks["mtp"]["identical"] if checks else None,
        trunk_changed=checks["trunk"]["changed"] if checks else None,
    )
