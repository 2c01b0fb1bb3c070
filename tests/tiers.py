"""Tests and their cases that run by day, where the rest runs by night (docs/testing.md).

Owns: the choice of cases that hold every few values together, the mark of those that are named, which
files are read for a tier, and which of them run in one process.
Never: the tests themselves: pytest makes all cases, and `tests/conftest.py` takes those of products.
Source: covering arrays, by the greedy method of AETG (Cohen et al., 1997).
"""

import os
import re
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from functools import update_wrapper
from heapq import heapify, heappop, heapreplace
from itertools import combinations
from types import FunctionType
from typing import Any

import pytest

DAY, NIGHT, ALONE = "not night and not alone", "night", "alone"
"""Expressions of pytest's `-m`. The first one is meant where nothing is chosen."""
NUM_TIMES = int(os.environ.get("HISTORIES", "1"))
"""Multiple of the number of random histories by day. If it is not 1, those beyond the day's run by night."""
_WHOLE_FILE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(night|alone)\b", re.MULTILINE)
_HISTORIES = "tests.properties.lengths"
_WORDS = {
    NIGHT: re.compile(rf"\b(mark\.night|mark\.pairs|by_day|by_night|{re.escape(_HISTORIES)})\b"),
    ALONE: re.compile(r"\bmark\.alone\b"),
}

_SHARED = re.compile(
    r"\b(demo_server|equipped_server|crowded_server|swapping_server|page_server|mortal_server"
    r"|two_ranks|two_stages|rank_0|compile_kernels|avx-vnni|nodes_of)\b"
)
"""Names, in a file, of what takes seconds to start or to read, and is kept for all files of a process."""
_BESIDE = {"two_stages": "two_ranks", "equipped_server": "demo_server", "swapping_server": "crowded_server"}
"""Names that some files have together with another one."""

LONGEST = (
    *("startup/test_transformers_releases.py", "faults/test_ray.py", "clients/test_schemathesis.py"),
    *("ranks/test_divided_models.py", "gpu/test_gpu_stages.py", "gpu/test_gpu_ranks.py"),
    *("speculation/test_trained_heads.py", "worker/test_grouped_families.py"),
    *("startup/test_family_matrix.py", "faults/test_machine.py", "faults/test_rank_death.py"),
    *("e2e/test_models_on_demand.py", "e2e/test_several_models.py"),
)
"""Ends of the names of files that take longest, and run first: none is left to one process at the end. The
first few wait most of the time, for a registry, for Ray, for answers, while others compute."""

Row = Sequence[Hashable]
"""The value of each parameter."""


def may_hold(tier: str, text: str) -> bool:
    """Whether a file with this text may have tests of a tier; True for any other expression of `-m`."""
    if tier == DAY:
        return _WHOLE_FILE.search(text) is None
    return tier not in _WORDS or _WORDS[tier].search(text) is not None


def has_long_histories(text: str) -> bool:
    """Whether a file with this text has tests whose number of histories is multiplied."""
    return _HISTORIES in text


def process_of(file: str, text: str) -> str:
    """Name what runs in one process: files that share a server, processes or a reading, or a file alone."""
    found = _SHARED.search(text)
    return _BESIDE.get(found[1], found[1]) if found else file


def place_of(file: str) -> int:
    """Place of a file in the order in which files run: the longest first, all others behind them."""
    return next((place for place, end in enumerate(LONGEST) if file.endswith(end)), len(LONGEST))


def covering(rows: Sequence[Row], strength: int = 2, *, kept: Iterable[int] = ()) -> set[int]:
    """The places of rows that together have all values which some row has, in any `strength` columns.

    Those in `kept` are among them. The same each time: of those that add the most, the first is taken.
    """
    groups = [_groups(row, strength) for row in rows]
    chosen = set(kept)
    covered = {each for place in chosen for each in groups[place]}
    # What a row adds only becomes less, so a number that is still right at the top is the largest.
    best_first = [(-len(each), place) for place, each in enumerate(groups)]
    heapify(best_first)
    while best_first:
        counted, place = best_first[0]
        adds = len(groups[place] - covered)
        if adds == 0:
            heappop(best_first)
        elif adds < -counted:
            heapreplace(best_first, (-adds, place))
        else:
            heappop(best_first)
            chosen.add(place)
            covered |= groups[place]
    return chosen


def by_day(values: Iterable[Any], chosen: Container[Any]) -> list[Any]:
    """Values for `parametrize` or a fixture's `params`, of which those not chosen are left to the night."""
    return [each if each in chosen else pytest.param(each, marks=pytest.mark.night) for each in values]


def by_night(test: Callable[..., None]) -> Callable[..., None]:
    """Return a test of another file with the mark of the night, which the other file's has not."""
    here = FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)
    marked: Callable[..., None] = pytest.mark.night(update_wrapper(here, test))
    return marked


def _groups(row: Row, strength: int) -> set[tuple[Hashable, ...]]:
    """The values in any `strength` columns, or in all of fewer."""
    return set(combinations(enumerate(row), min(strength, len(row))))
