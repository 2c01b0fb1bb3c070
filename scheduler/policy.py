"""The order of service: one object per policy, which everything that orders requests asks.

Owns: the rank (the sort key), which request may take the place of another, and in which order requests give
way. The scheduler asks about sequences, the API process about the calls in its queue.
Never: sees blocks or sequences, mutates anything, or reads a clock; loads nothing of the scheduler but its
options, since the API process loads this module.

A rank is computed when a request is added, and does not change while it waits; so a heap stays a heap, and a
preempted sequence returns to the place that it had.

Aging keeps to this: a virtual deadline `arrived_s + priority * aging_s` is constant for one request and grows
with arrival. So a request of priority p waits behind later ones of priority q < p for at most (p - q) *
aging_s; still later ones have a later deadline than its own.

Age counts for admission only. Running requests have an order of their own, by priority alone. So an urgent
request displaces a less urgent one however long ago that was added. Its age is spent once it has had a turn:
then its rank is computed anew when it is displaced. So it has a turn each time that it has grown old, and the
urgent have all the time between.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import takewhile
from math import inf, isinf
from typing import NamedTuple, Protocol, TypeVar

from scheduler.config import SchedulerOptions, SchedulingPolicy

Rank = tuple[float, ...]
"""The place in the one order of service: the smallest is served first and preempted last."""


class Standing(NamedTuple):
    """Facts about a request that decide its rank."""

    priority: float
    """Lower is more urgent, as in nice(1)."""
    arrived_s: float
    admission: float
    """Number of the admission. Clocks can jump; this count does not."""


class Ranked(Protocol):
    """A sequence, or a call in the queue."""

    @property
    def priority(self) -> float: ...

    @property
    def rank(self) -> Rank: ...


class Newcomer(NamedTuple):
    """A request that asks for a place and has none yet."""

    priority: float
    rank: Rank


MOST_URGENT = Newcomer(-inf, (-inf,))
"""Standing before every possible request."""

RankedT = TypeVar("RankedT", bound=Ranked)


class OrderOfService(ABC):
    """Order of one policy. Unless a policy says otherwise all requests are equals."""

    displaces = False
    """Whether a request may ever take the place of another."""
    ages = False
    """Whether running requests have another order than waiting ones."""

    @abstractmethod
    def rank(self, standing: Standing) -> Rank:
        """Sort key, best first. No two requests have the same one."""

    def running_rank(self, standing: Standing) -> Rank:
        """Sort key of a request while it runs."""
        return self.rank(standing)

    def level(self, priority: int) -> int:  # noqa: ARG002
        """Group of equals that a priority belongs to; fairness between tenants holds inside each."""
        return 0

    def displaceable(self, newcomer: Ranked, line: Sequence[RankedT]) -> Iterator[RankedT]:  # noqa: ARG002
        """Requests whose place `newcomer` may take, the one that is served last first.

        `line` waits, and is in order of rank.
        """
        return iter(())

    def displaced_by(self, newcomer: Ranked, running: Sequence[RankedT]) -> Iterator[RankedT]:  # noqa: ARG002
        """Running requests whose place `newcomer` may take, the one that is served last first.

        `running` is in order of `running_rank`.
        """
        return iter(())

    def equals_of_last(self, line: Sequence[RankedT]) -> list[RankedT]:
        """Running requests of `line`, in their order, that are as little urgent as its last.

        One of them gives way when a better one needs room to grow.
        """
        return list(line)


class FirstComeFirstServed(OrderOfService):
    """No request takes the place of another."""

    def rank(self, standing: Standing) -> Rank:
        return (standing.admission,)


class StrictPriority(OrderOfService):
    """A more urgent request always comes first."""

    displaces = True

    def rank(self, standing: Standing) -> Rank:
        return (standing.priority, standing.admission)

    def level(self, priority: int) -> int:
        return priority

    def displaceable(self, newcomer: Ranked, line: Sequence[RankedT]) -> Iterator[RankedT]:
        """Requests that are strictly less urgent, by priority and by rank, the one that is served last first.

        Two requests of one priority never displace each other.
        """
        priority, rank = newcomer.priority, newcomer.rank
        for each in reversed(line):
            if each.rank < rank:
                return
            if each.priority > priority:
                yield each

    def displaced_by(self, newcomer: Ranked, running: Sequence[RankedT]) -> Iterator[RankedT]:
        """Running requests of a less urgent priority: they stand at the back."""
        return takewhile(lambda each: each.priority > newcomer.priority, reversed(running))

    def equals_of_last(self, line: Sequence[RankedT]) -> list[RankedT]:
        last = line[-1].priority
        return [each for each in line if each.priority == last]


class AgingPriority(StrictPriority):
    """A level of priority is a head start of `aging_s` seconds, so that no request waits for ever."""

    ages = True

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s

    def rank(self, standing: Standing) -> Rank:
        virtual_deadline_s = standing.arrived_s + standing.priority * self._aging_s
        return (virtual_deadline_s, standing.admission)

    def running_rank(self, standing: Standing) -> Rank:
        return super().rank(standing)


def order_of_service(options: SchedulerOptions) -> OrderOfService:
    """Order that the operator's options describe."""
    if options.policy is SchedulingPolicy.FCFS:
        return FirstComeFirstServed()
    if isinf(options.priority_aging_s):
        return StrictPriority()
    return AgingPriority(options.priority_aging_s)
