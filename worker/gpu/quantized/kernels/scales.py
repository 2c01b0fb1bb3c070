"""Scales and offsets of groups, a tile's at a time.

They are loaded a tile before they are used, so that no product waits for them. What a thread keeps meanwhile
has to be 32 bits wide: halves would be put together in a register as soon as they come, and waited for. So
two groups of a tile share a word, where 16 bits hold their numbers exactly; all others are float32.

Shapes: N outputs, G groups, each tile's together and filled up; E experts.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

_SHORT_DTYPES = (torch.float16, torch.bfloat16)


def find_short_dtype(numbers: Tensor) -> torch.dtype | None:
    """Find a dtype of 16 bits that has all the numbers."""
    return next((dtype for dtype in _SHORT_DTYPES if _has_all(dtype, numbers)), None)


def _has_all(dtype: torch.dtype, numbers: Tensor) -> bool:
    return torch.equal(numbers.to(dtype).float(), numbers)


def stack_of_groups(
    experts: Sequence[Tensor], *, times: int, groups_of_tile: int, short: torch.dtype | None
) -> Tensor:
    """Put the numbers [N, G] of experts as the kernels load them, each group as `times` smaller ones.

    Returns int32 [E, G / 2, N], of two groups each, where a tile has several groups and `short` all numbers;
    otherwise float32 [E, G, N].
    """
    numbers_EGN = torch.stack([each.T.float() for each in experts]).repeat_interleave(times, dim=1)
    if groups_of_tile == 1:
        return numbers_EGN.contiguous()
    numbers_EGN = pad(numbers_EGN, (0, 0, 0, -numbers_EGN.shape[1] % groups_of_tile))
    if short is None or not _has_all(short, numbers_EGN):
        return numbers_EGN.contiguous()
    num_experts, num_groups, num_outputs = numbers_EGN.shape
    pairs = numbers_EGN.to(short).view(num_experts, num_groups // 2, 2, num_outputs).transpose(2, 3)
    return pairs.reshape(num_experts, num_groups // 2, 2 * num_outputs).view(torch.int32)


@triton.jit
def count_rows(num_inputs, GROUP: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Count the groups of an output."""
    if GROUP == 0:
        return 1
    elif GROUP < TILE:
        return tl.cdiv(num_inputs, TILE) * (TILE // GROUP)
    else:
        return tl.cdiv(num_inputs, GROUP)


@triton.jit
def begin_of_expert(numbers_ptr, expert, num_outputs, num_rows) -> tl.tensor:
    """Find the numbers of one expert."""
    if numbers_ptr.dtype.element_ty == tl.int32:
        num_rows = num_rows // 2
    return numbers_ptr + expert * num_outputs * num_rows


@triton.jit
def load_of_tile(
    scales_ptr, offsets_ptr, tile, outputs, is_output, num_outputs, num_rows,
    GROUP: tl.constexpr, TILE: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Load scales and offsets of a tile's one, two or four groups, as they lie.

    Beyond the last tile they are the last one's; without offsets, scales stand for them.
    """
    scales = _load_groups(scales_ptr, tile, outputs, is_output, num_outputs, num_rows, GROUP, TILE)
    if offsets_ptr is None:
        return scales, scales
    else:
        return scales, _load_groups(offsets_ptr, tile, outputs, is_output, num_outputs, num_rows, GROUP, TILE)


@triton.jit
def _load_groups(
    numbers_ptr, tile, outputs, is_output, num_outputs, num_rows, GROUP: tl.constexpr, TILE: tl.constexpr
) -> tl.tuple:  # fmt: skip
    NUM_GROUPS: tl.constexpr = TILE // GROUP if (GROUP > 0) and (GROUP < TILE) else 1
    IS_PAIRED: tl.constexpr = numbers_ptr.dtype.element_ty == tl.int32
    NUM_LOADS: tl.constexpr = NUM_GROUPS // 2 if IS_PAIRED else NUM_GROUPS
    row = 0
    if NUM_GROUPS > 1:
        row = tl.minimum(tile, num_rows // NUM_GROUPS - 1) * NUM_LOADS
    elif GROUP > 0:
        row = tl.minimum(tile // (GROUP // TILE), num_rows - 1)
    ptrs = numbers_ptr + row * num_outputs + outputs
    first = tl.load(ptrs, mask=is_output, other=0)
    second, third, fourth = first, first, first
    if NUM_LOADS > 1:
        second = tl.load(ptrs + num_outputs, mask=is_output, other=0)
    if NUM_LOADS > 2:
        third = tl.load(ptrs + 2 * num_outputs, mask=is_output, other=0)
        fourth = tl.load(ptrs + 3 * num_outputs, mask=is_output, other=0)
    if IS_PAIRED:
        return first, first, second, second
    else:
        return first, second, third, fourth


@triton.jit
def as_numbers(loaded, group: tl.constexpr, SHORT: tl.constexpr) -> tl.tensor:
    """Return the numbers of one of a tile's groups, in float32."""
    of_group = loaded[group]
    if of_group.dtype == tl.int32:
        halves = (of_group >> (16 * (group % 2))).to(tl.int16)
        return halves.to(SHORT, bitcast=True).to(tl.float32)
    else:
        return of_group
