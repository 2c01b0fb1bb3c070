"""Cases of a test that run by day, where the rest runs by night (docs/testing.md).

Owns: the choice of cases that hold every two values together, and the mark of those that are named.
Never: the tests themselves: pytest makes all cases, and `tests/conftest.py` marks those of products.
Source: covering arrays of strength two, by the greedy method of AETG (Cohen et al., 1997).
"""

from collections.abc import Container, Hashable, Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import combinations
from typing import Any

import pytest

Row = Sequence[Hashable]
"""The value of each parameter."""


def covering(rows: Sequence[Row]) -> set[int]:
    """The places of rows that together have every pair of values which some row has, in any two columns.

    The same each time: of those that add the most pairs, the first is taken.
    """
    pairs = [_pairs(row) for row in rows]
    chosen: set[int] = set()
    covered: set[tuple[Hashable, ...]] = set()
    # Pairs that a row adds only become fewer, so a number that is still right at the top is the largest.
    best_first = [(-len(each), place) for place, each in enumerate(pairs)]
    heapify(best_first)
    while best_first:
        counted, place = best_first[0]
        adds = len(pairs[place] - covered)
        if adds == 0:
            heappop(best_first)
        elif adds < -counted:
            heapreplace(best_first, (-adds, place))
        else:
            heappop(best_first)
            chosen.add(place)
            covered |= pairs[place]
    return chosen


def by_day(values: Iterable[Any], chosen: Container[Any]) -> list[Any]:
    """Values for `parametrize` or a fixture's `params`, of which those not chosen are left to the night."""
    return [each if each in chosen else pytest.param(each, marks=pytest.mark.night) for each in values]


def _pairs(row: Row) -> set[tuple[Hashable, ...]]:
    """Each value alone is one too, for tables of one column."""
    places = list(enumerate(row))
    return {(*one, *other) for one, other in combinations(places, 2)} | {place for place in places}
