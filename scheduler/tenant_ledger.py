"""Service of tenants: virtual token counters, in the scheduler and in the line before several engines.

Owns: the service that each tenant had, at each level of priority, and the cost of a token.
Source: VTC, "Fairness in Serving Large Language Models" (OSDI 2024).
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Protocol

PROMPT_TOKEN_COST = 1.0
GENERATED_TOKEN_COST = 2.0
_MAX_IDLE_COUNTERS = 1000


class Account(Protocol):
    """A request, to a tenant's account at its level of priority."""

    @property
    def tenant(self) -> str: ...

    @property
    def priority(self) -> int: ...


class TenantAccounts:
    """A TenantLedger for each level of priority, while requests of it are unfinished.

    Service at one level is none at another: with one ledger a tenant's urgent requests would keep its others
    waiting, as long as there are any.
    """

    def __init__(self, weights: dict[str, float], level: Callable[[int], int]) -> None:
        """`level` is that of a priority."""
        self._weights = weights
        self._level = level
        self._ledgers: dict[int, TenantLedger] = {}

    def at(self, level: int) -> "TenantLedger":
        """Return the ledger of a level at which a request is unfinished."""
        return self._ledgers[level]

    def service(self, account: Account) -> float:
        return self._ledgers[self._level(account.priority)].service(account.tenant)

    def join(self, account: Account) -> None:
        level = self._level(account.priority)
        if level not in self._ledgers:
            self._ledgers[level] = TenantLedger(self._weights)
        self._ledgers[level].join(account.tenant)

    def leave(self, account: Account) -> None:
        level = self._level(account.priority)
        ledger = self._ledgers[level]
        ledger.leave(account.tenant)
        if ledger.is_idle:
            del self._ledgers[level]

    def charge(self, account: Account, cost: float) -> None:
        """Count service."""
        self._ledgers[self._level(account.priority)].charge(account.tenant, cost)


class TenantLedger:
    """Counters of service. Only tenants with unfinished sequences are active; the idle save up no claim."""

    def __init__(self, weights: dict[str, float]) -> None:
        self._weights = weights
        self._service: dict[str, float] = {}
        self._num_unfinished: dict[str, int] = {}
        self._least: list[tuple[float, str]] = []  # a heap; entries may be out of date, as in _PriorityLevel

    def service(self, tenant: str) -> float:
        """Service so far, by cost and weight. It never falls while the tenant is active."""
        return self._service[tenant]

    def join(self, tenant: str) -> None:
        """Count one more unfinished sequence.

        A tenant that was idle is lifted to the least served active one.
        """
        if tenant not in self._num_unfinished:
            self._service[tenant] = max(self._service.get(tenant, 0.0), self._least_of_the_active())
            heappush(self._least, (self._service[tenant], tenant))
        self._num_unfinished[tenant] = self._num_unfinished.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """Count one sequence less.

        A lead over others is kept while they are active, so that a moment's pause does not reset it.
        """
        self._num_unfinished[tenant] -= 1
        if self._num_unfinished[tenant] == 0:
            del self._num_unfinished[tenant]
            if len(self._service) > 2 * len(self._num_unfinished) + _MAX_IDLE_COUNTERS:
                self._forget_the_idle()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is unfinished."""
        return not self._num_unfinished

    def charge(self, tenant: str, cost: float) -> None:
        self._service[tenant] += cost / self._weights.get(tenant, 1.0)

    def _least_of_the_active(self) -> float:
        """Least service of an active tenant, 0 without one. O(log tenants).

        An active tenant has an entry in the heap that is not above its counter.
        """
        if len(self._least) > 2 * len(self._num_unfinished) + _MAX_IDLE_COUNTERS:
            self._least = [(self._service[tenant], tenant) for tenant in self._num_unfinished]
            heapify(self._least)
        while self._least:
            noted, tenant = self._least[0]
            if tenant not in self._num_unfinished:
                heappop(self._least)
            elif noted != (service := self._service[tenant]):
                heapreplace(self._least, (service, tenant))
            else:
                return noted
        return 0.0

    def _forget_the_idle(self) -> None:
        """Drop idle tenants that `join` would lift anyway.

        All idle ones are dropped, should there still be too many.
        """
        floor = self._least_of_the_active()
        kept = {
            name: had for name, had in self._service.items() if name in self._num_unfinished or had > floor
        }
        if len(kept) > 2 * len(self._num_unfinished) + _MAX_IDLE_COUNTERS:
            kept = {name: self._service[name] for name in self._num_unfinished}
        self._service = kept
