"""Grammars of the engine process: the scheduler waits for some, which the worker compiles beside its steps.

Owns: what passes between the two, with each plan.
Never: compiles, or decides which grammar comes first.
"""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from scheduler.messages import Grammar, SequenceId
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence


class CompilesAhead(Protocol):
    """The methods of the worker's side that the desk calls; it documents them."""

    def begin(self, sequence_id: SequenceId, grammar: Grammar, generated: SequenceOf[int]) -> None: ...
    def take_finished(self) -> list[SequenceId]: ...
    def discard(self, grammar: Grammar, generated: SequenceOf[int]) -> None: ...


class GrammarDesk:
    """One for each loop; without a worker that compiles ahead it does nothing."""

    def __init__(self, scheduler: Scheduler, worker: CompilesAhead | None) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._texts: dict[SequenceId, tuple[Grammar, tuple[int, ...]]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a compilation is under way."""
        return bool(self._texts)

    def exchange(self) -> None:
        """Begin what the scheduler waits for, and let it know what is done."""
        if self._worker is None:
            return
        for seq in self._scheduler.compilations.take_unused():
            self._worker.discard(*_text_of(seq))
        for seq in self._scheduler.compilations.take_begun():
            text = self._texts[seq.sequence_id] = _text_of(seq)
            self._worker.begin(seq.sequence_id, *text)
        for sequence_id in self._worker.take_finished():
            text = self._texts.pop(sequence_id)
            if not self._scheduler.note_compiled(sequence_id):
                self._worker.discard(*text)


def _text_of(seq: Sequence) -> tuple[Grammar, tuple[int, ...]]:
    """Grammar of a sequence, and what it has generated."""
    assert seq.params.grammar is not None, "only sequences with a grammar are compiled for"
    return seq.params.grammar, tuple(seq.token_ids[seq.num_prompt_tokens :])
