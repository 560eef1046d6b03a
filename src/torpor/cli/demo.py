"""`torpor demo`: the whole product on a small model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from torpor.reports.results import RunReport


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the models, logs and report.html.")] = Path("demo"),
    ranks: Annotated[int, typer.Option(min=1, max=2, help="Processes that distil together.")] = 2,
) -> None:
    """Train a small hybrid model with a working head, distil it with the head asleep, and show the proof.

    Needs no GPU, no download and under five minutes on two cores.
    """
    from torpor.runs.demo import run_demo

    report = run_demo(output, ranks=ranks)
    typer.echo(summary(report, output))
    if not report.passed:
        raise typer.Exit(1)


def summary(report: "RunReport", output: Path) -> str:
    """The demo's result in a few lines."""
    asleep, awake, absent = report.costs
    lines = ["", *(f"  {line}" for line in report.verdict), ""]
    lines.append(f"  {'heads':<24}{'step':>12}{'for backward':>16}{'grads + optimizer':>20}")
    lines += [
        f"  {cost.label:<24}{cost.median_ms:>9.0f} ms{cost.saved_bytes / 2**20:>12.1f} MiB"
        f"{cost.state_bytes / 2**20:>16.1f} MiB"
        for cost in (asleep, awake, absent)
    ]
    lines += ["", f"  {'drafts of the head':<32}{'accepted':>10}{'chance':>10}"]
    lines += [f"  {row.label:<32}{row.rate:>10.1%}{row.chance:>10.1%}" for row in report.acceptances]
    outcome = "Every check held" if report.passed else "A check FAILED"
    lines += ["", f"{outcome}, after {report.seconds:.0f} s."]
    lines.append(f"Report: {(output / 'report.html').absolute()}")
    return "\n".join(lines)
