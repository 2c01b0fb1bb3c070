"""Plans whose results have not come yet.

Owns: their order. The device carries them out in the order in which they were made, and their results come
in that order too.
"""

from collections import deque
from collections.abc import Iterator

from scheduler.messages import SchedulerOutput, SequenceId


class PlansInFlight:
    """At most `max_plans` of them, oldest first."""

    def __init__(self, max_plans: int) -> None:
        self._max_plans = max_plans
        self._plans: deque[SchedulerOutput] = deque()

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[SchedulerOutput]:
        return iter(self._plans)

    @property
    def is_full(self) -> bool:
        return len(self._plans) >= self._max_plans

    def add(self, plan: SchedulerOutput) -> None:
        assert len(self._plans) < self._max_plans, "the result of an earlier plan must come first"
        self._plans.append(plan)

    def take(self, plan: SchedulerOutput) -> None:
        """Its result is here."""
        oldest = self._plans.popleft()
        assert oldest is plan, "results come in the order of the plans"

    def take_all(self) -> list[SchedulerOutput]:
        """There will be no results. Oldest first."""
        plans = list(self._plans)
        self._plans.clear()
        return plans

    def draws_for(self, sequence_id: SequenceId) -> bool:
        """Whether a token of it, or its vector, is still to come. O(sequences in flight): asked rarely."""
        return any(
            share.samples and share.sequence_id == sequence_id
            for plan in self._plans
            for share in plan.scheduled
        )
