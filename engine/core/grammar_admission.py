"""Grammars of the engine process: the scheduler waits for some, which the worker compiles beside its steps.

Owns: what passes between the two, with each plan; with several stages, between the first and the one that
samples, where rows are compiled.
Never: compiles, or decides which grammar comes first.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from engine.nodes.rank_plans import Compiled, GrammarOrder
from scheduler.messages import Grammar, SequenceId
from scheduler.scheduler import Scheduler


class CompilesAhead(Protocol):
    """The methods of the worker's side that the desk calls; it documents them."""

    def begin(self, sequence_id: SequenceId, grammar: Grammar, generated: SequenceOf[int]) -> None: ...
    def give_up(self, sequence_id: SequenceId) -> None: ...
    def take_finished(self) -> list[SequenceId]: ...
    def hand_out(self, sequence_ids: Iterable[SequenceId]) -> None: ...
    def discard(self, sequence_id: SequenceId) -> None: ...


class GrammarAdmission:
    """One for each loop; without a worker that compiles ahead it does nothing."""

    def __init__(self, scheduler: Scheduler, worker: CompilesAhead | None) -> None:
        self._compilations = scheduler.compilations
        self._note_compiled = scheduler.note_compiled
        self._worker = worker

    @property
    def is_busy(self) -> bool:
        """Whether a compilation is under way."""
        return bool(self._compilations.num_under_way)

    def exchange(self) -> None:
        """Between a plan and its step: begin what the scheduler waits for, and let it know what is done."""
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


class GrammarsOfLastStage:
    """Rank 0's end of what passes to the rank that samples, where rows are compiled: its calls become orders.

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
        """Hand out rows; once more with none, since that frees what the step before has left."""
        handed_out = tuple(sequence_ids)
        if handed_out or self._has_handed_out:
            self._send(GrammarOrder("hand_out", handed_out))
        self._has_handed_out = bool(handed_out)

    def discard(self, sequence_id: SequenceId) -> None:
        self._send(GrammarOrder("discard", (sequence_id,)))


class GrammarsOfRank:
    """The end on the rank that samples: it carries out the orders of rank 0, and reports what is compiled."""

    def __init__(self, worker: CompilesAhead, send: Callable[[Compiled], None]) -> None:
        self._worker, self._send = worker, send
        self._under_way: set[SequenceId] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a compilation is under way that was not reported."""
        return bool(self._under_way)

    def carry_out(self, order: GrammarOrder) -> None:
        """Make a call of rank 0."""
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
        """Report what is compiled since the last call."""
        if finished := self._worker.take_finished():
            self._under_way.difference_update(finished)
            self._send(Compiled(tuple(finished)))
