"""The updates of a product by the adapters of its tokens, in two launches that a graph can capture.

Owns: both kernels and their launches: `shrink` multiplies tokens by the ranks of their adapters, `expand`
adds the product of that to the outputs.
Never: asks the host which adapters a step has: slots are in a table on the device, and a tile of tokens
without adapters ends at once.
Source: S-LoRA, arXiv:2311.03285, and Punica, arXiv:2310.18547, for the two phases.

A program takes a tile of tokens and computes it once for each adapter among them, so that tensor cores have
rows enough. The sums of a row are in one order, whatever adapters its neighbours have.

Shapes: T tokens, C rows of the worker, S slots, M modules, R ranks of a module, K inputs, N outputs, P parts
of the inputs, B blocks of outputs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.worker_config import RANKS_AT_ONCE

_TOKENS = 16
OUTPUTS = 64
_INPUTS = 128
_MOST_PARTS = 16
_PRECISION: dict[torch.dtype, str] = {torch.float32: "ieee"}
"""For products; other dtypes are multiplied as they are."""


class StackedUpdates(NamedTuple):
    """The updates of one product by the adapters of all slots."""

    down_SMRK: Tensor
    up_SNR: Tensor
    scales_SM: Tensor
    """float32"""
    ranks_SM: Tensor
    """int32: ranks of a module's update; 0: it has none."""
    blocks_B3: Tensor
    """int32: the module of a block of outputs, its first output and the end of its module's outputs."""


@triton.jit
def _slots_of(tokens, rows_ptr, slots_ptr, num_tokens):
    is_token = tokens < num_tokens
    rows = tl.load(rows_ptr + tokens, mask=is_token, other=0)
    return tl.load(slots_ptr + rows, mask=is_token, other=-1)


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    x_ptr, down_ptr, scales_ptr, ranks_ptr, rows_ptr, slots_ptr, shrunk_ptr,
    num_tokens, num_inputs, num_modules, part_inputs,
    MAX_RANK: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for a tile of tokens, some ranks of a module and a part of the inputs."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    first_rank = tl.program_id(1) * RANKS
    module = first_rank // MAX_RANK
    part = tl.program_id(2)
    ranks = first_rank + tl.arange(0, RANKS)
    num_ranks = num_modules * MAX_RANK
    inputs = tl.arange(0, INPUTS)
    end = tl.minimum((part + 1) * part_inputs, num_inputs)
    slots = _slots_of(tokens, rows_ptr, slots_ptr, num_tokens)
    slot = tl.max(slots, axis=0)
    while slot >= 0:
        is_mine = slots == slot
        of_module = slot * num_modules + module
        if first_rank - module * MAX_RANK < tl.load(ranks_ptr + of_module):
            down_rows = down_ptr + (slot.to(tl.int64) * num_ranks + ranks) * num_inputs
            sums = tl.zeros([TOKENS, RANKS], tl.float32)
            for first in range(part * part_inputs, end, INPUTS):
                is_input = inputs < end - first
                x = tl.load(
                    x_ptr + tokens.to(tl.int64)[:, None] * num_inputs + (first + inputs)[None, :],
                    mask=is_mine[:, None] & is_input[None, :], other=0.0,
                )  # fmt: skip
                down = tl.load(
                    down_rows[None, :] + (first + inputs)[:, None], mask=is_input[:, None], other=0.0
                )
                sums = tl.dot(x, down, sums, input_precision=PRECISION)
            places = (part * num_tokens + tokens).to(tl.int64)[:, None] * num_ranks + ranks[None, :]
            tl.store(shrunk_ptr + places, sums * tl.load(scales_ptr + of_module), mask=is_mine[:, None])
        slots = tl.where(is_mine, -1, slots)
        slot = tl.max(slots, axis=0)


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    shrunk_ptr, up_ptr, ranks_ptr, rows_ptr, slots_ptr, blocks_ptr, out_ptr,
    num_tokens, num_outputs, num_modules, num_parts, multiplier,
    MAX_RANK: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """One program for a tile of tokens and a block of a module's outputs."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    block = tl.program_id(1)
    module = tl.load(blocks_ptr + 3 * block)
    outputs = tl.load(blocks_ptr + 3 * block + 1) + tl.arange(0, OUTPUTS)
    is_output = outputs < tl.load(blocks_ptr + 3 * block + 2)
    num_ranks = num_modules * MAX_RANK
    slots = _slots_of(tokens, rows_ptr, slots_ptr, num_tokens)
    slot = tl.max(slots, axis=0)
    while slot >= 0:
        is_mine = slots == slot
        count = tl.load(ranks_ptr + slot * num_modules + module)
        if count > 0:
            up_rows = up_ptr + (slot.to(tl.int64) * num_outputs + outputs) * MAX_RANK
            sums = tl.zeros([TOKENS, OUTPUTS], tl.float32)
            for first in range(0, count, RANKS):
                ranks = first + tl.arange(0, RANKS)
                shrunk = tl.zeros([TOKENS, RANKS], tl.float32)
                for part in range(0, num_parts):
                    places = (part * num_tokens + tokens).to(tl.int64) * num_ranks + module * MAX_RANK
                    shrunk += tl.load(
                        shrunk_ptr + places[:, None] + ranks[None, :], mask=is_mine[:, None], other=0.0
                    )
                up = tl.load(up_rows[None, :] + ranks[:, None], mask=is_output[None, :], other=0.0)
                sums = tl.dot(shrunk, up.to(tl.float32), sums, input_precision="ieee")
            out_ptrs = out_ptr + tokens.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
            mask = is_mine[:, None] & is_output[None, :]
            out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_ptrs, (out + multiplier * sums).to(out_ptr.dtype.element_ty), mask=mask)
        slots = tl.where(is_mine, -1, slots)
        slot = tl.max(slots, axis=0)


def add_updates(
    out_TN: Tensor, x_TK: Tensor, by: StackedUpdates, rows_T: Tensor, slots_C: Tensor, multiplier: float
) -> None:
    """Add the update of each token's adapter, times `multiplier`, in place. Both are contiguous."""
    num_tokens, num_inputs = x_TK.shape
    _, num_modules, max_rank, _ = by.down_SMRK.shape
    num_parts = min(_MOST_PARTS, triton.cdiv(num_inputs, 2 * _INPUTS))
    part_inputs = triton.cdiv(triton.cdiv(num_inputs, num_parts), _INPUTS) * _INPUTS
    shrunk = torch.empty(num_parts * num_tokens * num_modules * max_rank, device=x_TK.device)
    num_tiles = triton.cdiv(num_tokens, _TOKENS)
    _shrink_kernel[(num_tiles, num_modules * max_rank // RANKS_AT_ONCE, num_parts)](
        x_TK, by.down_SMRK, by.scales_SM, by.ranks_SM, rows_T, slots_C, shrunk,
        num_tokens, num_inputs, num_modules, part_inputs,
        MAX_RANK=max_rank, TOKENS=_TOKENS, RANKS=RANKS_AT_ONCE, INPUTS=_INPUTS,
        PRECISION=_PRECISION.get(x_TK.dtype, "tf32"), num_warps=4,
    )  # fmt: skip
    _expand_kernel[(num_tiles, len(by.blocks_B3))](
        shrunk, by.up_SNR, by.ranks_SM, rows_T, slots_C, by.blocks_B3, out_TN,
        num_tokens, out_TN.shape[1], num_modules, num_parts, multiplier,
        MAX_RANK=max_rank, TOKENS=_TOKENS, RANKS=RANKS_AT_ONCE, OUTPUTS=OUTPUTS, num_warps=4,
    )  # fmt: skip
