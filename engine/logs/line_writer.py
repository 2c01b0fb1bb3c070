"""Lines to a file descriptor, by a thread, so that nobody who logs ever waits for who reads.

Owns: the bounded queue, the thread, and the count of what found no room.
Never: the form of a line (log_lines.py).

Written with os.write and not through sys.stderr: a thread that is stuck in a full pipe would hold that
stream's lock, and the interpreter could not end.
"""

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable

_MAX_PENDING_BYTES = 4 << 20
_RETRY_S = 1.0


class LineWriter:
    """Threads may share it. What is put after `close` is lost."""

    def __init__(
        self,
        descriptor: int,
        *,
        describe_loss: Callable[[int], bytes],
        max_pending_bytes: int = _MAX_PENDING_BYTES,
    ) -> None:
        """`describe_loss` makes the line that says how many lines were dropped before it."""
        self._descriptor = descriptor
        self._describe_loss = describe_loss
        self._max_pending_bytes = max_pending_bytes
        self._lines: deque[bytes] = deque()
        self._num_pending_bytes = 0
        self._num_untold = 0
        self.num_dropped = 0
        """Lines that nobody will read, so far."""
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Take a line, or count it as dropped; returns at once."""
        with self._changed:
            if self._is_closing or self._num_pending_bytes + len(line) > self._max_pending_bytes:
                self._drop()
                return
            self._tell_loss()  # in the place of what is lost
            self._append(line)
            self._changed.notify()

    def close(self, *, timeout_s: float) -> None:
        """Write what is pending, for so long at most. May be called twice."""
        with self._changed:
            self._tell_loss()
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines and not self._is_closing:
                    self._changed.wait()
                if not self._lines:
                    return
                line = self._lines.popleft()
            self._write(line)
            with self._changed:
                self._num_pending_bytes -= len(line)

    def _write(self, line: bytes) -> None:
        """A disk that is full, or a reader that has gone, costs the line."""
        try:
            while line:
                with contextlib.suppress(BlockingIOError):
                    line = line[os.write(self._descriptor, line) :]
                    continue
                select.select([], [self._descriptor], [], _RETRY_S)
        except OSError:
            with self._changed:
                self._drop()

    def _append(self, line: bytes) -> None:
        self._num_pending_bytes += len(line)
        self._lines.append(line)

    def _tell_loss(self) -> None:
        if self._num_untold:
            num_lost, self._num_untold = self._num_untold, 0
            self._append(self._describe_loss(num_lost))

    def _drop(self) -> None:
        self.num_dropped += 1
        self._num_untold += 1
