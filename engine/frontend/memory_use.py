"""The memory use of this machine, for the server, which may not import the worker."""

import math
import time
from collections.abc import Callable

from worker.machine import available_memory_bytes, memory_use

__all__ = ["MemoryGauge", "available_memory_bytes"]

_MAX_AGE_S = 1.0


class MemoryGauge:
    """A cached reading: the kernel's files are read once a second at most."""

    def __init__(
        self, *, read: Callable[[], float] = memory_use, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._clock_s = clock_s
        self._read_s = -math.inf
        self._share = 0.0

    def share(self) -> float:
        """Return the share of the memory in use, 0 to 1."""
        now_s = self._clock_s()
        if now_s - self._read_s >= _MAX_AGE_S:
            self._share, self._read_s = self._read(), now_s
        return self._share
