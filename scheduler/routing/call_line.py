"""The one line of requests before several engines."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from scheduler.policy import OrderOfService, Rank
from scheduler.tenant_ledger import Account, TenantAccounts

_Key = tuple[int, str]


class LineRequest(Account, Protocol):
    """A request in the line."""

    @property
    def rank(self) -> Rank: ...


WaitingT = TypeVar("WaitingT", bound=LineRequest)
_rank_of = attrgetter("rank")


class CallLine(Generic[WaitingT]):
    """Requests by rank; with accounts, by level of priority and tenant, and there by rank."""

    def __init__(self, order: OrderOfService, accounts: TenantAccounts | None) -> None:
        self._order = order
        self._accounts = accounts
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
        firsts = [line[0] for line in self._lines.values()]
        if self._accounts is None or len(firsts) < 2:
            return firsts[0] if firsts else None
        service, level = self._accounts.service, self._order.level
        turn = level(min(firsts, key=_rank_of).priority)
        equals = [call for call in firsts if level(call.priority) == turn]
        return min(equals, key=lambda call: (service(call), call.tenant))

    def _key(self, call: WaitingT) -> _Key:
        if self._accounts is None:
            return (0, "")
        return (self._order.level(call.priority), call.tenant)
