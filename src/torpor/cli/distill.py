"""`torpor distill`: distil a student from a teacher with the MTP layers of both asleep."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from torpor.runs.result import RunResult


def distill(
    config: Annotated[
        Path, typer.Argument(help="YAML file with the settings of the run.", show_default=False)
    ],
    freeze_mtp: Annotated[
        bool | None,
        typer.Option(
            "--freeze-mtp/--no-freeze-mtp",
            help="Keep the MTP layers of both models asleep, or run and train them.",
            show_default="what the file says, else asleep",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Run folder, instead of the file's.", show_default=False)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps, instead of the file's.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="End stdout with one JSON object about the run.")
    ] = False,
) -> None:
    """Distil a student from a teacher, their MTP layers asleep, and export it as a Hugging Face folder.

    An interrupted run continues when the same command is given again. On several ranks:
    torchrun --nproc-per-node N -m torpor distill CONFIG
    """
    from torpor.training.config import DistillConfig
    from torpor.training.config_file import read_config

    overrides = {"freeze_mtp": freeze_mtp, "output": output, "steps": steps}
    settings = read_config(DistillConfig, config, overrides)

    from torpor.runs.distill import distill as run

    result = run(settings)
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
        lines.append("  The student has no MTP layers to verify.")
    if result.frozen:
        lines.append(f"  MTP forwards in training  {result.mtp_executions}")
    else:
        lines.append("  The MTP layers were awake and trained.")
    return "\n".join(lines)
