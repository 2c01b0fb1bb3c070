"""Rows with grammars that are compiled beside the steps, for sequences that wait to be admitted.

Owns: the thread that compiles, one grammar after the other, and the rows until a sequence takes them. It also
frees the matchers of rows that are gone, which takes up to a millisecond each.
Never: decides what is compiled and how much at once (scheduler/queues/compilations.py).

The library lets go of the interpreter while it compiles and computes a mask, so that steps go on meanwhile.
"""

import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from scheduler.messages import Grammar, SequenceId
from worker.sampling.grammar_rows import RowGrammar

_NICENESS = 10
"""Steps come first where cores are short."""

_MAX_ROWS = 512
"""Rows that are kept; then the oldest go. One is left over if the admission of its sequence fails. A sequence
whose row has gone is compiled for in its step."""

_Text = tuple[Grammar, tuple[int, ...]]
"""Grammar and the generated tokens that it is followed to: rows of the same are as good as each other."""


class CompileAhead:
    """All calls come from the thread of the steps. The other one starts with the first grammar."""

    def __init__(self, make_row: Callable[[Grammar, Sequence[int]], RowGrammar]) -> None:
        self._make_row = make_row
        self._thread: ThreadPoolExecutor | None = None
        self._finished: deque[tuple[SequenceId, _Text, RowGrammar]] = deque()
        self._rows: defaultdict[_Text, list[RowGrammar]] = defaultdict(list)
        self._num_rows = 0

    def begin(self, sequence_id: SequenceId, grammar: Grammar, generated: Sequence[int]) -> None:
        """Have a row compiled. `take_finished` returns the sequence once it is, whatever becomes of it."""
        self._in_thread(self._compile, sequence_id, (grammar, tuple(generated)))

    def take_finished(self) -> list[SequenceId]:
        """Sequences whose rows are compiled since the last call, or failed to: the row says so then."""
        found = []
        while self._finished:
            sequence_id, text, row = self._finished.popleft()
            self._rows[text].append(row)
            self._num_rows += 1
            found.append(sequence_id)
            if self._num_rows > _MAX_ROWS:
                self.discard(*next(iter(self._rows)))
        return found

    def take_row(self, grammar: Grammar, generated: Sequence[int]) -> RowGrammar | None:
        """Hand a compiled row over; None if there is none."""
        text = grammar, tuple(generated)
        rows = self._rows.get(text)
        if not rows:
            return None
        row = rows.pop()
        self._num_rows -= 1
        if not rows:
            del self._rows[text]
        return row

    def discard(self, grammar: Grammar, generated: Sequence[int]) -> None:
        """Free a compiled row that no sequence takes."""
        self.free(self.take_row(grammar, generated))

    def free(self, row: RowGrammar | None) -> None:
        """Free the matcher of a row that is gone, beside the steps; nothing happens without one."""
        matcher = None if row is None else row.give_up_matcher()
        if matcher is not None:
            last_reference = [matcher]
            del matcher
            self._in_thread(last_reference.clear)

    def _in_thread(self, work: Callable[..., None], *args: object) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "compile", initializer=_step_back)
        self._thread.submit(work, *args)

    def _compile(self, sequence_id: SequenceId, text: _Text) -> None:
        try:
            row = self._make_row(*text)
        except BaseException as error:  # noqa: BLE001 - the library's panics are no Exceptions
            row = RowGrammar(None, None, failure=f"the grammar failed: {type(error).__name__}")
        self._finished.append((sequence_id, text, row))


def _step_back() -> None:
    """Lower the precedence of this thread, where the system knows that of threads."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
