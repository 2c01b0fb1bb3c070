"""Everybody who is not finished: the running line, and the line of those who wait.

Owns: which line a sequence stands in, in what order, and the tenants' counters, which follow from it.
Never: decides who moves; planner.py, admission.py and scheduler.py do.
"""

from bisect import bisect_left, insort
from operator import attrgetter

from scheduler.config import Fairness, SchedulerConfig
from scheduler.lines.fairness import FairWaitingQueue, TenantLedger
from scheduler.lines.waiting_queue import WaitingQueue
from scheduler.messages import RequestCounts
from scheduler.sequence import Sequence, Status

_rank_of = attrgetter("rank")


class Lines:
    """The running line is kept in rank order; the waiting line knows its first."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.running: list[Sequence] = []
        self.waiting: WaitingQueue | FairWaitingQueue = WaitingQueue()
        self._ledger: TenantLedger | None = None
        self._num_swapped = 0
        if config.fairness is Fairness.TENANT:
            self._ledger = TenantLedger(dict(config.tenant_weights))
            self.waiting = FairWaitingQueue(config, self._ledger)

    def counts(self) -> RequestCounts:
        return RequestCounts(
            running=len(self.running),
            waiting=len(self.waiting) - self._num_swapped,
            swapped=self._num_swapped,
        )

    def add(self, seq: Sequence) -> None:
        """A new one: it waits."""
        if self._ledger is not None:
            self._ledger.join(seq.tenant)
        self.waiting.push(seq)

    def admit(self, seq: Sequence) -> None:
        """From the waiting line to the running one."""
        self.waiting.take(seq)
        self._num_swapped -= seq.status is Status.SWAPPED
        seq.become(Status.RUNNING)
        insort(self.running, seq, key=_rank_of)

    def send_back(self, seq: Sequence, status: Status) -> None:
        """From the running line to the waiting one: WAITING, or SWAPPED with a copy on the host."""
        self._leave_running(seq)
        self._num_swapped += status is Status.SWAPPED
        seq.become(status)
        self.waiting.push(seq)

    def lose_copy(self, seq: Sequence) -> None:
        """Its copy on the host is gone: it waits as one that recomputes."""
        seq.become(Status.WAITING)
        self._num_swapped -= 1

    def finish(self, seq: Sequence) -> None:
        """Out of whichever line it stands in."""
        before = seq.status
        seq.become(Status.FINISHED)
        if before is Status.RUNNING:
            self._leave_running(seq)
        else:
            self.waiting.discard(seq)
            self._num_swapped -= before is Status.SWAPPED
        if self._ledger is not None:
            self._ledger.leave(seq.tenant)

    def behind(self, seq: Sequence) -> list[Sequence]:
        """Those of the running line who are served after it."""
        return self.running[self._place(seq) + 1 :]

    def charge(self, tenant: str, cost: float) -> None:
        """Put service on a tenant's account, if there are accounts."""
        if self._ledger is not None:
            self._ledger.charge(tenant, cost)

    def tenant_service(self) -> dict[str, float]:
        """What each tenant had so far, by cost; empty without fairness."""
        return {} if self._ledger is None else self._ledger.tenants

    def _leave_running(self, seq: Sequence) -> None:
        place = self._place(seq)
        assert self.running[place] is seq
        del self.running[place]

    def _place(self, seq: Sequence) -> int:
        return bisect_left(self.running, seq.rank, key=_rank_of)
