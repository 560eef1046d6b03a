"""`torpor inspect`: what a folder's MTP layers are, and whether the folder agrees with itself about them."""

import json
from pathlib import Path
from typing import Annotated

import typer


def inspect(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face folder.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Say which MTP layers a folder has, what is missing, and what servers will do with it."""
    from torpor.checkpoints.inspect import inspect_folder
    from torpor.reports.terminal import print_inspection

    result = inspect_folder(folder)
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    else:
        print_inspection(result)
    if not result.ok:
        raise typer.Exit(1)
