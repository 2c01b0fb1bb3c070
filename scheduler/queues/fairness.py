"""Fairness: equal service for tenants that wait at the same time, whatever each of them sends.

Source: VTC, "Fairness in Serving Large Language Models" (OSDI 2024). Work-conserving; for two tenants that
both wait at one priority all the time, the difference of their service stays below 2 * max(prompt cost, cost
of all tokens that run at once). A prompt token costs 1, a generated one 2, divided by the tenant's weight.

Fairness holds inside a priority, and so does the service that is counted for it: more urgent requests come
first, whatever their tenant. The turn is that of the priority with the best rank; within a tenant the rank
decides.
"""

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush, heapreplace

from scheduler.policy import OrderOfService
from scheduler.queues.lazy_heap import Entry, LazyHeap
from scheduler.queues.waiting_queue import WaitingQueue
from scheduler.sequence import Sequence
from scheduler.tenant_ledger import TenantAccounts, TenantLedger


class _PriorityLevel:
    """Waiting tenants of one level of priority, least served first.

    The heap is lazy: counters only grow, so an entry that is out of date is found at the top and put
    back with what it is now.
    """

    def __init__(self, ledger: TenantLedger) -> None:
        self._ledger = ledger
        self._queues: dict[str, WaitingQueue] = {}
        self._order: list[tuple[float, str]] = []
        self.num_waiting = 0

    def push(self, seq: Sequence) -> None:
        queue = self._queues.get(seq.tenant)
        if queue is None:
            queue = self._queues[seq.tenant] = WaitingQueue()
            heappush(self._order, (self._ledger.service(seq.tenant), seq.tenant))
        queue.push(seq)
        self.num_waiting += 1

    def peek(self) -> Sequence:
        tenant = self._least_served()
        assert tenant is not None, "a sequence waits here"
        return self._queues[tenant].peek()

    def after_first(self, num: int) -> list[Sequence]:
        """First sequence of each later tenant, then the next of the first tenant. O(num * log(tenants))."""
        entries: list[tuple[float, str]] = []
        while len(entries) <= num and self._least_served() is not None:
            entries.append(heappop(self._order))
        for entry in entries:
            heappush(self._order, entry)
        first, *others = (self._queues[tenant] for _, tenant in entries)
        return [*(queue.peek() for queue in others), *first.after_first(num)][:num]

    def _least_served(self) -> str | None:
        """Tenant that had least; its entry is then on top of the heap. None if the heap is empty."""
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

    def remove(self, seq: Sequence) -> None:
        self._queues[seq.tenant].remove(seq)
        self.num_waiting -= 1


class FairWaitingQueue:
    """Waiting queue by levels of priority, inside them the least served tenant first.

    Its interface is WaitingQueue's.
    """

    def __init__(self, order: OrderOfService, accounts: TenantAccounts) -> None:
        self._order = order
        self._accounts = accounts
        self._levels: dict[int, _PriorityLevel] = {}
        self._by_rank = LazyHeap()

    def __len__(self) -> int:
        return len(self._by_rank)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_rank)

    def heaps(self) -> Iterable[list[Entry]]:
        """Entries, as heaps that `walk` reads."""
        return self._by_rank.heaps()

    def push(self, seq: Sequence) -> None:
        key = self._order.level(seq.priority)
        level = self._levels.get(key)
        if level is None:
            level = self._levels[key] = _PriorityLevel(self._accounts.at(key))
        level.push(seq)
        self._by_rank.push(seq.rank, seq)

    def peek(self) -> Sequence:
        """Choice of the level with the best rank: so no level waits for ever, and in it no tenant."""
        return self._level_of(self.oldest()).peek()

    def oldest(self) -> Sequence:
        """Sequence with the best rank, whatever its tenant had."""
        first = self._by_rank.peek()
        assert first is not None, "the queue is empty"
        return first

    def choices(self) -> list[Sequence]:
        """First of each level of priority."""
        return [level.peek() for level in self._levels.values()]

    def most_urgent(self) -> Sequence:
        """Choice of the most urgent level, whatever the age of others. O(levels)."""
        return self._levels[min(self._levels)].peek()

    def after_first(self, num: int) -> list[Sequence]:
        return self._level_of(self.peek()).after_first(num)

    def remove(self, seq: Sequence) -> None:
        level = self._level_of(seq)
        level.remove(seq)
        self._by_rank.note_removal()
        if not level.num_waiting:
            del self._levels[self._order.level(seq.priority)]

    def _level_of(self, seq: Sequence) -> _PriorityLevel:
        return self._levels[self._order.level(seq.priority)]
