"""Equal service for tenants who wait at the same time, whatever each of them sends.

Owns: how much service each tenant had (virtual token counters), and a waiting line that serves the one
who had least.
Source: VTC, "Fairness in Serving Large Language Models" (OSDI 2024). Work-conserving; for two tenants who
both wait all the time, the difference of their service stays below 2 * max(prompt cost, cost of all tokens
that run at once). A prompt token costs 1, a generated one 2, both divided by the tenant's weight.

Fairness lives inside a priority: more urgent ones come first, whoever sent them. Within a tenant the rank
decides.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from operator import attrgetter

from scheduler.config import SchedulerConfig, SchedulingPolicy
from scheduler.lines.waiting_queue import WaitingQueue
from scheduler.sequence import Rank, Sequence

PROMPT_TOKEN_COST = 1.0
GENERATED_TOKEN_COST = 2.0
_MAX_IDLE_COUNTERS = 1000

_rank_of, _best_rank_of = attrgetter("rank"), attrgetter("best_rank")


class TenantLedger:
    """The counters. Only tenants with unfinished sequences are active; the idle save nothing up."""

    def __init__(self, weights: dict[str, float]) -> None:
        self._weights = weights
        self._service: dict[str, float] = {}
        self._num_unfinished: dict[str, int] = {}
        self._least: list[tuple[float, str]] = []  # a heap; entries may be out of date, as in _Band

    def service(self, tenant: str) -> float:
        """Tokens had, by cost and weight. Never falls while the tenant is active."""
        return self._service[tenant]

    def join(self, tenant: str) -> None:
        """One more unfinished sequence. A newcomer is lifted to the least served of those who are here."""
        if tenant not in self._num_unfinished:
            self._service[tenant] = max(self._service.get(tenant, 0.0), self._least_of_the_active())
            heappush(self._least, (self._service[tenant], tenant))
        self._num_unfinished[tenant] = self._num_unfinished.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """One of its sequences has ended.

        What it had too much is kept while others are active, so that nobody escapes by a moment's pause.
        """
        self._num_unfinished[tenant] -= 1
        if self._num_unfinished[tenant] == 0:
            del self._num_unfinished[tenant]
            if not self._num_unfinished:
                self._service.clear()
                self._least.clear()
            elif len(self._service) > 2 * len(self._num_unfinished) + _MAX_IDLE_COUNTERS:
                self._forget_the_idle()

    def charge(self, tenant: str, cost: float) -> None:
        self._service[tenant] += cost / self._weights.get(tenant, 1.0)

    def _least_of_the_active(self) -> float:
        """0 if nobody is. Whoever is active has an entry that is not above its counter: O(log tenants)."""
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
        """Those whom `join` would lift anyway; and all, should there still be too many."""
        floor = self._least_of_the_active()
        kept = {
            name: had for name, had in self._service.items() if name in self._num_unfinished or had > floor
        }
        if len(kept) > 2 * len(self._num_unfinished) + _MAX_IDLE_COUNTERS:
            kept = {name: self._service[name] for name in self._num_unfinished}
        self._service = kept

    @property
    def tenants(self) -> dict[str, float]:
        """A copy: service by tenant."""
        return dict(self._service)


class _Band:
    """The tenants who wait with one priority, least served first.

    The heap is lazy: counters only grow, so an entry that is out of date is found at the top and put
    back with what it is now.
    """

    def __init__(self, ledger: TenantLedger) -> None:
        self._ledger = ledger
        self._queues: dict[str, WaitingQueue] = {}
        self._order: list[tuple[float, str]] = []
        self.num_waiting = 0
        self.best_rank: Rank = (inf,)
        """Nobody here ever had a better one; so whoever is first has none either."""

    def push(self, seq: Sequence) -> None:
        self.best_rank = min(self.best_rank, seq.rank)
        queue = self._queues.get(seq.tenant)
        if queue is None:
            queue = self._queues[seq.tenant] = WaitingQueue()
            heappush(self._order, (self._ledger.service(seq.tenant), seq.tenant))
        queue.push(seq)
        self.num_waiting += 1

    def peek(self) -> Sequence:
        tenant = self._least_served()
        assert tenant is not None, "somebody waits here"
        return self._queues[tenant].peek()

    def after_first(self, num: int) -> list[Sequence]:
        """The first of the next tenants, then the next of the first one. O(num * log(tenants))."""
        entries: list[tuple[float, str]] = []
        while len(entries) <= num and self._least_served() is not None:
            entries.append(heappop(self._order))
        for entry in entries:
            heappush(self._order, entry)
        first, *others = (self._queues[tenant] for _, tenant in entries)
        return [*(queue.peek() for queue in others), *first.after_first(num)][:num]

    def _least_served(self) -> str | None:
        """It is on top of the heap then; None if the heap is empty."""
        while self._order:
            noted, tenant = self._order[0]
            if not len(self._queues[tenant]):
                heappop(self._order)
                del self._queues[tenant]
            elif noted != (service := self._ledger.service(tenant)):
                heapreplace(self._order, (service, tenant))
            else:
                return tenant
        return None

    def take(self, seq: Sequence) -> None:
        self._queues[seq.tenant].take(seq)
        self.num_waiting -= 1

    def discard(self, seq: Sequence) -> None:
        self._queues[seq.tenant].discard(seq)
        self.num_waiting -= 1

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for queue in self._queues.values() for seq in queue)


class FairWaitingQueue:
    """A waiting line with the face of WaitingQueue: bands by priority, inside them the least served."""

    def __init__(self, config: SchedulerConfig, ledger: TenantLedger) -> None:
        self._ledger = ledger
        self._has_bands = config.policy is SchedulingPolicy.PRIORITY
        self._bands: dict[int, _Band] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for band in self._bands.values() for seq in band)

    def push(self, seq: Sequence) -> None:
        key = self._band_of(seq)
        band = self._bands.get(key)
        if band is None:
            band = self._bands[key] = _Band(self._ledger)
        band.push(seq)
        self._num_waiting += 1

    def peek(self) -> Sequence:
        """The best rank among the choices of the bands; so aging works across them.

        O(bands), but only bands that could have the best are asked for their choice.
        """
        best = min(self._bands.values(), key=_best_rank_of).peek()
        for band in self._bands.values():
            if band.best_rank < best.rank:
                best = min(best, band.peek(), key=_rank_of)
        return best

    def after_first(self, num: int) -> list[Sequence]:
        return self._bands[self._band_of(self.peek())].after_first(num)

    def take(self, seq: Sequence) -> None:
        self._bands[self._band_of(seq)].take(seq)
        self._gone(seq)

    def discard(self, seq: Sequence) -> None:
        self._bands[self._band_of(seq)].discard(seq)
        self._gone(seq)

    def _gone(self, seq: Sequence) -> None:
        self._num_waiting -= 1
        key = self._band_of(seq)
        if not self._bands[key].num_waiting:
            del self._bands[key]

    def _band_of(self, seq: Sequence) -> int:
        return seq.priority if self._has_bands else 0
