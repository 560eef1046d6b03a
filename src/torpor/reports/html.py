"""`report.html`: one self-contained page about a run."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from torpor.reports.plots import line_plot
from torpor.reports.results import RunReport


def render_report(report: RunReport) -> str:
    """Turn a report into HTML that refers to nothing outside itself.

    Args:
        report: What to show.

    Returns:
        The page.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["line_plot"] = line_plot
    environment.filters["mib"] = lambda count: f"{count / 2**20:,.2f}"
    environment.filters["duration"] = duration_text
    return environment.get_template("report.html.j2").render(report=report)


def write_report(report: RunReport, path: Path) -> Path:
    """Write `report` as HTML.

    Args:
        report: What to show.
        path: The file; its folder must exist.

    Returns:
        `path`.
    """
    path.write_text(render_report(report), encoding="utf-8")
    return path


def duration_text(seconds: float) -> str:
    """Write a duration as people say it: `4.2 s`, `3 min 05 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"
