"""The whole product on a small model: teacher, student, distillation asleep, export, proof, report."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torpor.errors import ConfigError, TorporError
from torpor.reports.results import RunReport, Stage

if TYPE_CHECKING:
    from torpor.checkpoints.folder import Folder
    from torpor.runs.acceptance import DraftCounts
    from torpor.runs.costs import MeasuredCost
    from torpor.training.data import PackedWindows

MARKER = ".torpor-demo"
STAGES = 7
# A second thread gains little on operations this small, and on a busy machine each waits for the other.
THREADS = 1
# Steps before measuring, in which caches and optimizer state come to be.
UNCOUNTED_STEPS = 3
# Importing everything takes two ranks half a minute on a slow machine.
START_WITHIN_S = 180.0
NEVER_STARTED = 124


@dataclass(frozen=True)
class DemoSize:
    """How large everything is.

    Args:
        characters: Text to train on.
        vocab_size: Tokens of the tokenizer.
        hidden_size: Width of both models; a multiple of 8.
        pattern: Teacher's layers: M Mamba-2, * attention, - MLP, E experts.
        mtp_pattern: Layers inside the one MTP layer.
        kept: Teacher's layers that the student keeps.
        sequence_length: Tokens in a window.
        batch: Windows in a step.
        pretraining_steps: Steps of the teacher.
        distillation_steps: Steps of the student.
        evaluate_every: Steps between two evaluations of the student.
        held_out_batches: Batches that acceptance and evaluations are measured on.
        measured_steps: Steps timed in each arrangement of the heads.
    """

    characters: int = 3_000_000
    vocab_size: int = 1024
    hidden_size: int = 128
    pattern: str = "M*-EM*-E"
    mtp_pattern: str = "*E"
    kept: tuple[int, ...] = (4, 5, 6, 7)
    sequence_length: int = 128
    batch: int = 8
    pretraining_steps: int = 400
    distillation_steps: int = 300
    evaluate_every: int = 50
    held_out_batches: int = 8
    measured_steps: int = 15


def run_demo(output: Path, *, ranks: int, size: DemoSize | None = None) -> RunReport:
    """Run the demo and write everything it makes into `output`.

    Args:
        output: Folder; made if missing, and emptied if an earlier demo made it.
        ranks: Processes that distil together, 1 or 2.
        size: How large; the default takes a few minutes on two cores.

    Returns:
        What `output`/report.html shows; `passed` tells whether every check held.

    Raises:
        ConfigError: `output` holds something that no demo made.
        TorporError: A part of the demo failed.
    """
    return _Demo(output, ranks, size or DemoSize()).run()


def hf_config(size: DemoSize, vocab_size: int) -> dict[str, Any]:
    """The teacher's `config.json`: a hybrid of the `nemotron_h` family with one MTP layer."""
    hidden = size.hidden_size
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "torch_dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": len(size.pattern),
        "hybrid_override_pattern": size.pattern,
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": size.mtp_pattern,
        "tie_word_embeddings": False,
        "max_position_embeddings": size.sequence_length,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "intermediate_size": 2 * hidden,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "attention_bias": False,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": hidden // 2,
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "chunk_size": 64,
        "expand": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden,
        "moe_shared_expert_intermediate_size": hidden,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


