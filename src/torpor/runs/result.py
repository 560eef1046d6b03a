"""How a training run ended, put together from what it wrote down."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torpor.checkpoints.verify import VerifyResult
from torpor.training.config import RunConfig
from torpor.training.progress import read_metrics


@dataclass(frozen=True)
class RunResult:
    """How a training run ended.

    Args:
        output: the run folder.
        export: the trained model's folder, None if a signal ended the run early.
        steps: optimizer steps done.
        resumed_from: steps that earlier parts of the run had done.
        signal_number: the signal that ended the run early, or None.
        first_loss: mean loss per token of the run's first step.
        last_loss: the same of the last.
        held_out: the last evaluation, by name.
        step_ms: median time of a step in this part of the run, in milliseconds.
        tokens_per_s: median rate.
        memory_bytes: peak of rank 0.
        frozen: whether the MTP layers slept.
        mtp_executions: MTP forwards outside inference, over all ranks and all models.
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
class Ended:
    """The steps of a run's last part.

    Args:
        start_step: steps that earlier parts had done.
        step: steps done in all.
        signal_number: the signal that ended it, or None.
    """

    start_step: int
    step: int
    signal_number: int | None


def summarize(
    config: RunConfig,
    ended: Ended,
    *,
    export: Path | None,
    dormancy: Sequence[dict[str, Any]] | None = None,
    verified: VerifyResult | None = None,
) -> RunResult:
    """Put the result of a run together from its metrics and its proofs.

    Args:
        config: what was asked for.
        ended: the steps.
        export: the exported folder; None if a signal ended the run early.
        dormancy: the reports of every rank's handles, by role; None for an awake run.
        verified: the comparison of the export with its source, if there was one.
    """
    records = read_metrics(config.output / "metrics.jsonl")
    done = [record for record in records if record["kind"] == "step"]
    recent = [record for record in done if record["step"] > ended.start_step]
    held_out = [record for record in records if record["kind"] == "evaluation"]
    checks = verified.to_json() if verified else None
    return RunResult(
        output=config.output,
        export=export,
        steps=ended.step,
        resumed_from=ended.start_step,
        signal_number=ended.signal_number if export is None else None,
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
