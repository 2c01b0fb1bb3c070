"""Launches of kernels that begin while the one before them ends: programmatic dependent launch.

Source: `griddepcontrol` of PTX, since compute capability 9.0.

A kernel that is launched so may begin before the one before it has ended. It waits first: before it reads or
writes anything, and before any of its programs ends. So all that was launched earlier has ended, and is seen,
when it goes on; what it gains is its own beginning. A launch of any other kind, of cuBLAS or of a copy, waits
as a whole, and is waited for.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import triton
import triton.language as tl
from triton.language.extra import cuda

_WHOLE = {"WAITS": False}
_DEPENDENT = {"WAITS": True, "launch_pdl": True}
_way = _WHOLE


def launch_way() -> dict[str, bool]:
    """Return the present way as arguments of a launch, for a kernel that begins with `wait_first`."""
    return _way


@contextmanager
def dependent_launches() -> Iterator[None]:
    """Launch kernels in this way inside the block. Not for several threads: the worker has one."""
    global _way
    before, _way = _way, _DEPENDENT
    try:
        yield
    finally:
        _way = before


@triton.jit
def wait_first(WAITS: tl.constexpr) -> None:
    """Wait until all that was launched earlier has ended; then let the next kernel begin, and wait."""
    if WAITS:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
