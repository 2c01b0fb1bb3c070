"""Compilations of grammars during steps: sequences of those under way, and rows that are compiled."""

from collections.abc import Iterator
from operator import attrgetter

from scheduler.messages import SequenceId
from scheduler.sequence import Sequence

_rank_of = attrgetter("rank")


class Compilations:
    """At most `max_s` of processor time under way; the first may take more.

    With 0 sequences do not wait for grammars.

    A compilation that has begun counts until the worker reports it, although its sequence may have ended: so
    clients that come and go have no more of them than those that stay. A row counts among `max_rows` from
    then on until its sequence is admitted or ends.
    """

    def __init__(self, max_s: float, max_rows: int) -> None:
        self._max_s = max_s
        self._max_rows = max_rows
        self._sequences: dict[SequenceId, Sequence] = {}
        self._costs_s: dict[SequenceId, float] = {}
        self._compiled: dict[SequenceId, Sequence] = {}
        self._begun: list[Sequence] = []
        self._left: list[SequenceId] = []
        self._used: list[SequenceId] = []
        self._unused: list[SequenceId] = []

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

    @property
    def has_row(self) -> bool:
        """Whether one more row may be compiled."""
        return len(self._compiled) + len(self._costs_s) < self._max_rows

    def has_time(self, seq: Sequence) -> bool:
        return not self._costs_s or sum(self._costs_s.values()) + seq.compile_s <= self._max_s

    def compiled(self) -> list[Sequence]:
        """Sequences that wait with a compiled row, in order of rank."""
        return sorted(self._compiled.values(), key=_rank_of)

    def begin(self, seq: Sequence) -> None:
        self._sequences[seq.sequence_id] = seq
        self._costs_s[seq.sequence_id] = seq.compile_s
        self._begun.append(seq)

    def report(self, sequence_id: SequenceId) -> Sequence | None:
        """Note that the worker is done; return the sequence, or None if it has ended meanwhile."""
        del self._costs_s[sequence_id]
        seq = self._sequences.pop(sequence_id, None)
        if seq is not None:
            self._compiled[sequence_id] = seq
        return seq

    def leave(self, seq: Sequence) -> None:
        """Note that a sequence has ended which waits here."""
        del self._sequences[seq.sequence_id]
        self._left.append(seq.sequence_id)

    def note_used(self, seq: Sequence) -> None:
        """Note that a sequence is admitted with its row."""
        del self._compiled[seq.sequence_id]
        self._used.append(seq.sequence_id)

    def note_unused(self, seq: Sequence) -> None:
        """Note that a sequence has no more use for its row."""
        del self._compiled[seq.sequence_id]
        self._unused.append(seq.sequence_id)

    def take_begun(self) -> list[Sequence]:
        """Sequences that the worker is to compile for, and was not asked to yet."""
        begun, self._begun = self._begun, []
        return begun

    def take_left(self) -> list[SequenceId]:
        """Sequences that ended before the worker reported them."""
        left, self._left = self._left, []
        return left

    def take_used(self) -> list[SequenceId]:
        """Sequences that were admitted with a compiled row, which their step takes."""
        used, self._used = self._used, []
        return used

    def take_unused(self) -> list[SequenceId]:
        """Sequences for which the worker has compiled in vain."""
        unused, self._unused = self._unused, []
        return unused
