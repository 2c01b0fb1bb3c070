"""In which order sequences are served: a policy is a sort key and nothing more.

Never: sees blocks, mutates anything, or reads a clock. A rank is computed once, when a sequence is
added, and does not change while it waits; so a heap stays a heap, and a preempted sequence returns to
the place that it had.

Aging fits the same mould: a virtual deadline `added_s + priority * aging_s` is constant for one sequence
and grows with arrival. So a sequence of priority p waits behind newcomers of priority q < p for at most
(p - q) * aging_s; those that arrive later have a later deadline than its own.
"""

from collections.abc import Callable
from math import isinf

from scheduler.config import OrderAmongEquals, SchedulerConfig, SchedulingPolicy
from scheduler.sequence import Rank, Sequence


def by_admission(seq: Sequence) -> Rank:
    """First come, first served. The admission number is the engine's own count: clocks can jump."""
    return (seq.admission,)


def by_priority(seq: Sequence) -> Rank:
    """Lower is more urgent, as in nice(1); among equals the earlier."""
    return (seq.priority, seq.admission)


def by_priority_and_deadline(seq: Sequence) -> Rank:
    """Among equals earliest deadline first; those without a time limit last, in order of arrival."""
    return (seq.priority, seq.admitted_s + seq.time_limits.nearest_s, seq.admission)


def by_deadline(seq: Sequence) -> Rank:
    return (seq.admitted_s + seq.time_limits.nearest_s, seq.admission)


def by_virtual_deadline(aging_s: float) -> Callable[[Sequence], Rank]:
    """Priority counts as a head start of so many seconds a level."""

    def rank(seq: Sequence) -> Rank:
        return (seq.admitted_s + seq.priority * aging_s, seq.admission)

    return rank


def rank_of(config: SchedulerConfig) -> Callable[[Sequence], Rank]:
    is_fcfs = config.policy is SchedulingPolicy.FCFS
    if config.order_among_equals is OrderAmongEquals.DEADLINE:
        return by_deadline if is_fcfs else by_priority_and_deadline
    if is_fcfs:
        return by_admission
    return by_priority if isinf(config.priority_aging_s) else by_virtual_deadline(config.priority_aging_s)
