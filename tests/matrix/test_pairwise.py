"""The cover holds every pair, and is the same every time."""

import itertools

from matrix.cases import LAYOUTS, MODELS, OPTIMIZERS, RECOMPUTE, all_cases, outcome
from matrix.pairwise import cover_pairs


def axes(case):
    return case.model, case.layout, case.recompute, case.optimizer


def pairs(cases):
    return {pair for case in cases for pair in itertools.combinations(enumerate(axes(case)), 2)}


def test_every_pair_is_covered_by_few_cases():
    """Not one pair of the whole matrix is missing, and the cover is a small part of it."""
    cases = list(all_cases())
    cover = cover_pairs(cases, axes)
    assert pairs(cover) == pairs(cases)
    assert len(set(cover)) == len(cover) < len(cases) / 8
    assert cover == cover_pairs(cases, axes)


def test_the_matrix_holds_everything_that_can_be():
    """Every supported model at every layout, with every recomputation and every optimizer."""
    cases = [case for case in all_cases() if case.outcome.kind == "supported"]
    supported = [
        (model, layout)
        for model, layout in itertools.product(MODELS, LAYOUTS)
        if outcome(model, layout).kind == "supported"
    ]
    assert len(cases) == len(set(cases)) == len(supported) * len(RECOMPUTE) * len(OPTIMIZERS)


def test_a_cover_of_three_axes():
    """On a full grid of 3 x 3 x 3 the nine rows of a Latin square are enough, and greedy is near."""
    rows = list(itertools.product(range(3), repeat=3))
    cover = cover_pairs(rows, tuple)
    assert 9 <= len(cover) <= 12
