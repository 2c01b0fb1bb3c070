"""In which order sequences are served: a policy is a sort key and nothing more.

Never: sees blocks, mutates anything, or reads a clock. A rank is computed once, when a sequence is
added, and does not change while it waits; so a heap stays a heap, and a preempted sequence returns to
the place that it had.

Time-dependent fairness fits the same mould: a virtual deadline `added_s + priority * aging_s` grows with
arrival and is constant for one sequence, so that nobody waits for ever behind later, more urgent ones.
"""

from collections.abc import Callable

from scheduler.config import SchedulingPolicy
from scheduler.sequence import Rank, Sequence


def by_admission(seq: Sequence) -> Rank:
    """First come, first served. The admission number is the engine's own count: clocks can jump."""
    return (seq.admission,)


def by_priority(seq: Sequence) -> Rank:
    """Lower is more urgent, as in nice(1); among equals the earlier."""
    return (seq.priority, seq.admission)


RANKS: dict[SchedulingPolicy, Callable[[Sequence], Rank]] = {
    SchedulingPolicy.FCFS: by_admission,
    SchedulingPolicy.PRIORITY: by_priority,
}
