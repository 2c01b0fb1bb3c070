"""The choice of a replica for a request.

Owns: the choice, made once, when the request arrives; and which replica is least busy, kept up to date event
by event: to look at a thousand replicas for each request would cost more than a step.
Never: moves a request that was placed.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from heapq import heapify, heappop, heappush
from itertools import count

from bench.simulate.replica import Replica
from bench.simulate.requests.arrivals import SimRequest

# A prefix group leaves its replica when this many more wait there than at the least busy one.
_SPILL_WAITING = 8

_COMPACT_ABOVE = 4

Router = Callable[[SimRequest], int]
"""Place of the replica for a request."""


class RouterKind(StrEnum):
    LEAST_WAITING = "least-waiting"
    ROUND_ROBIN = "round-robin"
    PREFIX_AWARE = "prefix-aware"
    ONE_LINE = "one-line"  # requests wait before the replicas, as with --data-parallel-size (one_line.py)


class LeastBusy:
    """Replicas by how many wait, then by how many run, then by place. O(log replicas) for each change."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._burdens = [_burden(replica) for replica in replicas]
        self._heap = [(burden, place) for place, burden in enumerate(self._burdens)]
        heapify(self._heap)

    def note(self, place: int) -> None:
        """Note that the burden of this replica may have changed."""
        if len(self._burdens) == 1:
            return
        burden = _burden(self._replicas[place])
        if burden == self._burdens[place]:
            return
        self._burdens[place] = burden
        heappush(self._heap, (burden, place))
        if len(self._heap) > _COMPACT_ABOVE * len(self._burdens):
            self._heap = [(burden, place) for place, burden in enumerate(self._burdens)]
            heapify(self._heap)

    def first(self) -> int:
        """Place of the least busy replica, as of the last notes."""
        while self._heap[0][0] != self._burdens[self._heap[0][1]]:
            heappop(self._heap)
        return self._heap[0][1]


def router_of(kind: RouterKind, replicas: Sequence[Replica], least_busy: LeastBusy) -> Router:
    match kind:
        case RouterKind.LEAST_WAITING:
            return lambda _: least_busy.first()
        case RouterKind.ROUND_ROBIN:
            turn = count()
            return lambda _: next(turn) % len(replicas)
        case RouterKind.PREFIX_AWARE:
            return _prefix_aware(replicas, least_busy)
        case RouterKind.ONE_LINE:
            raise ValueError("one line chooses later than at arrival (one_line.py)")


def _burden(replica: Replica) -> tuple[bool, int, int]:
    return not replica.is_open, replica.num_waiting, replica.num_running


def _prefix_aware(replicas: Sequence[Replica], least_busy: LeastBusy) -> Router:
    """Send a prefix group to the replica whose cache has its prefix, unless too many wait there."""
    homes: dict[str, int] = {}

    def choose(request: SimRequest) -> int:
        best = least_busy.first()
        if not request.prefix_group:
            return best
        home = homes.get(request.prefix_group, best)
        if (
            not replicas[home].is_open
            or replicas[home].num_waiting > replicas[best].num_waiting + _SPILL_WAITING
        ):
            home = best
        homes[request.prefix_group] = home
        return home

    return choose
