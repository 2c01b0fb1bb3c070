"""Launches of kernels that begin while the one before them ends: programmatic dependent launch.

Source: `griddepcontrol` of PTX, since compute capability 9.0.

A kernel that is launched so may begin before the one before it has ended. It waits first: before it reads or
writes anything, and before any of its programs ends. So all that was launched earlier has ended, and is seen,
when it goes on; what it gains is its own beginning. A launch of any other kind, of cuBLAS or of a copy, waits
as a whole, and is waited for.

Memory that a later kernel reads, and that no kernel writes, may be brought into the device's cache before the
wait: no value is read. Weights are such memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra import cuda

_WHOLE = {"WAITS": False}
_DEPENDENT = {"WAITS": True, "launch_pdl": True}
_way = _WHOLE
_NUM_WARMERS = 64
"""Programs of a launch that bring memory into the cache, and compute nothing."""
_MOST_WARMED_BYTES = 16 << 20
"""A third of the cache of an H100."""
_PIECE = tl.constexpr(64 << 10)
"""Bytes of one instruction."""
_IS_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
_COLD = {"warmed_ptr": None, "warmed_bytes": 0, "WARMERS": 0}
_warms = False
_next: Tensor | None = None


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


@contextmanager
def warm_launches() -> Iterator[None]:
    """Launch kernels early inside the block, and let some bring weights into the cache ahead of products."""
    global _warms
    _warms = True
    try:
        with dependent_launches():
            yield
    finally:
        _warms = False


@contextmanager
def reading_next(weight: Tensor | None) -> Iterator[None]:
    """Name the weight that the kernel behind those of the block reads."""
    global _next
    before, _next = _next, weight
    try:
        yield
    finally:
        _next = before


def warm_way() -> dict[str, Any]:
    """Return further arguments of a launch, for a kernel that calls `warm_l2`."""
    if not _warms or _next is None or _next.data_ptr() % 16:
        return _COLD
    num_bytes = min(_next.numel() * _next.element_size(), _MOST_WARMED_BYTES) & -16
    return {"warmed_ptr": _next, "warmed_bytes": num_bytes, "WARMERS": _NUM_WARMERS}


@triton.jit
def warm_l2(start_ptr: tl.tensor, num_bytes: tl.tensor, part: tl.tensor, num_parts: tl.tensor) -> None:
    """Let one thread bring one of `num_parts` parts of memory into the device's cache, without a wait."""
    if not _IS_INTERPRETED:
        each = (tl.cdiv(num_bytes, num_parts) + 127) & -128
        end = tl.minimum((part + 1) * each, num_bytes)
        for at in range(part * each, end, _PIECE):
            tl.inline_asm_elementwise(
                "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
                "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
                "=r,l,r", [start_ptr.to(tl.int64) + at, tl.minimum(end - at, _PIECE)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def begin(
    warmed_ptr: tl.tensor, warmed_bytes: tl.tensor, WAITS: tl.constexpr, WARMERS: tl.constexpr
) -> tl.tensor:
    """Wait as `wait_first` does, and return the program's number; those below 0 have brought memory."""
    program = tl.program_id(0) - WARMERS
    if WARMERS > 0:  # noqa: SIM102 - the compiler decides this one
        if program < 0:
            warm_l2(warmed_ptr, warmed_bytes, program + WARMERS, WARMERS)
    wait_first(WAITS)
    return program


@triton.jit
def wait_first(WAITS: tl.constexpr) -> None:
    """Wait until all that was launched earlier has ended; then let the next kernel begin, and wait."""
    if WAITS:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
