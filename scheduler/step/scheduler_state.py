"""State that the parts of one scheduler share: plans in flight, counters, and a watchdog over both.

Owns: the order of the plans in flight. The device carries them out in the order in which they were made, and
their results come in that order too.
"""

from collections import deque
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, fields
from typing import Self

from scheduler.blocks.block_map import group_uses
from scheduler.blocks.kv_cache_manager import KVCacheManager
from scheduler.config import SchedulerConfig
from scheduler.counters import Counters, GroupUse, SchedulerStats
from scheduler.drafts.drafts import Drafts
from scheduler.messages import SchedulerOutput, SequenceId, WaitReason
from scheduler.policy import OrderOfService, Standing, order_of_service
from scheduler.queues.request_queues import RequestQueues
from scheduler.sequence import Sequence
from scheduler.step.step_time import StepTimeModel

_MAX_EMPTY_PLANS = 3


class PlansInFlight:
    """Plans without a result, oldest first; at most `max_plans`."""

    def __init__(self, max_plans: int) -> None:
        self._max_plans = max_plans
        self._plans: deque[SchedulerOutput] = deque()
        self._is_held = False

    def hold(self) -> None:
        """Make no plan behind the one that is being made: it verifies drafts, asks for or awaits some.

        Sequences with drafts would otherwise go on in two halves, each in every second step.
        """
        self._is_held = True

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[SchedulerOutput]:
        return iter(self._plans)

    @property
    def is_full(self) -> bool:
        return len(self._plans) >= self._max_plans or (self._is_held and bool(self._plans))

    def verifies(self, sequence_id: SequenceId) -> bool:
        """Whether a state of the sequence may stand behind drafts of which none knows yet how many hold."""
        return any([sequence_id in plan.draft_token_ids for plan in self._plans])

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

    @classmethod
    def of(cls, config: SchedulerConfig) -> Self:
        """State of a scheduler that has no request yet."""
        order = order_of_service(config)
        return cls(
            config=config,
            order=order,
            kv=KVCacheManager(config),
            queues=RequestQueues(config, order),
            in_flight=PlansInFlight(config.max_plans_in_flight),
            counters=Counters(),
            step_time=StepTimeModel(),
            drafts=Drafts(config),
        )

    def group_uses(self) -> list[GroupUse]:
        """Count the blocks of each group of layers, between two plans."""
        return group_uses(self.kv, self.config.groups, self.queues.running)

    def rank(self, seq: Sequence) -> None:
        """Give a new sequence its places in the orders of waiting and of running."""
        standing = Standing(seq.priority, seq.admitted_s, seq.admission)
        seq.rank, seq.running_rank = self.order.rank(standing), self.order.running_rank(standing)


def stats_of(state: SchedulerState, wait_reason: WaitReason) -> SchedulerStats:
    """Gauges of this moment and counters since the start."""
    counts, kv = state.queues.counts(), state.kv
    counted = {each.name: copy(getattr(state.counters, each.name)) for each in fields(Counters)}
    return SchedulerStats(
        **counted | {"num_kept_host_blocks": kv.num_kept_blocks},
        num_running=counts.running,
        num_waiting=counts.waiting,
        wait_reason=wait_reason,
        num_swapped=counts.swapped,
        num_used_blocks=kv.pool.num_used,
        num_blocks=kv.pool.num_blocks,
        num_used_host_blocks=kv.swap_space.num_used,
        num_host_blocks=kv.swap_space.num_blocks,
    )
