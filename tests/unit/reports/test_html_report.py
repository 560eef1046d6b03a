"""`report.html` is one self-contained page that says what its inputs say."""

import dataclasses
import math
import re
from html.parser import HTMLParser

import pytest

from torpor.reports.html import duration_text, render_report, write_report
from torpor.reports.results import Acceptance, Curve, Plot, RunReport, Stage, StepCost, TensorProof

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Collects references, text and unbalanced tags."""

    def __init__(self, html):
        super().__init__()
        self.open, self.references, self.text, self.problems = [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.references += [
            value for name, value in attrs if name in ("src", "href", "data", "action", "srcset")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.references += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(tag)

    def handle_data(self, data):
        self.text.append(data)


def make_report(**changes):
    report = RunReport(
        title="A run & its <proof>",
        summary="What it was for.",
        passed=True,
        verdict=("2 of 2 MTP tensors are byte-identical",),
        figures=(("0", "executions"),),
        plots=(
            Plot(
                "Loss",
                "step",
                "nats",
                (
                    Curve("train", (1, 2, 3), (3.0, math.nan, 1.0)),
                    Curve("held out", (1, 3), (3.1, 1.2), marked=True),
                ),
                "It falls.",
                reference=("chance", 2.5),
            ),
        ),
        acceptances=(Acceptance("teacher", 30, 120, 0.05),),
        costs=(
            StepCost("asleep", (10.0, 11.0, 12.0), 2**20, 2 * 2**20, 3 * 2**20),
            StepCost("awake", (15.0, 16.0), 2**20, 3 * 2**20, 5 * 2**20),
        ),
        cost_note="Three steps each.",
        tensors=(
            TensorProof("mtp.layers.0.enorm.weight", "BF16", (32,), "a" * 64, "a" * 64),
            TensorProof("mtp.layers.0.bias", "F32", (), "b" * 64, "b" * 64),
        ),
        stages=(Stage("Distil", 65.4, "300 steps", "torpor distill distill.yaml"),),
        facts=(("cores", "2"),),
        configuration="student: a\nteacher: <b>\n",
        seconds=185.0,
        created="2026-01-02",
        notes=("A CPU's times.",),
    )
    return dataclasses.replace(report, **changes)


def test_page_is_well_formed_and_refers_to_nothing_outside_itself():
    html = render_report(make_report())
    page = Page(html)
    assert page.problems == []
    assert page.open == []
    assert page.references == []
    assert not re.search(r"https?://|@import|url\(", html)


def test_page_shows_every_input_and_escapes_it():
    html = render_report(make_report())
    text = "".join(Page(html).text)
    for expected in (
        "A run & its <proof>",
        "Every check held.",
        "2 of 2 MTP tensors",
        "mtp.layers.0.enorm.weight",
    ):
        assert expected in text
    assert "25.0%" in text  # 30 of 120
    assert "teacher: <b>" in text
    assert "3 min 05 s" in text
    assert "torpor distill distill.yaml" in text
    assert "a" * 64 in html
    assert "<proof>" not in html


def test_failed_run_says_so_and_marks_the_tensor_that_changed():
    changed = TensorProof("mtp.layers.0.enorm.weight", "BF16", (32,), "a" * 64, "c" * 64)
    missing = TensorProof("mtp.layers.0.hnorm.weight", "BF16", (32,), "a" * 64, None)
    html = render_report(make_report(passed=False, tensors=(changed, missing)))
    assert "Every check held" not in html
    assert "Do not ship this export" in html
    assert html.count('class="differs"') == 2
    assert 'class="same"' not in html


def test_curve_skips_points_that_are_not_finite():
    html = render_report(make_report())
    first = re.search(r'<polyline class="curve c0" points="([^"]*)"', html).group(1)
    assert len(first.split()) == 2
    assert "nan" not in first


def test_plot_without_any_finite_point_is_refused():
    broken = Plot("Loss", "step", "nats", (Curve("train", (1,), (math.nan,)),), "")
    with pytest.raises(ValueError, match="'Loss' has no finite point"):
        render_report(make_report(plots=(broken,)))


def test_curve_of_unequal_lengths_is_refused():
    with pytest.raises(ValueError, match="3 steps but 2 values"):
        Curve("train", (1, 2, 3), (1.0, 2.0))


def test_long_curve_stays_small_and_keeps_its_last_point():
    steps = tuple(range(100_000))
    plot = Plot("Loss", "step", "nats", (Curve("train", steps, tuple(float(s) for s in steps)),), "")
    html = render_report(make_report(plots=(plot,)))
    points = re.search(r'<polyline class="curve c0" points="([^"]*)"', html).group(1).split()
    assert 300 < len(points) <= 401
    x_last, y_last = map(float, points[-1].split(","))
    assert (x_last, y_last) == (560 - 14, 14)


@pytest.mark.parametrize(("values", "median"), [((3.0, 1.0, 2.0), 2.0), ((4.0, 1.0), 2.5), ((7.0,), 7.0)])
def test_median(values, median):
    assert StepCost("x", values, 0, 0, 0).median_ms == median


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.21, "4.2 s"), (60, "1 min 00 s"), (119.7, "2 min 00 s"), (3605, "60 min 05 s")]
)
def test_duration(seconds, text):
    assert duration_text(seconds) == text


def test_report_is_written_as_utf8(tmp_path):
    path = write_report(make_report(title="Torpor → demo"), tmp_path / "report.html")
    assert "Torpor → demo" in path.read_text(encoding="utf-8")
