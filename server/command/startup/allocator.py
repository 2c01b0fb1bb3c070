"""The allocator of the API process: Python's objects lie in the heaps of the C library, large blocks apart.

Owns: that the process of `tokenyard serve` runs with it, and that its children do not.

Python's own allocator takes memory in arenas of 1 MiB and returns one only when nothing in it is in use. A
large body fills dozens for a moment, and objects made in that moment that live on keep many. Of the C
library's heaps each free page can be returned, and a block that was mapped by itself goes when it is freed.

Source: docs/decisions/python-objects.md; mallopt(3), prctl(2).
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_VARIABLE, _HEAPS = "PYTHONMALLOC", "malloc"
_MARK = "tokenyard_heaps"
"""Option of the interpreter that was started anew; its value is the name that the process had."""
_INFORMS = ("-h", "--help", "-V", "--version")
_M_MMAP_THRESHOLD, _PR_SET_NAME = -3, 15
_LARGE_BYTES = 128 * 1024
"""Size from which a block is mapped by itself. glibc begins with this one, and raises it to as much as 32 MiB
once it has seen such a block freed; then large bodies lie between what stays."""


def allocate_from_heaps(words: Sequence[str]) -> None:
    """Start the program anew in this process, with the other allocator, if its words make it serve.

    Python reads the variable before its first object is made, and never again. The operator's choice stays.
    """
    first = words[0] if words else "serve"
    if (first != "serve" and not first.startswith("-")) or first in _INFORMS:
        return
    name = sys._xoptions.get(_MARK)
    if name is not None:
        os.environ.pop(_VARIABLE, None)  # children read no bodies, and Python's own is faster
        _call_c("prctl", _PR_SET_NAME, str(name).encode())
    elif _VARIABLE not in os.environ and _can_start_anew(words):
        _start_anew()
    chosen = os.environ.get("GLIBC_TUNABLES", "")
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ and "malloc.mmap_threshold" not in chosen:
        _call_c("mallopt", _M_MMAP_THRESHOLD, _LARGE_BYTES)


def _can_start_anew(words: Sequence[str]) -> bool:
    """Whether that is glibc's, Python obeys the variable, and the same words bring us here again."""
    own = sys.orig_argv[: len(sys.orig_argv) - len(words)]
    is_command = own + list(words) == sys.orig_argv and "-" not in own
    # Without the GIL Python has an allocator that it needs; the development mode has one that checks.
    is_usual = not (sys.flags.ignore_environment or sys.flags.dev_mode or "t" in sys.abiflags)
    return bool(sys.executable) and is_command and is_usual and is_glibc()


def is_glibc() -> bool:
    """Whether the C library is the one whose heaps give memory back when asked."""
    with suppress(ValueError, OSError):  # the name is not known; musl knows it, and has no value
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    return False


def _start_anew() -> None:
    with suppress(OSError):  # then with what there is
        name = Path("/proc/self/comm").read_text().strip()
        arguments = [sys.executable, "-X", f"{_MARK}={name}", *sys.orig_argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, _VARIABLE: _HEAPS})


def _call_c(name: str, *arguments: int | bytes) -> None:
    import ctypes  # commands that do not serve answer sooner without it

    with suppress(OSError, AttributeError):  # another C library than glibc
        getattr(ctypes.CDLL(None), name)(*arguments)