class _Demo:
    """The demo's stages, in order, and what they leave for the report."""

    def __init__(self, output: Path, ranks: int, size: DemoSize):
        self.output, self.ranks, self.size = output, ranks, size
        self.teacher, self.student = output / "teacher", output / "student"
        self.pretraining, self.distillation = output / "pretraining", output / "distillation"
        self.stages: list[Stage] = []
        self.notes: list[str] = []
        self.started = time.perf_counter()

    def run(self) -> RunReport:
        """Go through all stages. A check that fails ends in the report, not in an exception."""
        claim_folder(self.output)
        say(f"Torpor's demo: about four minutes on two cores; everything goes to {self.output}")
        with self.stage("Import PyTorch and Megatron-Core", "10 s") as stage:
            import torch

            from torpor.megatron import parallel
            from torpor.megatron.parallel import Layout

            torch.set_num_threads(THREADS)
            parallel.initialize(Layout(), seed=1)
            stage.detail = "one rank, for everything but the distillation"
        try:
            return self._run_stages()
        finally:
            parallel.shutdown()

    def _run_stages(self) -> RunReport:
        from torpor.checkpoints.folder import open_folder
        from torpor.checkpoints.verify import verify_folders

        with self.stage("Collect text, train a tokenizer", "5 s") as stage:
            vocab_size, text = self._make_text()
            stage.detail = text
        with self.stage("Pre-train the teacher, its head awake", "90 s") as stage:
            windows = self._pretrain(vocab_size)
            teacher = open_folder(self.teacher)
            teacher_drafts = self._count_drafts(teacher, windows)
            stage.detail = (
                f"{self.size.pretraining_steps} steps; the head's drafts are accepted at"
                f" {teacher_drafts.rate:.1%}, chance is {teacher_drafts.chance:.1%}"
            )
        with self.stage("Make a student: leave out layers", "5 s") as stage:
            from torpor.runs.pruning import drop_layers

            drop_layers(teacher, self.size.kept, self.student)
            student = open_folder(self.student)
            before_drafts = self._count_drafts(student, windows)
            stage.detail = (
                f"layers {', '.join(map(str, self.size.kept))} of {len(self.size.pattern)} stay, and so does"
                " the head; every tensor that stays keeps its bytes"
            )
        with self.stage("Distil the student, both heads asleep", "70 s") as stage:
            stage.command = self._distill()
            stage.detail = f"{self.size.distillation_steps} steps, ranks: {self.ranks}, then exported"
        with self.stage("Verify the export", "5 s") as stage:
            verified = verify_folders(self.student, self.distillation / "export")
            after_drafts = self._count_drafts(open_folder(self.distillation / "export"), windows)
            stage.command = f"torpor verify {self.student} {self.distillation / 'export'}"
            stage.detail = (
                f"{len(verified.mtp_names('identical'))} of {len(verified.mtp)} MTP tensors identical,"
                f" {verified.trunk_changed} of {verified.trunk_tensors} trunk tensors changed"
            )
        with self.stage("Measure a step: heads asleep, awake, absent", "15 s") as stage:
            costs = self._measure(student, teacher, windows)
            stage.detail = f"{self.size.measured_steps} steps of each, taking turns in one process"

        from torpor.reports.html import write_report
        from torpor.runs.demo_report import Findings, build_report

        report = build_report(
            Findings(
                teacher=teacher,
                student=student,
                pretraining=self.pretraining,
                distillation=self.distillation,
                configuration=self.output / "distill.yaml",
                ranks=self.ranks,
                text=text,
                windows=windows,
                teacher_drafts=teacher_drafts,
                before_drafts=before_drafts,
                after_drafts=after_drafts,
                verified=verified,
                costs=costs,
                cost_note=(
                    f"One distillation step, student and teacher, {self.size.batch} windows of"
                    f" {self.size.sequence_length} tokens, FP32, one process."
                    f" {self.size.measured_steps} steps of each arrangement, taking turns, after"
                    f" {UNCOUNTED_STEPS} that do not count. Memory is counted exactly: bytes that autograd"
                    " saves, that DDP and the optimizer allocate, and that both models' parameters and"
                    " buffers fill."
                ),
                stages=tuple(self.stages),
                notes=tuple(self.notes),
                seconds=time.perf_counter() - self.started,
            )
        )
        write_report(report, self.output / "report.html")
        return report

    @contextmanager
    def stage(self, name: str, usual: str) -> Iterator["_StageNotes"]:
        """Announce a stage, time it, and keep what the block notes about it."""
        say(f"[{len(self.stages) + 1}/{STAGES}] {name} (usually {usual} on two cores)")
        notes, started = _StageNotes(), time.perf_counter()
        yield notes
        seconds = time.perf_counter() - started
        self.stages.append(Stage(name, seconds, notes.detail, notes.command))
        say(f"      {notes.detail} ({seconds:.1f} s)")

    def _make_text(self) -> tuple[int, str]:
        from torpor.runs.corpus import train_tokenizer, write_standard_library

        corpus = write_standard_library(self.output / "text.jsonl", max_characters=self.size.characters)
        vocab_size = train_tokenizer(corpus, self.output / "tokenizer", vocab_size=self.size.vocab_size)
        return vocab_size, (
            f"{corpus.documents} modules of Python's standard library, {corpus.characters:,} characters,"
            f" {vocab_size:,} tokens"
        )

    def _settings(self, steps: int) -> dict[str, Any]:
        """What pre-training, distillation and measurement have in common."""
        return {
            "sequence_length": self.size.sequence_length,
            "global_batch_size": self.size.batch,
            "steps": steps,
            "warmup_steps": min(20, steps // 2),
            "weight_decay": 0.1,
            "dtype": "fp32",
            "eval_every": self.size.evaluate_every,
            "eval_batches": self.size.held_out_batches,
            "held_out": 0.02,
            "log_every": 25,
            "seed": 1234,
        }

    def _pretrain(self, vocab_size: int) -> "PackedWindows":
        """Train the teacher from random weights, trunk and head together, and write it as a folder."""
        import torch

        from torpor.megatron.models import build_model
        from torpor.megatron.parallel import Layout
        from torpor.megatron.weights import write_folder
        from torpor.training.config import OptimizationConfig
        from torpor.training.data import load_tokenizer, prepare_windows
        from torpor.training.loop import (
            Intervals,
            LoopHooks,
            StopRequest,
            language_model_objective,
            prepare_job,
            train,
        )
        from torpor.training.progress import RunLog
        from torpor.training.sources import find_sources

        steps = self.size.pretraining_steps
        settings = OptimizationConfig(
            **self._settings(steps), micro_batch_size=self.size.batch, lr=3e-3, min_lr=3e-4
        )
        (self.pretraining / "tokens").mkdir(parents=True)
        windows = prepare_windows(
            find_sources([self.output / "text.jsonl"]),
            "text",
            load_tokenizer(self.output / "tokenizer"),
            vocab_size=vocab_size,
            folder=self.pretraining / "tokens",
            settings=settings,
        )
        config = hf_config(self.size, vocab_size)
        chunks = build_model(config, Layout(), torch.float32)
        job = prepare_job(chunks, settings, windows, language_model_objective(), steps=steps)
        with (
            StopRequest() as stop,
            RunLog(
                self.pretraining, steps=steps, start_step=0, every=settings.log_every, is_speaker=True
            ) as log,
        ):
            outcome = train(
                job,
                steps=steps,
                intervals=Intervals(evaluate=settings.eval_every, evaluation_batches=settings.eval_batches),
                hooks=LoopHooks(on_step=log.on_step, on_evaluation=log.on_evaluation),
                stop=stop,
            )
        if outcome.signal_number:
            raise SystemExit(128 + outcome.signal_number)
        companions = sorted((self.output / "tokenizer").iterdir())
        write_folder(chunks, config, self.teacher, companions=companions)
        return windows

    def _count_drafts(self, folder: "Folder", windows: "PackedWindows") -> "DraftCounts":
        """Load a folder and measure its one head on text that nothing was trained on."""
        import torch

        from torpor.megatron.host import current_device
        from torpor.megatron.models import build_model
        from torpor.megatron.parallel import Layout
        from torpor.megatron.weights import load_weights
        from torpor.runs.acceptance import count_accepted
        from torpor.training.data import BatchPlan, held_out_batches

        plan = BatchPlan(self.size.batch, self.size.batch, data_rank=0, data_size=1)
        batches = (
            batch.tokens_BS
            for index in range(self.size.held_out_batches)
            for batch in held_out_batches(windows, plan, index, current_device())
        )
        chunks = build_model(folder.config, Layout(), torch.float32)
        load_weights(chunks, folder)
        (counts,) = count_accepted(chunks[0], batches)
        return counts

    def _distill(self) -> str:
        """Write distill.yaml, start what a user would start, and return the command as they would type it."""
        import yaml

        path = self.output / "distill.yaml"
        settings = {
            "teacher": "teacher",
            "student": "student",
            "data": "text.jsonl",
            "output": "distillation",
            "freeze_mtp": True,
            **self._settings(self.size.distillation_steps),
            "micro_batch_size": self.size.batch // self.ranks,
            "lr": 2e-3,
            "min_lr": 2e-4,
            "save_every": max(self.size.distillation_steps // 2, 1),
        }
        path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        code = launch_distillation(path, self.ranks, self.distillation / "metrics.jsonl")
        if code and self.ranks > 1 and not (self.distillation / "metrics.jsonl").exists():
            reason = (
                f"{self.ranks} ranks could not work together on this machine (exit code {code}, see above)"
            )
            say(f"      {reason}: running on one")
            self.notes.append(f"{reason}; the distillation ran on one rank.")
            self.ranks = 1
            settings["micro_batch_size"] = self.size.batch
            path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
            code = launch_distillation(path, self.ranks, self.distillation / "metrics.jsonl")
        if code:
            raise TorporError(
                f"the distillation ended with exit code {code}; what it said is above\n"
                f"  To see it again: torpor distill {path}"
            )
        if self.ranks == 1:
            return f"torpor distill {path}"
        return f"torchrun --nproc-per-node {self.ranks} -m torpor distill {path}"

    def _measure(
        self, student: "Folder", teacher: "Folder", windows: "PackedWindows"
    ) -> list["MeasuredCost"]:
        from torpor.runs.costs import measure_costs
        from torpor.training.config import OptimizationConfig
        from torpor.training.progress import format_duration

        steps = self.size.measured_steps
        settings = OptimizationConfig(
            **self._settings(UNCOUNTED_STEPS + steps), micro_batch_size=self.size.batch, lr=1e-4
        )
        rounds, started = UNCOUNTED_STEPS + steps, time.perf_counter()

        def show(done: int) -> None:
            left = (time.perf_counter() - started) / done * (rounds - done)
            if done % 6 == 0 and done < rounds:
                say(f"round {done}/{rounds}  left {format_duration(left)}")

        return measure_costs(
            student, teacher, settings, windows, warmup=UNCOUNTED_STEPS, steps=steps, on_round=show
        )


@dataclass
class _StageNotes:
    detail: str = ""
    command: str | None = None


def say(text: str) -> None:
    """Tell the user something on stderr."""
    print(text, file=sys.stderr, flush=True)


def claim_folder(output: Path) -> None:
    """Make `output` an empty folder of the demo's own; only what an earlier demo made is removed.

    Raises:
        ConfigError: Something else is there.
    """
    if output.exists() and not output.is_dir():
        raise ConfigError(
            f"--output {output} is a file\n  The demo needs a folder of its own: --output FOLDER"
        )
    if output.is_dir() and any(output.iterdir()):
        if not (output / MARKER).is_file():
            raise ConfigError(
                f"--output {output} is not empty and holds no earlier demo\n"
                "  The demo removes nothing that it did not make: choose another folder with --output."
            )
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).touch()


def launch_distillation(config: Path, ranks: int, metrics: Path) -> int:
    """Start `torpor distill` on `ranks` processes of this machine and wait for it.

    Args:
        config: The YAML file.
        ranks: Processes.
        metrics: File whose appearance shows that training has begun.

    Returns:
        The exit code; `NEVER_STARTED` if nothing was trained within `START_WITHIN_S`.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
    started = time.monotonic()
    # What it prints is progress here: this command's own result is the report.
    process = subprocess.Popen(distill_command(config, ranks), stdout=sys.stderr, env=environment)
    try:
        while process.poll() is None:
            if time.monotonic() - started > START_WITHIN_S and not metrics.exists():
                return NEVER_STARTED
            time.sleep(0.2)
        return process.returncode
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def distill_command(config: Path, ranks: int) -> list[str]:
    """What starts `torpor distill CONFIG` on `ranks` processes of this machine."""
    module = ["-m", "torpor", "distill", str(config)]
    if ranks == 1:
        return [sys.executable, *module]
    # The loopback address, so that it works where the machine's own name resolves to nothing.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [sys.executable, *launcher, "--nproc-per-node", str(ranks), *module]
