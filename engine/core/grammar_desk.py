"""Grammars of the engine process: the scheduler waits for some, which the worker compiles beside its steps.

Owns: what passes between the two, with each plan.
Never: compiles, or decides which grammar comes first.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from scheduler.messages import Grammar, SequenceId
from scheduler.scheduler import Scheduler


class CompilesAhead(Protocol):
    """The methods of the worker's side that the desk calls; it documents them."""

    def begin(self, sequence_id: SequenceId, grammar: Grammar, generated: SequenceOf[int]) -> None: ...
    def give_up(self, sequence_id: SequenceId) -> None: ...
    def take_finished(self) -> list[SequenceId]: ...
    def hand_out(self, sequence_ids: Iterable[SequenceId]) -> None: ...
    def discard(self, sequence_id: SequenceId) -> None: ...


class GrammarDesk:
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
