"""What the demo found, as the report that a person reads."""

import datetime
import importlib.metadata
import json
import os
import platform
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torpor import __version__
from torpor.checkpoints.families import find_family
from torpor.checkpoints.folder import Folder
from torpor.checkpoints.verify import VerifyResult
from torpor.reports.results import Acceptance, Curve, Plot, RunReport, Stage, StepCost, TensorProof
from torpor.runs.acceptance import DraftCounts
from torpor.runs.costs import MeasuredCost
from torpor.training.data import PackedWindows
from torpor.training.progress import read_metrics

# A head that has learned nothing drafts at chance or below.
CLEARLY_BETTER = 2.0
ARRANGEMENT_LABELS = {
    "asleep": "asleep (freeze_mtp)",
    "awake": "awake, trained along",
    "absent": "built without heads",
}


@dataclass(frozen=True)
class Findings:
    """What the demo's stages found out.

    Args:
        teacher: The teacher's folder.
        student: The student's, before distillation.
        pretraining: Run folder of the teacher, with metrics.jsonl.
        distillation: Run folder of the student.
        configuration: The distillation's YAML file.
        ranks: Processes that distilled.
        text: What the text is, in words.
        windows: The text.
        teacher_drafts: Drafts of the teacher's head.
        before_drafts: Drafts of the student's head before distillation.
        after_drafts: The same after it.
        verified: The comparison of the export with the student.
        costs: Step costs: asleep, awake, absent.
        cost_note: How they were measured.
        stages: What was run.
        notes: What went otherwise than planned.
        seconds: Duration of the demo.
    """

    teacher: Folder
    student: Folder
    pretraining: Path
    distillation: Path
    configuration: Path
    ranks: int
    text: str
    windows: PackedWindows
    teacher_drafts: DraftCounts
    before_drafts: DraftCounts
    after_drafts: DraftCounts
    verified: VerifyResult
    costs: list[MeasuredCost]
    cost_note: str
    stages: tuple[Stage, ...]
    notes: tuple[str, ...]
    seconds: float


def build_report(found: Findings) -> RunReport:
    """Arrange the findings for the page; decide whether every check held."""
    checks = run_checks(found)
    first, last = held_out_divergence(found.distillation)
    asleep, awake, absent = (step_cost(cost) for cost in found.costs)
    identical = len(found.verified.mtp_names("identical"))
    return RunReport(
        title="A model distilled with its heads asleep",
        summary=(
            "A small hybrid teacher (Mamba-2, attention, MLP and mixture-of-experts layers) was"
            " pre-trained with a"
            " working multi-token-prediction head. Some of its layers were left out, and the rest was"
            " distilled"
            " back towards it while both heads slept."
        ),
        passed=all(held for held, _ in checks),
        verdict=tuple(text if held else f"FAILED: {text}" for held, text in checks),
        figures=(
            (f"{identical} of {len(found.verified.mtp)}", "MTP tensors byte-identical after training"),
            (f"{count_executions(found.distillation)}", "MTP forwards in training, all ranks, both models"),
            (f"{first:.2f} \u2192 {last:.2f}", "held-out KL to the teacher, nats per token"),
            (
                f"{found.before_drafts.rate:.0%} \u2192 {found.after_drafts.rate:.0%}",
                "of the student's drafts accepted, its head unchanged;"
                f" the teacher's: {found.teacher_drafts.rate:.0%}",
            ),
            (f"{asleep.median_ms / awake.median_ms:.2f}\u00d7", "step time, asleep against awake"),
            (
                f"{asleep.saved_bytes / awake.saved_bytes:.2f}\u00d7",
                "memory saved for backward, asleep against awake",
            ),
        ),
        plots=build_plots(found),
        acceptances=(
            acceptance("teacher", found.teacher_drafts),
            acceptance("student, layers left out", found.before_drafts),
            acceptance("student, distilled", found.after_drafts),
        ),
        costs=(asleep, awake, absent),
        cost_note=found.cost_note,
        tensors=tuple(
            TensorProof(
                tensor.name,
                tensor.source.dtype,
                tensor.source.shape,
                tensor.source_sha256,
                tensor.export_sha256,
            )
            for tensor in found.verified.mtp
            if tensor.source and tensor.source_sha256
        ),
        stages=found.stages,
        facts=build_facts(found),
        configuration=found.configuration.read_text(encoding="utf-8"),
        seconds=found.seconds,
        created=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        notes=(
            *found.notes,
            "Everything ran on a CPU, which is for correctness and small work. A GPU's step times have other"
            " proportions; only what is measured there can be said of it.",
            "Acceptance is greedy and measured on held-out source code of the same kind as the training"
            " text, much"
            " of which is easy to guess. A head accepted more often than another is not a better model.",
        ),
    )


