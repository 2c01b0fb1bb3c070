"""Waiting calls in the order of service, the last of which may lose its place to a more urgent one.

Owns: the order of the calls of which no sequence has begun. A call is the requests that were admitted
together.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from engine.errors import Overloaded
from scheduler.config import Fairness, SchedulerOptions
from scheduler.messages import SequenceId
from scheduler.policy import MOST_URGENT, Newcomer, Rank, Standing, order_of_service


class WaitingRequest(Protocol):
    """A request, as far as its place is concerned."""

    @property
    def first_id(self) -> SequenceId: ...

    @property
    def num_unstarted(self) -> int: ...

    @property
    def num_prompt_tokens(self) -> int: ...


WaitingT = TypeVar("WaitingT", bound=WaitingRequest)
_rank_of = attrgetter("rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTerms:
    """Terms of a call that decide its place: those of its most urgent request."""

    priority: int
    tenant: str
    arrived_s: float

    def standing(self, admission: float) -> Standing:
        return Standing(self.priority, self.arrived_s, admission)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WaitingCall(Generic[WaitingT]):
    """Requests that were admitted together, and go together."""

    lives: tuple[WaitingT, ...]
    priority: int
    rank: Rank
    """Computed as the scheduler computes it."""
    tenant: str
    num_sequences: int
    num_tokens: int
    displace: "Callable[[WaitingT, Overloaded], None]"
    """Ends one of the requests, where it was admitted."""
    room: object
    """The limits of its model."""


class WaitingCalls(Generic[WaitingT]):
    """Kept in order of rank."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._order = order_of_service(options)
        self._is_fair = options.fairness is Fairness.TENANT
        self._weights = dict(options.tenant_weights)
        self._line: list[WaitingCall[WaitingT]] = []
        self._by_id: dict[SequenceId, WaitingCall[WaitingT]] = {}

    def add(
        self,
        lives: Sequence[WaitingT],
        terms: CallTerms,
        displace: "Callable[[WaitingT, Overloaded], None]",
        room: object = None,
    ) -> None:
        call = WaitingCall(
            lives=tuple(lives),
            priority=terms.priority,
            rank=self._order.rank(terms.standing(lives[0].first_id)),
            tenant=terms.tenant,
            num_sequences=sum(live.num_unstarted for live in lives),
            num_tokens=sum(live.num_prompt_tokens for live in lives),
            displace=displace,
            room=room,
        )
        insort(self._line, call, key=_rank_of)
        self._by_id.update((live.first_id, call) for live in lives)

    def discard(self, live: WaitingT) -> None:
        """Forget the call of a request that has begun or has left: it can give way no more."""
        call = self._by_id.get(live.first_id)
        if call is None:
            return
        for member in call.lives:
            self._by_id.pop(member.first_id, None)
        del self._line[bisect_left(self._line, call.rank, key=_rank_of)]

    def num_ahead(self, terms: CallTerms, *, next_id: int) -> int:
        """Sequences whose calls stand before a new one of these terms. O(calls before it)."""
        rank = self._order.rank(terms.standing(next_id))
        return sum(call.num_sequences for call in self._line[: bisect_left(self._line, rank, key=_rank_of)])

    def displaceable(self, terms: CallTerms | None, *, next_id: int) -> Iterator[WaitingCall[WaitingT]]:
        """Calls whose place a new one of these terms may take, the one that is served last first.

        None is the most urgent call that can come; `next_id` is the first id that the new one would get.
        """
        newcomer = MOST_URGENT
        if terms is not None:
            newcomer = Newcomer(terms.priority, self._order.rank(terms.standing(next_id)))
        calls = self._order.displaceable(newcomer, self._line)
        return self._largest_backlog_first(list(calls)) if self._is_fair else calls

    def _largest_backlog_first(self, calls: list[WaitingCall[WaitingT]]) -> Iterator[WaitingCall[WaitingT]]:
        """Reorder calls.

        Inside each priority, the last call of the tenant that has most to be served comes first.

        Under fairness the tenant with the largest backlog is served last. Past service is ignored: its
        counters are in the engine process, and differ little between tenants that wait.
        """
        backlog: defaultdict[tuple[int, str], float] = defaultdict(float)
        for call in self._line:
            backlog[call.priority, call.tenant] += self._cost(call)
        lines: defaultdict[int, dict[str, list[WaitingCall[WaitingT]]]] = defaultdict(dict)
        for call in reversed(calls):
            lines[call.priority].setdefault(call.tenant, []).append(call)
        for place in calls:
            by_tenant = lines[place.priority]
            tenant = max(
                by_tenant, key=lambda each: (backlog[place.priority, each], by_tenant[each][-1].rank)
            )
            call = by_tenant[tenant].pop()
            backlog[place.priority, tenant] -= self._cost(call)
            if not by_tenant[tenant]:
                del by_tenant[tenant]
            yield call

    def _cost(self, call: WaitingCall[WaitingT]) -> float:
        return call.num_tokens / self._weights.get(call.tenant, 1.0)
