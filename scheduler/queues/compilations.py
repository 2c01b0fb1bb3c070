"""Compilations of grammars beside the steps: their sequences wait here, and not in the waiting queue.

Owns: which these are, the time that they may take together, and what the worker has not heard of yet.
Never: compiles, or decides whose turn it is (admission.py).
"""

from collections.abc import Iterator

from scheduler.messages import SequenceId
from scheduler.sequence import Sequence


class Compilations:
    """At most `max_s` of processor time under way; the first may take more. 0: steps compile themselves.

    A compilation that has begun counts until the worker reports it, although its sequence may have ended: so
    clients that come and go have no more of them than those that stay.
    """

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._sequences: dict[SequenceId, Sequence] = {}
        self._costs_s: dict[SequenceId, float] = {}
        self._begun: list[Sequence] = []
        self._unused: list[Sequence] = []

    @property
    def is_on(self) -> bool:
        return self._max_s > 0

    @property
    def num_under_way(self) -> int:
        """Compilations that the worker has not reported."""
        return len(self._costs_s)

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the sequences that wait, in the order in which they began to."""
        return iter(self._sequences.values())

    def __contains__(self, seq: Sequence) -> bool:
        return seq.sequence_id in self._sequences

    def has_room(self, seq: Sequence) -> bool:
        return not self._costs_s or sum(self._costs_s.values()) + seq.compile_s <= self._max_s

    def begin(self, seq: Sequence) -> None:
        self._sequences[seq.sequence_id] = seq
        self._costs_s[seq.sequence_id] = seq.compile_s
        self._begun.append(seq)

    def report(self, sequence_id: SequenceId) -> Sequence | None:
        """Note that the worker is done; return the sequence, or None if it has ended meanwhile."""
        del self._costs_s[sequence_id]
        return self._sequences.pop(sequence_id, None)

    def leave(self, seq: Sequence) -> None:
        """Note that a sequence has ended which waits here."""
        del self._sequences[seq.sequence_id]

    def note_unused(self, seq: Sequence) -> None:
        """Note that a sequence has ended between its compilation and its admission."""
        self._unused.append(seq)

    def take_begun(self) -> list[Sequence]:
        """Sequences that the worker is to compile for, and was not asked to yet."""
        begun, self._begun = self._begun, []
        return begun

    def take_unused(self) -> list[Sequence]:
        """Sequences for which the worker has compiled in vain."""
        unused, self._unused = self._unused, []
        return unused
