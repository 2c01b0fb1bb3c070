"""The allocator of the API process: Python's objects lie in the heaps of the C library, large blocks apart.

Owns: that the process of `tokenyard serve` runs with it, and that its children do not.
Never: gives memory back (sockets/trimming.py).

Python's own allocator takes memory in arenas of 1 MiB and returns one only when nothing in it is in use. A
large body fills dozens for a moment, and what is made in that moment and lives on keeps many. Of the C
library's heaps each free page can be returned, and a block that was mapped by itself goes when it is freed.

Source: docs/decisions/0095-python-objects-in-heaps.md; mallopt(3).
"""

import ctypes
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

_VARIABLE = "PYTHONMALLOC"
_HEAPS = "malloc"
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 128 * 1024
"""Size from which a block is mapped by itself. glibc begins with this one, and raises it to as much as 32 MiB
once it has seen such a block freed; then large bodies lie between what stays."""


def allocate_from_heaps(words: Sequence[str]) -> None:
    """Start the program anew in this process, with the other allocator, if these words of its make it serve.

    Python reads the variable before its first object is made, and never again. What the operator chose stays,
    except that children of a process with `malloc` have Python's own: they read no bodies.
    """
    if not (words[:1] in ([], ["serve"]) or words[0].startswith("-")):
        return
    if os.environ.get(_VARIABLE) == _HEAPS:
        del os.environ[_VARIABLE]
    elif _VARIABLE not in os.environ and _heaps_return_pages():
        arguments = [sys.executable, *sys.orig_argv[1:]]
        with suppress(OSError):  # then with what there is
            os.execve(sys.executable, arguments, {**os.environ, _VARIABLE: _HEAPS})
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        _map_large_blocks()


def _heaps_return_pages() -> bool:
    """Whether the C library is glibc, and Python obeys the variable and can be started again."""
    is_glibc = "CS_GNU_LIBC_VERSION" in os.confstr_names
    return is_glibc and bool(sys.executable) and not sys.flags.ignore_environment


def _map_large_blocks() -> None:
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
