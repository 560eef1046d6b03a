"""`torpor distill`: distil a student from a teacher with the MTP layers of both asleep."""

from pathlib import Path
from typing import Annotated

import typer

from torpor.cli.training_result import show_result


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

    show_result(run(settings), as_json=as_json)
