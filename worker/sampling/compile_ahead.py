"""Rows with grammars that are compiled while steps run, for sequences that wait to be admitted.

Owns: the thread that compiles, one grammar after the other, and the rows until the step that admits their
sequences takes them. It also frees the matchers of rows that are gone, which takes up to a millisecond each,
and gives their memory back to the system.

The library lets go of the interpreter while it compiles and computes a mask, so that steps go on meanwhile.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from math import inf

from scheduler.messages import Grammar, SequenceId
from worker.machine import lower_precedence, trim_heaps
from worker.sampling.grammar_rows import RowGrammar

_NICENESS = 10
"""Steps come first where cores are short."""
_TRIM_EVERY_S = 5.0
"""Seconds at least between two trims. Eight choices of a dear grammar take 20 MiB for a moment, in heaps of
several threads, and the allocator keeps for each of them the most that it ever had."""

_Text = tuple[Grammar, tuple[int, ...]]
"""Grammar and the generated tokens that it is followed to: rows of the same are as good as each other."""


class CompileAhead:
    """All calls come from the thread of the steps. The other one starts with the first grammar."""

    def __init__(self, make_row: Callable[[Grammar, Sequence[int]], RowGrammar]) -> None:
        self._make_row = make_row
        self._thread: ThreadPoolExecutor | None = None
        self._trimmed_s = -inf
        self._next_trim: threading.Timer | None = None
        self._finished: deque[tuple[SequenceId, _Text, RowGrammar | None]] = deque()
        self._given_up: set[SequenceId] = set()
        """Sequences for which no compilation need begin; they are reported all the same."""
        self._rows: dict[SequenceId, tuple[_Text, RowGrammar]] = {}
        self._handed_out: defaultdict[_Text, list[RowGrammar]] = defaultdict(list)

    def begin(self, sequence_id: SequenceId, grammar: Grammar, generated: Sequence[int]) -> None:
        """Have a row compiled. `take_finished` returns the sequence once it is, whatever becomes of it."""
        self._in_thread(self._compile, sequence_id, (grammar, tuple(generated)))

    def give_up(self, sequence_id: SequenceId) -> None:
        """Skip the compilation for a sequence that has ended, unless it is under way."""
        self._given_up.add(sequence_id)

    def take_finished(self) -> list[SequenceId]:
        """Sequences whose rows are compiled since the last call, or failed to: the row says so then."""
        found = []
        while self._finished:
            sequence_id, text, row = self._finished.popleft()
            self._given_up.discard(sequence_id)
            if row is not None:
                self._rows[sequence_id] = text, row
            found.append(sequence_id)
        return found

    def hand_out(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Offer the rows of sequences to the step that admits them; free those that the last step left."""
        for left in chain.from_iterable(self._handed_out.values()):
            self.free(left)
        self._handed_out.clear()
        for sequence_id in sequence_ids:
            text, row = self._rows.pop(sequence_id)
            self._handed_out[text].append(row)

    def take_row(self, grammar: Grammar, generated: Sequence[int]) -> RowGrammar | None:
        """Take a row that was handed out; None if there is none."""
        if not self._handed_out:
            return None
        rows = self._handed_out.get((grammar, tuple(generated)))
        return rows.pop() if rows else None

    def discard(self, sequence_id: SequenceId) -> None:
        """Free the compiled row of a sequence that has no use for it."""
        _, row = self._rows.pop(sequence_id, (None, None))
        self.free(row)

    def free(self, row: RowGrammar | None) -> None:
        """Free the matcher of a removed row while steps run; nothing happens without one."""
        matcher = None if row is None else row.give_up_matcher()
        if matcher is not None:
            last_reference = [matcher]
            del matcher
            self._in_thread(self._free, last_reference)

    def _in_thread(self, work: Callable[..., None], *args: object) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(
                1, "compile", initializer=lower_precedence, initargs=(_NICENESS,)
            )
        self._thread.submit(work, *args)

    def _compile(self, sequence_id: SequenceId, text: _Text) -> None:
        row = None
        try:
            if sequence_id not in self._given_up:
                row = self._make_row(*text)
        except BaseException as error:  # noqa: BLE001 - the library's panics are no Exceptions
            row = RowGrammar(None, None, failure=f"the grammar failed: {type(error).__name__}")
        self._finished.append((sequence_id, text, row))

    def _free(self, last_reference: list[object]) -> None:
        last_reference.clear()
        if self._next_trim is not None:
            return
        wait_s = self._trimmed_s + _TRIM_EVERY_S - time.monotonic()
        if wait_s <= 0:
            self._trim()
            return
        self._next_trim = threading.Timer(wait_s, self._trim_late)
        self._next_trim.daemon = True
        self._next_trim.start()

    def _trim(self) -> None:
        self._trimmed_s = time.monotonic()
        trim_heaps()

    def _trim_late(self) -> None:
        """Return the memory of a burst's last rows to the system: a long pause may follow."""
        lower_precedence(_NICENESS)
        self._next_trim = None  # first: memory that is freed from here on is for a trim of its own
        self._trim()