def run_checks(found: Findings) -> list[tuple[bool, str]]:
    """Every check of the demo: whether it held, and what was found."""
    verified, teacher = found.verified, found.teacher_drafts
    first, last = held_out_divergence(found.distillation)
    executions = count_executions(found.distillation)
    identical, tensors = len(verified.mtp_names("identical")), len(verified.mtp)
    source, export = verified.source_count, verified.export_count
    problems = len(verified.trunk_missing) + len(verified.trunk_unexpected) + len(verified.trunk_mismatched)
    return [
        (
            identical == tensors > 0,
            f"{identical} of {tensors} MTP tensors have the name, dtype, shape and SHA-256 they had"
            " before training",
        ),
        (
            executions == 0,
            f"MTP ran {executions} times in training, over {count(found.ranks, 'rank')} and both models",
        ),
        (
            problems == 0 < verified.trunk_changed,
            f"{verified.trunk_changed} of {verified.trunk_tensors} trunk tensors were trained, {problems} are"
            " missing, extra or of another shape",
        ),
        (
            verified.ok,
            f"the export's config.json declares {count(export.declared, 'MTP layer')}, {export.physical}"
            " exists and"
            f" {export.written} is written, as in its source ({source.declared}, {source.physical},"
            f" {source.written})",
        ),
        (last < first, f"held-out KL divergence from the teacher went from {first:.3f} to {last:.3f}"),
        (
            teacher.rate > CLEARLY_BETTER * teacher.chance,
            f"the teacher's head works: {teacher.rate:.1%} of its drafts are accepted, chance is"
            f" {teacher.chance:.1%}",
        ),
    ]


def build_plots(found: Findings) -> tuple[Plot, ...]:
    """Curves of the pre-training and of the distillation."""
    pretraining = read_metrics(found.pretraining / "metrics.jsonl")
    distillation = read_metrics(found.distillation / "metrics.jsonl")
    return (
        Plot(
            "The teacher learns, its head awake",
            "step",
            "cross-entropy, nats",
            (
                take_curve("next token", pretraining, "loss"),
                take_curve("head: the token after it", pretraining, "mtp_loss"),
                take_curve("next token, held out", pretraining, "held_out_loss", marked=True),
            ),
            "Trunk and head are trained together, as models with heads are.",
        ),
        Plot(
            "The head guesses better than chance",
            "step",
            "right guesses",
            (take_curve("head: the token after next", pretraining, "mtp_acceptance"),),
            "Share of training tokens, two ahead, that the head guesses right. Chance is guessing the"
            " text's most"
            " frequent token every time.",
            reference=("chance", most_frequent(found.windows)),
            percent=True,
        ),
        Plot(
            "The student approaches the teacher, heads asleep",
            "step",
            "KL divergence, nats",
            (
                take_curve("training", distillation, "loss"),
                take_curve("held out", distillation, "held_out_loss", marked=True),
            ),
            "Divergence of the student's next-token distribution from the teacher's.",
        ),
        Plot(
            "Time of a distillation step",
            "step",
            "milliseconds",
            (take_curve(f"asleep, {count(found.ranks, 'rank')}", distillation, "step_ms"),),
            "As the distillation itself saw it. The table below compares arrangements under equal"
            " conditions.",
        ),
    )


def build_facts(found: Findings) -> tuple[tuple[str, str], ...]:
    """Machine, versions and sizes."""
    versions = ("torch", "megatron-core", "nvidia-modelopt", "transformers")
    return (
        ("processor", f"{processor_name()}, {count(os.cpu_count() or 1, 'core')}"),
        ("system", platform.platform()),
        (
            "threads",
            f"{torch.get_num_threads()} in each process, {count(found.ranks, 'process')} in the distillation",
        ),
        ("Python", platform.python_version()),
        ("torpor", __version__),
        *((name, importlib.metadata.version(name)) for name in versions),
        ("text", found.text),
        ("teacher", describe_model(found.teacher)),
        ("student", describe_model(found.student)),
    )


def take_curve(label: str, records: list[dict[str, Any]], name: str, *, marked: bool = False) -> Curve:
    """Take one named value of a run's metrics as a curve."""
    points = [(record["step"], record[name]) for record in records if name in record]
    return Curve(label, tuple(step for step, _ in points), tuple(value for _, value in points), marked)


def held_out_divergence(run: Path) -> tuple[float, float]:
    """First and last held-out KL divergence of a distillation."""
    records = read_metrics(run / "metrics.jsonl")
    values = [record["held_out_loss"] for record in records if record["kind"] == "evaluation"]
    return values[0], values[-1]


def count_executions(run: Path) -> int:
    """MTP forwards that a distillation counted, over all ranks and both models."""
    ranks = json.loads((run / "dormancy.json").read_text(encoding="utf-8"))["ranks"]
    return sum(rank[model]["executions"] for rank in ranks for model in ("student", "teacher"))


def most_frequent(windows: PackedWindows) -> float:
    """Share of the most frequent token in the text."""
    return float(np.bincount(windows.tokens).max() / len(windows.tokens))


def acceptance(label: str, drafts: DraftCounts) -> Acceptance:
    """Bring a draft count into the report's form."""
    return Acceptance(label, drafts.accepted, drafts.drafted, drafts.chance)


def step_cost(cost: MeasuredCost) -> StepCost:
    """Bring a measurement into the report's form."""
    return StepCost(
        ARRANGEMENT_LABELS[cost.arrangement],
        tuple(1e3 * seconds for seconds in cost.seconds),
        cost.weights_bytes,
        cost.state_bytes,
        cost.saved_bytes,
    )


def describe_model(folder: Folder) -> str:
    """Layers and parameters of a folder, in words."""
    family = find_family(folder.config)
    parameters = {True: 0, False: 0}
    for name, entry in folder.tensors.items():
        parameters[family.is_mtp(name, folder.config)] += prod(entry.shape)
    config = folder.config
    return (
        f"{config['hybrid_override_pattern']}/{config['mtp_hybrid_override_pattern']}, hidden"
        f" {config['hidden_size']}, {parameters[False]:,} values in the trunk, {parameters[True]:,} in MTP"
    )


def processor_name() -> str:
    """The processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def count(number: int, noun: str) -> str:
    """Write a number with its noun: `1 rank`, `2 ranks`, `2 processes`."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
