"""`torpor verify`: is an export what it should be, beside the folder it was made from, or its receipt?"""

import json
from pathlib import Path
from typing import Annotated

import typer


def verify(
    source: Annotated[
        Path,
        typer.Argument(
            help="The Hugging Face folder that training started from; left out with an old receipt."
        ),
    ],
    export: Annotated[Path | None, typer.Argument(help="The folder that was exported.")] = None,
    receipt: Annotated[
        Path | None,
        typer.Option(
            help="With SOURCE and EXPORT: write what was verified to this file. With EXPORT alone: check it"
            " against the file."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Compare an export with its source: MTP layers byte for byte, the trunk tensor by tensor."""
    if export is not None:
        _verify_folders(source, export, receipt, as_json)
    elif receipt is not None:
        _check_receipt(source, receipt, as_json)
    else:
        raise typer.BadParameter("Missing argument 'EXPORT', or --receipt with the receipt of one.")


def _verify_folders(source: Path, export: Path, receipt: Path | None, as_json: bool) -> None:
    from torpor.checkpoints.receipt import write_receipt
    from torpor.checkpoints.verify import verify_folders
    from torpor.errors import CheckpointError
    from torpor.reports.terminal import byte_progress, print_verification

    if receipt is not None and receipt.exists():
        # Said before the hours that hashing may take.
        raise CheckpointError(
            f"receipt {receipt} exists\n"
            f"  To check a folder against it: torpor verify --receipt {receipt} EXPORT"
        )
    with byte_progress("verifying") as progress:
        result = verify_folders(source, export, progress, hash_all=receipt is not None)
    if receipt is not None and result.ok:
        write_receipt(result, receipt)
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    else:
        print_verification(result)
    if not result.ok:
        raise typer.Exit(1)


def _check_receipt(export: Path, receipt: Path, as_json: bool) -> None:
    from torpor.checkpoints.receipt import check_receipt
    from torpor.reports.terminal import byte_progress, print_receipt

    with byte_progress("verifying") as progress:
        result = check_receipt(receipt, export, progress)
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    else:
        print_receipt(result)
    if not result.ok:
        raise typer.Exit(1)
