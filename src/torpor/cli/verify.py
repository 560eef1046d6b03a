"""`torpor verify`: is an export what it should be, beside the folder it was made from?"""

import json
from pathlib import Path
from typing import Annotated

import typer


def verify(
    source: Annotated[Path, typer.Argument(help="The Hugging Face folder that training started from.")],
    export: Annotated[Path, typer.Argument(help="The folder that was exported.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Compare an export with its source: MTP layers byte for byte, the trunk tensor by tensor."""
    from torpor.checkpoints.verify import verify_folders
    from torpor.reports.terminal import byte_progress, print_verification

    with byte_progress("verifying") as progress:
        result = verify_folders(source, export, progress)
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    else:
        print_verification(result)
    if not result.ok:
        raise typer.Exit(1)
