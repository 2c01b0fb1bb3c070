"""Number of random histories: few by day, and HISTORIES times as many where that is set (docs/testing.md).

Owns: the settings of hypothesis that histories share.
Never: what happens in one.
"""

from hypothesis import HealthCheck, settings

from tests.tiers import NUM_TIMES as TIMES


def histories(num_by_day: int) -> settings:
    """The same histories each time; the night has those of the day and more."""
    return settings(
        max_examples=num_by_day * TIMES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
