"""Unfinished sequences: the running queue, the waiting queue, and those that wait for a grammar.

Owns: in which queue a sequence is and at which place, and the tenants' counters, which follow from it.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter

from scheduler.config import Fairness, SchedulerConfig, SchedulingPolicy
from scheduler.group_places import places_of
from scheduler.messages import ReportPage, RequestCounts, SequenceId, SequenceReport, WaitReason
from scheduler.policy import OrderOfService
from scheduler.queues.compilations import Compilations
from scheduler.queues.fairness import FairWaitingQueue
from scheduler.queues.lazy_heap import walk
from scheduler.queues.waiting_queue import AgingWaitingQueue, NeedIndex, WaitingQueue
from scheduler.routing.start_forecast import StartForecast
from scheduler.sequence import Sequence, Status
from scheduler.tenant_ledger import GENERATED_TOKEN_COST, PROMPT_TOKEN_COST, TenantAccounts

_rank_of = attrgetter("rank")
_running_rank_of = attrgetter("running_rank")

# Service that a tenant must have had beyond another's before it gives up a place to it.
_LEAST_LEAD = 64 * GENERATED_TOKEN_COST

_REPORTED = [name for name in SequenceReport._fields if hasattr(Sequence, name)]
"""Facts of a sequence that are reported as they are."""

_ReasonOf = Callable[[Sequence, int], WaitReason]
"""Reason why a sequence waits, by the number ahead of it in the waiting queue."""

_Queue = WaitingQueue | FairWaitingQueue


class RequestQueues:
    """Queues of sequences: the running ones by `running_rank`, and waiting ones that know their first."""

    def __init__(self, config: SchedulerConfig, order: OrderOfService) -> None:
        self._order = order
        self.running: list[Sequence] = []
        self._accounts: TenantAccounts | None = None
        self._num_swapped = 0
        self.forecast = StartForecast(has_priorities=config.policy is SchedulingPolicy.PRIORITY)
        if config.fairness is Fairness.TENANT:
            self._accounts = TenantAccounts(dict(config.tenant_weights), order.level)
        self.waiting = self._new_queue()
        """Sequences that may be admitted as soon as there is room."""
        self.uncompiled = self._new_queue()
        """Other sequences, whose grammar is not compiled yet; empty where steps compile."""
        self.num_arrivals = 0
        """Times that a sequence joined `waiting`."""
        self._group_names = [group.name for group in config.groups]
        self._by_need = NeedIndex(places_of(config)) if config.max_bypasses else None
        self._by_adapter: dict[str, _Queue] | None = {} if config.max_adapters else None
        """The waiting queue once more, by adapter, so that those that need no place for theirs are found."""
        self.compilations = Compilations(config.max_compiling_s, config.max_num_seqs)

    def counts(self) -> RequestCounts:
        return RequestCounts(
            running=self.num_running,
            waiting=len(self.waiting) + self.num_without_grammar - self._num_swapped,
            swapped=self._num_swapped,
        )

    @property
    def num_running(self) -> int:
        return len(self.running)

    def num_decodes(self) -> int:
        """Running sequences that need one token."""
        # A list, and no call for each sequence: this is a tenth of a step of decodes.
        return sum([seq.num_tokens - seq.num_computed_tokens == 1 for seq in self.running])

    def has_replies(self) -> bool:
        """Whether a running sequence has tokens already: a long step is a pause for it."""
        return any(seq.num_output_tokens for seq in self.running)

    @property
    def num_without_grammar(self) -> int:
        """Waiting sequences whose grammar is not compiled."""
        return len(self.uncompiled) + len(self.compilations)

    def lacks_grammar(self, seq: Sequence) -> bool:
        """Whether it waits for its grammar, where that is compiled during steps."""
        return self.compilations.is_on and seq.has_grammar and not seq.is_compiled

    def all_waiting(self) -> list[Sequence]:
        """Sequences that do not run, in no particular order."""
        return [*self.waiting, *self.uncompiled, *self.compilations]

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        if self._accounts is not None:
            self._accounts.join(seq)
        self.forecast.note_arrival(seq.priority, now_s=seq.admitted_s)
        self._wait(seq)

    def admit(self, seq: Sequence, *, now_s: float) -> None:
        """Move a sequence from the waiting queue to the running one."""
        self._wait_no_more(seq)
        self._num_swapped -= seq.status is Status.SWAPPED
        seq.become(Status.RUNNING)
        if seq.is_compiled:
            self.compilations.note_used(seq)
            seq.is_compiled = False
        insort(self.running, seq, key=_running_rank_of)
        num_waiting = len(self.waiting) + self.num_without_grammar
        self.forecast.note_start(num_waiting=num_waiting, now_s=now_s)

    def compile(self, seq: Sequence) -> None:
        """Have the grammar of a sequence compiled."""
        self._wait_no_more(seq)
        self.compilations.begin(seq)

    def give_up_row(self, seq: Sequence) -> None:
        """Let a waiting sequence wait for its grammar once more: its row is given up for another's."""
        self._wait_no_more(seq)
        self.compilations.note_unused(seq)
        seq.is_compiled = False
        self._wait(seq)

    def note_compiled(self, sequence_id: SequenceId) -> bool:
        """Put a sequence into the waiting queue at its place; False if it has ended meanwhile."""
        seq = self.compilations.report(sequence_id)
        if seq is not None:
            seq.is_compiled = True
            self._wait(seq)
        return seq is not None

    def requeue(self, seq: Sequence, status: Status) -> None:
        """Move a running sequence to the waiting queue: WAITING, or SWAPPED with a copy on the host."""
        self._leave_running(seq)
        self._num_swapped += status is Status.SWAPPED
        seq.become(status)
        self._wait(seq)

    def lose_copy(self, seq: Sequence) -> None:
        """Note that the copy on the host is gone: the sequence waits as one that recomputes."""
        seq.become(Status.WAITING)
        self._num_swapped -= 1

    def finish(self, seq: Sequence) -> None:
        """Remove a sequence from the queue that it is in."""
        before = seq.status
        seq.become(Status.FINISHED)
        if before is Status.RUNNING:
            self._leave_running(seq)
        else:
            self._num_swapped -= before is Status.SWAPPED
            self._leave_waiting(seq)
        if self._accounts is not None:
            self._accounts.leave(seq)

    def most_urgent(self) -> Sequence:
        """First of the waiting queue, whatever the age of others. There must be one."""
        return self.waiting.most_urgent()

    def candidates(self, num_free: int) -> list[Sequence]:
        """Waiting sequences that may fit into `num_free` blocks, wherever they stand; a few, by rank."""
        return [] if self._by_need is None else self._by_need.candidates(num_free)

    def first_with(self, adapters: Iterable[str]) -> Sequence | None:
        """First waiting sequence with one of these adapters; None if there is none. O(adapters * levels).

        It is the first that the waiting queue would have if no others were in it.
        """
        by_adapter = self._by_adapter or {}
        queues = [by_adapter[name] for name in adapters if name in by_adapter]
        oldest = min((queue.oldest() for queue in queues), key=_rank_of, default=None)
        if oldest is None or self._accounts is None:
            return oldest
        service, level = self._accounts.service, self._order.level
        choices = [choice for queue in queues for choice in queue.choices()]
        equals = [choice for choice in choices if level(choice.priority) == level(oldest.priority)]
        return min(equals, key=lambda seq: (service(seq), seq.tenant, seq.rank))

    def behind(self, seq: Sequence) -> list[Sequence]:
        """Running sequences that are served after `seq`."""
        return self.running[self._place(seq) + 1 :]

    def charge(self, seq: Sequence, cost: float) -> None:
        """Put service on a tenant's account, if there are accounts."""
        if self._accounts is not None:
            self._accounts.charge(seq, cost)

    def charge_generated(self, seq: Sequence, num_tokens: int) -> None:
        """Put generated tokens on a tenant's account, if there are accounts."""
        self.charge(seq, GENERATED_TOKEN_COST * num_tokens)

    def over_served(self, seq: Sequence) -> list[Sequence]:
        """Running sequences of tenants that had far more than the tenant of `seq`, of the same priority."""
        level = self._order.level
        return [
            each
            for each in self.running
            if level(each.priority) == level(seq.priority) and self.lead(each, seq) >= 0
        ]

    def lead(self, ahead: Sequence, seq: Sequence) -> float:
        """Tokens of a prompt by which a tenant had far more than another one; negative if it had not."""
        if self._accounts is None:
            return -1.0
        service = self._accounts.service
        return (service(ahead) - service(seq) - _LEAST_LEAD) / PROMPT_TOKEN_COST

    def reports(
        self, page: ReportPage, reason_of: _ReasonOf, *, now_s: float
    ) -> Iterator[SequenceReport | None]:
        """Yield a page of the running queue, those whose grammar is being compiled, and the others by rank.

        None stands for a sequence before the page, or that has left meanwhile. The first costs a copy of the
        waiting queues, each O(log(waiting)). The queues may change between two of them.
        """
        num_running = len(self.running)
        begin = max(page.first - num_running, 0)
        end = max(page.first + page.most - num_running, 0)
        compiling = list(self.compilations)
        queues = (self.waiting, self.uncompiled) if begin < end else ()
        heaps = [heap.copy() for queue in queues for heap in queue.heaps()]
        for place, seq in enumerate(self.running[page.first : page.first + page.most], page.first):
            waits = seq.encoder_inputs and reason_of(seq, place) is WaitReason.ENCODER
            reason = WaitReason.ENCODER.value if waits else ""
            yield self._report(seq, place, reason, None, now_s) if seq.status is Status.RUNNING else None
        place = num_ahead = 0
        for waiting in chain(compiling, walk(heaps)):
            if place == end:
                return
            if waiting is None or waiting.status is Status.FINISHED or place < begin:
                yield None
            else:
                expected_s = self.forecast.expected_s(place, waiting.priority, now_s=now_s)
                reason = reason_of(waiting, num_ahead).value
                yield self._report(waiting, place, reason, expected_s, now_s)
            place += waiting is not None
            num_ahead += waiting is not None and not self.lacks_grammar(waiting)

    def _report(
        self, seq: Sequence, place: int, wait_reason: str, expected_start_s: float | None, now_s: float
    ) -> SequenceReport:
        return SequenceReport(
            **{name: getattr(seq, name) for name in _REPORTED},
            state=seq.status.value,
            place=place,
            num_host_blocks=sum([len(table.host_ids) for table in seq.tables]),
            age_s=now_s - seq.admitted_s,
            wait_reason=wait_reason,
            expected_start_s=expected_start_s,
            blocks_by_group={
                name: len(table.block_ids)
                for name, table in zip(self._group_names, seq.tables, strict=False)
                if table.block_ids
            },
        )

    def _new_queue(self) -> _Queue:
        if self._accounts is not None:
            return FairWaitingQueue(self._order, self._accounts)
        return AgingWaitingQueue() if self._order.ages else WaitingQueue()

    def _wait(self, seq: Sequence) -> None:
        seq.turn += 1
        if self.lacks_grammar(seq):
            self.uncompiled.push(seq)
            return
        self.num_arrivals += 1
        self.waiting.push(seq)
        if self._by_need is not None:
            self._by_need.push(seq)
        if self._by_adapter is not None:
            if seq.adapter not in self._by_adapter:
                self._by_adapter[seq.adapter] = self._new_queue()
            self._by_adapter[seq.adapter].push(seq)

    def _wait_no_more(self, seq: Sequence) -> None:
        seq.turn += 1
        if self.lacks_grammar(seq):
            self.uncompiled.remove(seq)
            return
        self.waiting.remove(seq)
        if self._by_need is not None:
            self._by_need.remove(seq)
        if self._by_adapter is not None:
            self._by_adapter[seq.adapter].remove(seq)
            if not len(self._by_adapter[seq.adapter]):
                del self._by_adapter[seq.adapter]

    def _leave_waiting(self, seq: Sequence) -> None:
        """Remove a sequence that ends before its admission."""
        if seq in self.compilations:
            self.compilations.leave(seq)
            return
        self._wait_no_more(seq)
        if seq.is_compiled:
            self.compilations.note_unused(seq)

    def _leave_running(self, seq: Sequence) -> None:
        place = self._place(seq)
        assert self.running[place] is seq
        del self.running[place]

    def _place(self, seq: Sequence) -> int:
        return bisect_left(self.running, seq.running_rank, key=_running_rank_of)
