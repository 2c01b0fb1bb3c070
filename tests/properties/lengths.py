"""Number of random histories: few by day; by night, with HISTORIES=n, the rest of n times as many.

Owns: the settings of hypothesis that histories share, and that those of the night are others than the day's.
Never: what happens in one.
"""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, seed, settings

from tests.tiers import NUM_TIMES

TIMES = max(1, NUM_TIMES - 1)
"""Multiple of the day's number that runs now."""
SAME_EACH_TIME = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)


def histories(num_by_day: int) -> Callable[[Any], Any]:
    """Make a decorator that gives a test its number of histories."""
    given = settings(SAME_EACH_TIME, max_examples=num_by_day * TIMES)
    return given if NUM_TIMES == 1 else lambda test: given(seed(NUM_TIMES)(test))


def seeds(num_by_day: int) -> range:
    """Seeds of histories that a test makes up itself: the first ones by day, those behind them by night."""
    first = 0 if NUM_TIMES == 1 else num_by_day
    return range(first, first + num_by_day * TIMES)
