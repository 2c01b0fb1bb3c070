"""Rounding of input rows to floats of 8 bits, each row by a scale of its own.

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
def round_to_float8(x) -> tl.tensor:
    """Round float32 numbers to those of e4m3, the nearest; larger numbers become the largest.

    To the nearest float of 4 significant bits, or multiple of the smallest one.
    """
    x = tl.clamp(x, -_MAX, _MAX)
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = (x + _STEPS_OF_SMALLEST) - _STEPS_OF_SMALLEST
    return tl.where(tl.abs(x) < _SMALLEST_NORMAL, small, bits.to(tl.float32, bitcast=True))


@triton.jit
def to_float8(x) -> tl.tensor:
    """Round float32 numbers to e4m3; the conversion that follows is exact and rounds nothing."""
    return round_to_float8(x).to(tl.float8e4nv)


@triton.jit
def round_rows_kernel(
    x_ptr, rounded_ptr, scales_ptr, num_inputs, num_places, RANGE: tl.constexpr, AT_ONCE: tl.constexpr
) -> None:  # fmt: skip
    """One program: one row. Its largest number becomes the largest of e4m3.

    With a RANGE, two ranges of RANGE inputs take turns, as in words of codes; beyond the inputs are zeros.
    """
    token = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, AT_ONCE)
    x_ptr += token * num_inputs
    largest = tl.zeros([AT_ONCE], tl.float32)
    for first in range(0, num_inputs, AT_ONCE):
        x = tl.load(x_ptr + first + places, mask=places < num_inputs - first, other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    scale = tl.maximum(tl.max(largest, axis=0) / _MAX, 1e-30)
    tl.store(scales_ptr + token, scale)
    for first in range(0, num_places, AT_ONCE):
        inputs = first + places
        if RANGE > 0:
            in_tile = inputs % (2 * RANGE)
            inputs += (in_tile % 2) * RANGE + in_tile // 2 - in_tile
        x = tl.load(x_ptr + inputs, mask=inputs < num_inputs, other=0.0).to(tl.float32) / scale
        if rounded_ptr.dtype.element_ty == tl.uint8:
            rounded = to_float8(x).to(tl.uint8, bitcast=True)
        else:
            rounded = round_to_float8(x).to(rounded_ptr.dtype.element_ty)
        tl.store(rounded_ptr + token * num_places + first + places, rounded, mask=places < num_places - first)


def round_rows(x_TK: Tensor, *, in_ranges_of: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows as float8_e4m3fn [T, K], and their scales: float32 [T, 1].

    With ranges, inputs are in the order of words that have a code of each of two ranges, and are filled up to
    whole words.
    """
    tile = 2 * in_ranges_of
    num_places = triton.cdiv(x_TK.shape[1], tile) * tile if tile else x_TK.shape[1]
    rounded_TK, scales_T1 = _round_rows(x_TK, num_places, torch.uint8, in_ranges_of)
    return rounded_TK.view(torch.float8_e4m3fn), scales_T1


def round_rows_as_numbers(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same numbers in the dtype of the rows, which has them all."""
    return _round_rows(x_TK, x_TK.shape[1], x_TK.dtype, 0)


def _round_rows(
    x_TK: Tensor, num_places: int, dtype: torch.dtype, in_ranges_of: int
) -> tuple[Tensor, Tensor]:
    x_TK = x_TK.contiguous()
    num_tokens, num_inputs = x_TK.shape
    rounded_TK = torch.empty((num_tokens, num_places), dtype=dtype, device=x_TK.device)
    scales_T1 = torch.empty((num_tokens, 1), dtype=torch.float32, device=x_TK.device)
    round_rows_kernel[(num_tokens,)](
        x_TK, rounded_TK, scales_T1, num_inputs, num_places,
        RANGE=in_ranges_of, AT_ONCE=_AT_ONCE, num_warps=4,
    )  # fmt: skip
    return rounded_TK, scales_T1
