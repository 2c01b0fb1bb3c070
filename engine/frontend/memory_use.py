"""How full this machine's memory is, for those who may not look for themselves.

Owns: how old the answer may be.
Never: where it is read (worker/machine.py), or what follows from it (server/access/memory_gate.py).
"""

import math
import time
from collections.abc import Callable

from worker.machine import memory_use

_MAX_AGE_S = 1.0


class MemoryGauge:
    """Cheap to ask: the files of the kernel are read once a second at most."""

    def __init__(
        self, *, read: Callable[[], float] = memory_use, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._clock_s = clock_s
        self._read_s = -math.inf
        self._share = 0.0

    def share(self) -> float:
        """Share of the memory in use, 0 to 1."""
        now_s = self._clock_s()
        if now_s - self._read_s >= _MAX_AGE_S:
            self._share, self._read_s = self._read(), now_s
        return self._share
