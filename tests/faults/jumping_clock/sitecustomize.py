"""Imported by every Python process of a test before anything else: the wall clock is what a file says.

Owns: the seconds that are added to it, read anew each time. Found by way of PYTHONPATH.
Never: touches the monotonic clocks, which no administrator and no time server sets.
"""

import os
import time
from pathlib import Path

_OFFSET = Path(os.environ["CLOCK_OFFSET"])
_real_time, _real_time_ns = time.time, time.time_ns


def _offset_s() -> int:
    return int(_OFFSET.read_text(encoding="ascii") or 0)


time.time = lambda: _real_time() + _offset_s()
time.time_ns = lambda: _real_time_ns() + _offset_s() * 10**9
