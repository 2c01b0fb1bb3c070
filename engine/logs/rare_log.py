"""Log lines about frequent events: one line in ten seconds, with the number of events.

Never: loses an event, from any thread.
"""

import logging
import threading
import time
from collections.abc import Callable

_EVERY_S = 10.0


class RareLog:
    """One message. Its text has a place for the number of times, then those for the last time's details."""

    def __init__(
        self, log: logging.Logger, level: int, text: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._level = level
        self._text = text
        self._clock = clock
        self._lock = threading.Lock()
        self._num = 0
        self._next_s = float("-inf")

    def note(self, *details: object) -> None:
        """Count once; write a line if the last one is long ago."""
        with self._lock:
            self._num += 1
            now_s = self._clock()
            if now_s < self._next_s:
                return
            num, self._num, self._next_s = self._num, 0, now_s + _EVERY_S
        self._log.log(self._level, self._text, num, *details)
