"""Memory that large bodies leave behind, given back to the system.

Owns: when the allocator is asked for it, which keeps freed memory in a pool for each thread otherwise.
"""

import asyncio
import ctypes
from collections.abc import Callable
from functools import cache

_AFTER_S = 1.0
"""Seconds after a large request, so that a crowd of them is trimmed once, and nothing of it is in use."""

_timers: dict[asyncio.AbstractEventLoop, asyncio.TimerHandle] = {}


def trim_soon() -> None:
    """Have the allocator return memory a second later, in a thread: it may take milliseconds."""
    loop = asyncio.get_running_loop()
    if loop not in _timers:
        _timers[loop] = loop.call_later(_AFTER_S, _trim, loop)


def _trim(loop: asyncio.AbstractEventLoop) -> None:
    del _timers[loop]
    trim = _find_trim()
    if trim is not None:
        loop.run_in_executor(None, trim, 0)


@cache
def _find_trim() -> Callable[[int], int] | None:
    """Find the function of glibc; None on other systems."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return trim
