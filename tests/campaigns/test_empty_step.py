"""The worst cases of the scheduler's bench are what their names say, and stand in its page."""

from pathlib import Path

import pytest

from campaigns.empty_step import WORST_CASES, displacing, mass_abort, queue_with_limits, under_pressure
from scheduler.config import PreemptionMode, SchedulingPolicy

PAGE = Path(__file__).resolve().parents[2] / "docs/benchmarks/scheduler.md"


@pytest.mark.parametrize("policy", SchedulingPolicy)
@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_blocks_are_short_in_the_steps_that_are_timed(policy: SchedulingPolicy, mode: PreemptionMode) -> None:
    worst = under_pressure(32, policy, mode)
    assert len(worst.spent_s) == 60
    assert worst.num_preempted > 0


def test_each_urgent_one_displaces_another() -> None:
    assert displacing(64).num_preempted == 60


def test_calls_beside_long_queues_are_timed_one_by_one() -> None:
    assert len(mass_abort(40, 10).spent_s) == 30
    assert len(queue_with_limits(40).spent_s) == 40


@pytest.mark.parametrize("name", WORST_CASES)
def test_the_page_has_a_row_of_this_name(name: str) -> None:
    assert f"| {name} |" in PAGE.read_text()
