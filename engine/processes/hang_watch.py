"""Detection of a loaded engine process that hangs.

Owns: the time since its last message, and the limit on it.
Never: kills (engine_processes.py), or judges a process that loads: reading weights has no bound.
"""

import asyncio
import time

_LONGEST_INTERVAL_S = 0.5


class HangWatch:
    """The watch over one process. Silence counts only while this event loop itself moves.

    A frozen container or a stopped API process, which leaves the engine's beats unread, is no hang.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._interval_s = min(timeout_s / 8, _LONGEST_INTERVAL_S)
        self._silent_s = 0.0
        self._is_loaded = False

    def loaded(self) -> None:
        """Note that the model is loaded: silence counts from now on."""
        self._is_loaded = True
        self._silent_s = 0.0

    def moved(self) -> None:
        """Note a message."""
        self._silent_s = 0.0

    @property
    def is_hanging(self) -> bool:
        return self._silent_s > self._timeout_s

    async def until_hang(self) -> float:
        """Wait until the process has been silent for too long; return the seconds of silence."""
        last_s = time.monotonic()
        while not self.is_hanging:
            await asyncio.sleep(self._interval_s)
            now_s = time.monotonic()
            if self._is_loaded:
                self._silent_s += min(now_s - last_s, 2 * self._interval_s)
            last_s = now_s
        return self._silent_s
