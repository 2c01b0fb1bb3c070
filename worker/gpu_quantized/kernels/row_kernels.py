"""Rounding of input rows to floats of 8 bits, each row by a scale of its own.

Owns: the kernel and its launch.
Never: multiplies (float8_products.py).

Shapes: T tokens, K inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOAT8_MAX = 448.0
_MAX = tl.constexpr(FLOAT8_MAX)
_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
_STEPS_OF_SMALLEST = tl.constexpr(1.5 * 2.0**23 * 2.0**-9)
"""Floats of this size are whole multiples of 2^-9, the smallest number of e4m3."""
_AT_ONCE = 1024


@triton.jit
def to_float8(x) -> tl.tensor:
    """Round float32 numbers to e4m3, the nearest; what is too large becomes the largest.

    To the nearest float of 4 significant bits, or multiple of the smallest one, first: what is left to the
    conversion is exact, so that it does not matter how it would round.
    """
    x = tl.clamp(x, -_MAX, _MAX)
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = (x + _STEPS_OF_SMALLEST) - _STEPS_OF_SMALLEST
    rounded = tl.where(tl.abs(x) < _SMALLEST_NORMAL, small, bits.to(tl.float32, bitcast=True))
    return rounded.to(tl.float8e4nv)


@triton.jit
def round_rows_kernel(x_ptr, rounded_ptr, scales_ptr, num_inputs, AT_ONCE: tl.constexpr) -> None:
    """One program: one row. Its largest number becomes the largest of e4m3."""
    token = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, AT_ONCE)
    row = token * num_inputs
    largest = tl.zeros([AT_ONCE], tl.float32)
    for first in range(0, num_inputs, AT_ONCE):
        x = tl.load(x_ptr + row + first + places, mask=places < num_inputs - first, other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    scale = tl.maximum(tl.max(largest, axis=0) / _MAX, 1e-30)
    tl.store(scales_ptr + token, scale)
    for first in range(0, num_inputs, AT_ONCE):
        is_there = places < num_inputs - first
        x = tl.load(x_ptr + row + first + places, mask=is_there, other=0.0).to(tl.float32) / scale
        rounded = to_float8(x).to(tl.uint8, bitcast=True)
        tl.store(rounded_ptr + row + first + places, rounded, mask=is_there)


def round_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as float8_e4m3fn [T, K], and their scales: float32 [T, 1]."""
    x_TK = x_TK.contiguous()
    rounded_TK = torch.empty(x_TK.shape, dtype=torch.uint8, device=x_TK.device)
    scales_T1 = torch.empty((len(x_TK), 1), dtype=torch.float32, device=x_TK.device)
    round_rows_kernel[(len(x_TK),)](x_TK, rounded_TK, scales_T1, x_TK.shape[1], AT_ONCE=_AT_ONCE, num_warps=4)
    return rounded_TK.view(torch.float8_e4m3fn), scales_T1
