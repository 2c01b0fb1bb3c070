"""The choice of a replica for a request.

Owns: the choice, made once, when the request arrives.
Never: moves a request that was placed.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import count

from bench.simulate.arrivals import SimRequest
from bench.simulate.replica import Replica

# A prefix group leaves its replica when so many more wait there than at the least busy one.
_SPILL_WAITING = 8

Router = Callable[[SimRequest, Sequence[Replica]], Replica]


class RouterKind(StrEnum):
    LEAST_WAITING = "least-waiting"
    ROUND_ROBIN = "round-robin"
    PREFIX_AWARE = "prefix-aware"


def router_of(kind: RouterKind) -> Router:
    match kind:
        case RouterKind.LEAST_WAITING:
            return least_waiting
        case RouterKind.ROUND_ROBIN:
            return round_robin()
        case RouterKind.PREFIX_AWARE:
            return prefix_aware()


def least_waiting(_: SimRequest, replicas: Sequence[Replica]) -> Replica:
    """Choose the replica where fewest wait; among equals the one where fewest run, then the first."""
    return min(replicas, key=_burden)


def _burden(replica: Replica) -> tuple[int, int]:
    return replica.num_waiting, replica.num_running


def round_robin() -> Router:
    turn = count()
    return lambda _, replicas: replicas[next(turn) % len(replicas)]


def prefix_aware() -> Router:
    """Send a prefix group to the replica whose cache has its prefix, unless too many wait there."""
    homes: dict[str, Replica] = {}

    def choose(request: SimRequest, replicas: Sequence[Replica]) -> Replica:
        best = least_waiting(request, replicas)
        if not request.prefix_group:
            return best
        home = homes.get(request.prefix_group, best)
        if home.num_waiting > best.num_waiting + _SPILL_WAITING:
            home = best
        homes[request.prefix_group] = home
        return home

    return choose
