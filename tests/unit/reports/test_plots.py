"""Axes: round ticks that enclose the data."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torpor.reports.plots import nice_ticks, tick_text


@pytest.mark.parametrize(
    ("low", "high", "wanted", "ticks"),
    [
        (0, 7.3, 5, [0, 2, 4, 6, 8]),
        (0, 0.04, 5, [0, 0.01, 0.02, 0.03, 0.04]),
        (5, 5, 3, [5, 7.5, 10]),
        (0, 0, 3, [0, 0.5, 1.0]),
    ],
)
def test_ticks(low, high, wanted, ticks):
    assert nice_ticks(low, high, wanted) == ticks


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(3, 8))
def test_ticks_enclose_the_data_and_are_few(low, span, wanted):
    ticks = nice_ticks(low, low + span, wanted)
    slack = 1e-6 * (ticks[1] - ticks[0])
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + span - slack
    assert 2 <= len(ticks) <= 2 * wanted + 2
    assert ticks == sorted(set(ticks))


@given(st.floats(-1e4, 1e4), st.floats(1e-2, 1e4), st.integers(3, 8))
def test_tick_texts_differ(low, span, wanted):
    ticks = nice_ticks(low, low + span, wanted)
    texts = [tick_text(tick, ticks) for tick in ticks]
    assert len(set(texts)) == len(texts)
