"""The calls that wait, from the one that would be served last: whoever is more urgent may take its place.

Owns: the order of those of whose sequences none has begun. A call is what was admitted together.
Never: ends a request (active_requests.py), or how many may wait (queue_limits.py).
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isinf
from typing import Generic, Protocol, TypeVar

from scheduler.messages import SequenceId


class Waiting(Protocol):
    """A request, as far as its place is concerned."""

    @property
    def first_id(self) -> SequenceId: ...

    @property
    def num_unstarted(self) -> int: ...

    @property
    def num_prompt_tokens(self) -> int: ...


WaitingT = TypeVar("WaitingT", bound=Waiting)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call(Generic[WaitingT]):
    """Requests that were admitted together, and go together."""

    lives: tuple[WaitingT, ...]
    priority: int
    rank: float
    """The lower is served before; as the scheduler ranks them, but for equals, which have equal ranks."""
    num_sequences: int
    num_tokens: int


class WaitingCalls(Generic[WaitingT]):
    """Every operation but `worse_than` takes constant time."""

    def __init__(self, *, aging_s: float) -> None:
        """`aging_s` is the waiting that makes up for one level of priority; infinite if nothing does."""
        self._aging_s = aging_s
        # Within a priority in order of arrival, which is the order of rank too.
        self._calls: defaultdict[int, dict[SequenceId, Call[WaitingT]]] = defaultdict(dict)
        self._by_id: dict[SequenceId, Call[WaitingT]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    def rank(self, priority: int, *, arrived_s: float) -> float:
        return float(priority) if isinf(self._aging_s) else arrived_s + priority * self._aging_s

    def add(self, lives: Sequence[WaitingT], priority: int, *, arrived_s: float) -> None:
        call = Call(
            lives=tuple(lives),
            priority=priority,
            rank=self.rank(priority, arrived_s=arrived_s),
            num_sequences=sum(live.num_unstarted for live in lives),
            num_tokens=sum(live.num_prompt_tokens for live in lives),
        )
        self._calls[priority][lives[0].first_id] = call
        self._by_id.update((live.first_id, call) for live in lives)

    def discard(self, live: WaitingT) -> None:
        """One of its sequences has begun, or it has left: its call can give way no more."""
        call = self._by_id.get(live.first_id)
        if call is None:
            return
        for member in call.lives:
            self._by_id.pop(member.first_id, None)
        peers = self._calls[call.priority]
        del peers[call.lives[0].first_id]
        if not peers:
            del self._calls[call.priority]

    def worse_than(self, rank: float) -> Iterator[Call[WaitingT]]:
        """Those that would be served after a newcomer of this rank, the last of them first."""
        lines = [reversed(peers.values()) for peers in self._calls.values()]
        for call in heapq.merge(*lines, key=lambda call: call.rank, reverse=True):
            if call.rank <= rank:
                return
            yield call
