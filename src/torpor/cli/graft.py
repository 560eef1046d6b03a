"""`torpor graft`: put the MTP layers of a model back onto a tuned folder that lost them."""

import json
from pathlib import Path
from typing import Annotated

import typer


def graft(
    heads: Annotated[
        Path, typer.Option(help="The folder that has the MTP layers: what the tuning began with.")
    ],
    trunk: Annotated[Path, typer.Option(help="The tuned folder that lost them.")],
    out: Annotated[Path, typer.Option(help="The folder to make; nothing may be there.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of an account.")
    ] = False,
) -> None:
    """Put a model's MTP layers back onto a tuned folder, byte for byte; only they are written."""
    from torpor.checkpoints.graft import graft_folder
    from torpor.reports.terminal import byte_progress, print_graft

    with byte_progress("grafting") as progress:
        result = graft_folder(heads, trunk, out, progress)
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    else:
        print_graft(result)
