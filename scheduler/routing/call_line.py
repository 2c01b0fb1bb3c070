"""The one line of requests before several engines.

Owns: their order: the order of service, and between tenants the one that had least, as in the scheduler.
Never: decides that a request leaves (dispatcher.py).
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from scheduler.policy import OrderOfService, Rank
from scheduler.tenant_ledger import TenantLedger

_Key = tuple[int, str]


class Waiting(Protocol):
    """A request in the line."""

    @property
    def priority(self) -> int: ...

    @property
    def rank(self) -> Rank: ...

    @property
    def tenant(self) -> str: ...


WaitingT = TypeVar("WaitingT", bound=Waiting)
_rank_of = attrgetter("rank")


class CallLine(Generic[WaitingT]):
    """Requests by rank; with a ledger, by level of priority and tenant, and there by rank."""

    def __init__(self, order: OrderOfService, ledger: TenantLedger | None) -> None:
        self._order = order
        self._ledger = ledger
        self._lines: dict[_Key, list[WaitingT]] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[WaitingT]:
        """Iterate by rank."""
        return merge(*self._lines.values(), key=_rank_of)

    def add(self, call: WaitingT) -> None:
        insort(self._lines.setdefault(self._key(call), []), call, key=_rank_of)
        self._num += 1

    def remove(self, call: WaitingT) -> None:
        key = self._key(call)
        line = self._lines[key]
        place = bisect_left(line, call.rank, key=_rank_of)
        assert line[place] is call, "no two requests have one rank"
        del line[place]
        self._num -= 1
        if not line:
            del self._lines[key]

    def first(self) -> WaitingT | None:
        """Request to be served next. O(tenants that wait); O(1) without fairness."""
        if self._ledger is None or len(self._lines) < 2:
            return next((line[0] for line in self._lines.values()), None)
        service = self._ledger.service
        by_level: dict[int, _Key] = {}
        for key in self._lines:
            level, tenant = key
            best = by_level.get(level)
            if best is None or (service(tenant), tenant) < (service(best[1]), best[1]):
                by_level[level] = key
        return min((self._lines[key][0] for key in by_level.values()), key=_rank_of)

    def _key(self, call: WaitingT) -> _Key:
        if self._ledger is None:
            return (0, "")
        return (self._order.level(call.priority), call.tenant)
