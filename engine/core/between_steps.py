"""Calls of adapters and grammars between steps: from the loop to the worker, and from rank 0 to other ranks.

Owns: loading adapters on demand, and giving one up when the last sequence with it has ended; the exchange of
grammars between scheduler and worker; the orders by which other ranks make the calls of rank 0 too.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from typing import TYPE_CHECKING

from engine.core.interfaces import Adapters, CompilesAhead
from engine.nodes.rank_plans import AdapterOrder, Compiled, GrammarOrder
from engine.process_messages import AdapterAnswer, AdapterUse, AddRequest, ForgetAdapter, LoadAdapter
from scheduler.messages import Grammar, SequenceId
from worker.worker_config import AdapterFacts
from worker.worker_errors import AdapterRefused

if TYPE_CHECKING:
    from scheduler.scheduler import Scheduler
    from scheduler.sequence import Sequence


class AdapterLoads:
    """One for each loop; without a store it does nothing."""

    def __init__(self, scheduler: "Scheduler", store: Adapters | None) -> None:
        self._scheduler = scheduler
        self._store = store
        self._leaving: set[str] = set()

    def introduce(self, request: AddRequest) -> None:
        """Let the worker know where the adapter of a request is, before its sequences come."""
        if self._store is not None and request.adapter:
            self._store.introduce(request.adapter, request.adapter_folder)

    def load(self, asked: LoadAdapter) -> AdapterAnswer:
        """Load an adapter between two steps, which wait meanwhile."""
        if self._store is None:
            return AdapterAnswer(question=asked.question, refusal="this server computes no adapters")
        try:
            facts = self._store.load(asked.name, asked.folder)
        except AdapterRefused as refusal:
            return AdapterAnswer(question=asked.question, refusal=str(refusal))
        self._leaving.discard(facts.identity)
        return AdapterAnswer(question=asked.question, facts=facts)

    def forget(self, asked: ForgetAdapter) -> None:
        """Drop an adapter once no sequence uses it."""
        self._leaving.add(asked.identity)

    def report(self) -> AdapterUse | None:
        """Sum up the use of adapters, and drop those without a sequence; None where there are none."""
        if self._store is None:
            return None
        running = _used(self._scheduler.running_sequences())
        waiting = _used(self._scheduler.waiting_sequences())
        for identity in self._leaving - running - waiting:
            self._store.forget(identity)
            self._leaving.discard(identity)
        return AdapterUse(
            running=tuple(sorted(running)), waiting=tuple(sorted(waiting)), resident=self._store.resident
        )


def _used(sequences: "Iterable[Sequence]") -> set[str]:
    return {seq.adapter for seq in sequences if seq.adapter}


class GrammarAdmission:
    """One for each loop; without a worker that compiles ahead it does nothing."""

    def __init__(self, scheduler: "Scheduler", worker: CompilesAhead | None) -> None:
        self._compilations = scheduler.compilations
        self._note_compiled = scheduler.note_compiled
        self._worker = worker

    @property
    def is_busy(self) -> bool:
        return bool(self._compilations.num_under_way)

    def exchange(self) -> None:
        """Begin compilations that the scheduler waits for, and report finished ones, before a step."""
        worker, compilations = self._worker, self._compilations
        if worker is None:
            return
        worker.hand_out(compilations.take_used())
        for sequence_id in compilations.take_unused():
            worker.discard(sequence_id)
        for seq in compilations.take_begun():
            assert seq.params.grammar is not None, "only sequences with a grammar are compiled for"
            generated = seq.token_ids[seq.num_prompt_tokens :]
            worker.begin(seq.sequence_id, seq.params.grammar, generated)
        for sequence_id in compilations.take_left():
            worker.give_up(sequence_id)
        for sequence_id in worker.take_finished():
            if not self._note_compiled(sequence_id):
                worker.discard(sequence_id)


class RankAdapters:
    """The stores of adapters of all ranks as one: each makes the same calls between the same steps."""

    def __init__(self, own: Adapters, send: Callable[[AdapterOrder], None]) -> None:
        self._own, self._send = own, send

    @property
    def resident(self) -> tuple[str, ...]:
        """Identities in memory, which are the same on all ranks."""
        return self._own.resident

    def load(self, name: str, folder: str) -> AdapterFacts:
        """Read a folder on all ranks. Raises AdapterRefused, and nothing changes, if one of them cannot."""
        self._send(AdapterOrder("load", (name, folder)))
        return self._own.load(name, folder)

    def introduce(self, identity: str, folder: str) -> None:
        self._send(AdapterOrder("introduce", (identity, folder)))
        self._own.introduce(identity, folder)

    def forget(self, identity: str) -> None:
        self._send(AdapterOrder("forget", (identity,)))
        self._own.forget(identity)


def change_adapters(store: Adapters | None, order: AdapterOrder) -> None:
    """Make the call that rank 0 makes too; it answers for all whether an adapter is refused."""
    assert store is not None, "rank 0 has a store"
    with suppress(AdapterRefused):
        getattr(store, order.call)(*order.arguments)


class GrammarsOfLastStage:
    """Rank 0's end of the calls to the rank that samples, where rows are compiled: its calls become orders.

    Each is sent before the plan that needs it.
    """

    def __init__(
        self, send: Callable[[GrammarOrder], None], take_compiled: Callable[[], list[SequenceId]]
    ) -> None:
        self._send, self._take_compiled = send, take_compiled
        self._has_handed_out = False

    def begin(self, sequence_id: SequenceId, grammar: Grammar, generated: SequenceOf[int]) -> None:
        self._send(GrammarOrder("begin", (sequence_id,), grammar, tuple(generated)))

    def give_up(self, sequence_id: SequenceId) -> None:
        self._send(GrammarOrder("give_up", (sequence_id,)))

    def take_finished(self) -> list[SequenceId]:
        return self._take_compiled()

    def hand_out(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Hand out rows. After the last ones it is called once more without any, which frees their memory."""
        handed_out = tuple(sequence_ids)
        if handed_out or self._has_handed_out:
            self._send(GrammarOrder("hand_out", handed_out))
        self._has_handed_out = bool(handed_out)

    def discard(self, sequence_id: SequenceId) -> None:
        self._send(GrammarOrder("discard", (sequence_id,)))


class GrammarsOfRank:
    """The end on the rank that samples: it carries out orders, and reports compiled grammars."""

    def __init__(self, worker: CompilesAhead, send: Callable[[Compiled], None]) -> None:
        self._worker, self._send = worker, send
        self._under_way: set[SequenceId] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a compilation is under way that was not reported."""
        return bool(self._under_way)

    def carry_out(self, order: GrammarOrder) -> None:
        """Make a call that rank 0 has made."""
        if order.call == "begin":
            assert order.grammar is not None
            self._worker.begin(order.sequence_ids[0], order.grammar, order.generated)
            self._under_way.add(order.sequence_ids[0])
        elif order.call == "hand_out":
            self._worker.hand_out(order.sequence_ids)
        elif order.call == "discard":
            for sequence_id in order.sequence_ids:
                self._worker.discard(sequence_id)
        else:  # a report that crossed the order has ended what would be given up
            for sequence_id in self._under_way.intersection(order.sequence_ids):
                self._worker.give_up(sequence_id)

    def report(self) -> None:
        """Report the grammars compiled since the last call."""
        if finished := self._worker.take_finished():
            self._under_way.difference_update(finished)
            self._send(Compiled(tuple(finished)))
