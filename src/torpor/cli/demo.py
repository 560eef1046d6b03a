"""`torpor demo`: the whole product on a small model."""

from pathlib import Path
from typing import Annotated

import typer


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the models, logs and report.html.")] = Path("demo"),
    ranks: Annotated[int, typer.Option(min=1, max=2, help="Processes that distil together.")] = 2,
    force: Annotated[
        bool, typer.Option("--force", help="Replace what an earlier demo left in OUTPUT.")
    ] = False,
) -> None:
    """Train a small hybrid model with a working head, distil it with the head asleep, and show the proof.

    Needs no GPU, no download and under five minutes on two cores.
    """
    from torpor.runs.demo import run_demo

    run_demo(output, ranks=ranks, force=force)
