"""Whether a loaded engine process still moves.

Owns: how long nothing was heard of it, and when that is too long.
Never: kills (engine_processes.py), or judges a model that is being loaded: reading weights has no bound.
"""

import asyncio
import time

_LONGEST_INTERVAL_S = 0.5


class HangWatch:
    """For one life. Silence counts only while this event loop moves itself.

    So a frozen container or a stopped API process, after which the engine's beats lie unread, is no hang.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._interval_s = min(timeout_s / 8, _LONGEST_INTERVAL_S)
        self._silent_s = 0.0
        self._is_loaded = False

    def loaded(self) -> None:
        """From now on silence counts."""
        self._is_loaded = True
        self._silent_s = 0.0

    def heard(self) -> None:
        """The loop has moved."""
        self._silent_s = 0.0

    @property
    def is_hanging(self) -> bool:
        return self._silent_s > self._timeout_s

    async def until_hang(self) -> float:
        """Return once it stands still for too long; the seconds of silence."""
        last_s = time.monotonic()
        while not self.is_hanging:
            await asyncio.sleep(self._interval_s)
            now_s = time.monotonic()
            if self._is_loaded:
                self._silent_s += min(now_s - last_s, 2 * self._interval_s)
            last_s = now_s
        return self._silent_s
