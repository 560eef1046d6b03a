"""A small set of cases in which every pair of values of two axes meets at least once."""

import itertools
from collections.abc import Callable, Hashable, Sequence


def cover_pairs[T](rows: Sequence[T], axes: Callable[[T], tuple[Hashable, ...]]) -> list[T]:
    """Choose rows, greedily and always the same ones, that together hold every pair that any row holds.

    Args:
        rows: Everything that may be chosen. Pairs that no row holds need no cover.
        axes: Gives a row's value on each axis.

    Returns:
        The chosen rows, in the order of `rows`.
    """
    holds = [_pairs(axes(row)) for row in rows]
    missing = set().union(*holds)
    chosen = []
    while missing:
        # The first of those that bring most: no chance in it.
        best = max(range(len(rows)), key=lambda index: len(holds[index] & missing))
        chosen.append(best)
        missing -= holds[best]
    return [rows[index] for index in sorted(chosen)]


def _pairs(values: tuple[Hashable, ...]) -> set[tuple[tuple[int, Hashable], tuple[int, Hashable]]]:
    return set(itertools.combinations(enumerate(values), 2))
