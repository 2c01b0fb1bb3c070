"""State that the parts of one scheduler share: plans in flight, counters, and a watchdog over both.

Owns: the order of the plans in flight. The device carries them out in the order in which they were made, and
their results come in that order too.
Never: decides what is planned.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler.blocks.kv_cache_manager import KVCacheManager
from scheduler.config import SchedulerConfig
from scheduler.drafts.drafts import Drafts
from scheduler.messages import (
    Preemption,
    PreemptionCause,
    PreemptionCount,
    SchedulerOutput,
    SchedulerStats,
    SequenceId,
    WaitReason,
)
from scheduler.policy import OrderOfService
from scheduler.queues.request_queues import RequestQueues
from scheduler.step.step_time import StepTimeModel

_MAX_EMPTY_PLANS = 3


class PlansInFlight:
    """Plans without a result, oldest first; at most `max_plans`."""

    def __init__(self, max_plans: int) -> None:
        self._max_plans = max_plans
        self._plans: deque[SchedulerOutput] = deque()
        self._is_held = False

    def hold(self) -> None:
        """Make no plan behind the one that is being made: it verifies drafts, or waits for some to fit.

        Sequences with drafts would else go on in two halves, each in every second step.
        """
        self._is_held = True

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[SchedulerOutput]:
        return iter(self._plans)

    @property
    def is_full(self) -> bool:
        return len(self._plans) >= self._max_plans or (self._is_held and bool(self._plans))

    def add(self, plan: SchedulerOutput) -> None:
        assert len(self._plans) < self._max_plans, "the result of an earlier plan must come first"
        self._plans.append(plan)

    def take(self, plan: SchedulerOutput) -> None:
        """Remove the oldest, now that its result is here."""
        oldest = self._plans.popleft()
        assert oldest is plan, "results come in the order of the plans"
        self._is_held = self._is_held and bool(self._plans)

    def take_all(self) -> list[SchedulerOutput]:
        """Remove all of them, oldest first: there will be no results."""
        plans = list(self._plans)
        self._plans.clear()
        self._is_held = False
        return plans

    def samples_for(self, sequence_id: SequenceId) -> bool:
        """Whether a token of it, or its vector, is still to come. O(sequences in flight): asked rarely."""
        return any(
            share.samples and share.sequence_id == sequence_id
            for plan in self._plans
            for share in plan.scheduled
        )


@dataclass(slots=True)
class Counters:
    """Events since the start, for the metrics. Counters only grow."""

    num_added: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_prefix_host_hits: int = 0
    num_recomputed_tokens: int = 0
    num_stalls: int = 0
    num_out_of_memory: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_verified_shares: int = 0
    num_accepted_by_place: list[int] = field(default_factory=list)
    num_swap_space_full: int = 0
    num_preemptions: dict[tuple[PreemptionCause, bool], int] = field(
        default_factory=lambda: {(cause, swap): 0 for cause in PreemptionCause for swap in (False, True)}
    )

    def note_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count a share whose first `num_accepted` drafts were right."""
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.num_verified_shares += num_drafts > 0
        by_place = self.num_accepted_by_place
        by_place += [0] * (num_accepted - len(by_place))
        for place in range(num_accepted):
            by_place[place] += 1

    def note_preemption(self, preemption: Preemption) -> None:
        self.num_preemptions[preemption.cause, preemption.was_swapped] += 1

    def preemptions(self) -> tuple[PreemptionCount, ...]:
        return tuple(PreemptionCount(*key, num) for key, num in self.num_preemptions.items())


class Watchdog:
    """Count of consecutive empty plans while there was work.

    There should never be any; if there are, one request fails instead of all hanging.
    """

    def __init__(self) -> None:
        self._num_empty_plans = 0

    def note_progress(self) -> None:
        self._num_empty_plans = 0

    def is_stalled(self) -> bool:
        """Note one more empty plan; True if a request must be failed now."""
        self._num_empty_plans += 1
        if self._num_empty_plans < _MAX_EMPTY_PLANS:
            return False
        self._num_empty_plans = 0
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """One for the life of a scheduler."""

    config: SchedulerConfig
    order: OrderOfService
    kv: KVCacheManager
    queues: RequestQueues
    in_flight: PlansInFlight
    counters: Counters
    step_time: StepTimeModel
    drafts: Drafts


def stats_of(state: SchedulerState, wait_reason: WaitReason) -> SchedulerStats:
    """Gauges of this moment and counters since the start."""
    counts, kv, counters = state.queues.counts(), state.kv, state.counters
    return SchedulerStats(
        num_running=counts.running,
        num_waiting=counts.waiting,
        wait_reason=wait_reason,
        num_swapped=counts.swapped,
        num_used_blocks=kv.num_used_blocks,
        num_blocks=kv.num_blocks,
        num_used_host_blocks=kv.swap_space.num_used,
        num_host_blocks=kv.swap_space.num_blocks,
        num_steps=counters.num_steps,
        num_scheduled_tokens=counters.num_scheduled_tokens,
        num_stalls=counters.num_stalls,
        num_out_of_memory=counters.num_out_of_memory,
        preemptions=counters.preemptions(),
        num_swap_space_full=counters.num_swap_space_full,
        num_prefix_queries=counters.num_prefix_queries,
        num_prefix_hits=counters.num_prefix_hits,
        num_prefix_host_hits=counters.num_prefix_host_hits,
        num_kept_host_blocks=kv.num_kept_blocks,
        num_recomputed_tokens=counters.num_recomputed_tokens,
        num_draft_tokens=counters.num_draft_tokens,
        num_accepted_tokens=counters.num_accepted_tokens,
        num_verified_shares=counters.num_verified_shares,
        num_accepted_by_place=tuple(counters.num_accepted_by_place),
    )
