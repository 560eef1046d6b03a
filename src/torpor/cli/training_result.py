"""What the training commands print at their end."""

import json
import os
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from torpor.runs.result import RunResult


def show_result(result: "RunResult", *, as_json: bool) -> None:
    """Print how a run ended, on rank 0, and leave with 128 + N if signal N has stopped it.

    Args:
        result: how it ended.
        as_json: whether to end with one JSON object.
    """
    if int(os.environ.get("RANK", "0")) == 0:
        typer.echo(_summary(result))
        if as_json:
            typer.echo(json.dumps(result.to_json()))
    if result.signal_number is not None:
        raise typer.Exit(128 + result.signal_number)


def _summary(result: "RunResult") -> str:
    if result.export is None:
        return (
            f"stopped after step {result.steps}, which is saved in {result.output / 'checkpoints'}\n"
            "Give the same command again to continue."
        )
    lines = [f"{result.steps} steps done, exported to {result.export}"]
    if result.first_loss is not None and result.last_loss is not None:
        lines.append(f"  loss per token            {result.first_loss:.4f} -> {result.last_loss:.4f}")
    lines += [
        f"  held out {name.replace('_', ' '):<16} {value:.4f}" for name, value in result.held_out.items()
    ]
    if result.step_ms is not None and result.tokens_per_s is not None:
        lines.append(
            f"  median step               {result.step_ms:,.0f} ms, {result.tokens_per_s:,.0f} tokens/s"
        )
    if result.mtp_tensors is not None:
        lines.append(f"  trunk tensors changed     {result.trunk_changed}")
        lines.append(f"  MTP tensors identical     {result.mtp_tensors}")
    else:
        lines.append("  The model has no MTP layers to verify.")
    if result.frozen:
        lines.append(f"  MTP forwards in training  {result.mtp_executions}")
    else:
        lines.append("  The MTP layers were awake and trained.")
    return "\n".join(lines)
