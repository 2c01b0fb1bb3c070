"""bitsandbytes checkpoints: sixteen numbers of a table by blocks (NF4, FP4), or int8 by output.

Owns: both layouts. Codes of all rows stand behind each other in one line, whose blocks may end within a row.
Never: the outliers of activations that its int8 products leave out: activations stay as they are.
Source: arXiv:2305.14314, section 3; arXiv:2208.07339.

Shapes: N outputs, K inputs, B blocks.
"""

import math
from typing import Any

import torch
from torch import Tensor

from worker.quantized.grouped_weight import NUM_NIBBLES, GroupedWeight
from worker.quantized.scheme import FLOATS, ModuleTensors, SelfReadingRules

_STATE = "weight.quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_STORAGE = (torch.uint8, *FLOATS)
"""Dtypes that bytes of codes may be disguised as."""
_NUM_BYTES_CODES = 256
_LARGEST_CODE = 127


class BitsAndBytesRules(SelfReadingRules):
    """Rules of any config: the tensors say all."""

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
        return _read_int8(tensors, shape) if "SCB" in tensors else _read_nibbles(tensors, shape)


def _read_int8(tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
    num_outputs, _ = shape
    codes = tensors.take("weight", (torch.int8,), shape)
    largest = tensors.take("SCB", FLOATS, (num_outputs,))
    if "weight_format" in tensors and int(tensors.take("weight_format", (torch.uint8,), (), (1,))) != 0:
        raise tensors.refusal("weight_format", "is the order of one kind of GPU", "0, row after row")
    return GroupedWeight(codes=codes, scales_NG=largest.float().view(-1, 1) / _LARGEST_CODE)


def _read_nibbles(tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
    num_outputs, num_inputs = shape
    kind = next((each for each in _KINDS if _STATE + each in tensors), _KINDS[0])
    state = tensors.take_object(_STATE + kind)
    size = state.get("blocksize")
    if state.get("shape") != list(shape) or num_inputs % 2 or not isinstance(size, int) or size < 1:
        raise tensors.refusal(
            _STATE + kind, f"has shape {state.get('shape')} and blocksize {size}", f"of shape {list(shape)}"
        )
    num_numbers = num_outputs * num_inputs
    shapes = [(num_numbers // 2 // dtype.itemsize, 1) for dtype in _STORAGE]
    raw = tensors.take("weight", _STORAGE, *shapes, (num_numbers // 2,)).contiguous().view(torch.uint8)
    codes = raw.reshape(num_outputs, num_inputs // 2)
    blocks_B = _block_scales(tensors, -(-num_numbers // size), state)
    group = math.gcd(size, num_inputs)
    scales = blocks_B[torch.arange(0, num_numbers, group) // size].view(num_outputs, -1)
    return GroupedWeight(
        codes=codes << 4 | codes >> 4,  # the first code of a byte is in the upper bits there
        table=tensors.take("weight.quant_map", (torch.float32,), (NUM_NIBBLES,)),
        scales_NG=scales,
    )


def _block_scales(tensors: ModuleTensors, num_blocks: int, state: dict[str, Any]) -> Tensor:
    """Read the largest number of each block, float32 [B], which may be codes of blocks themselves."""
    if "weight.nested_absmax" not in tensors:
        return tensors.take("weight.absmax", (torch.float32,), (num_blocks,))
    size, offset = int(state.get("nested_blocksize", 0)), float(state.get("nested_offset", 0.0))
    if size < 1:
        raise tensors.refusal("weight.quant_state", f"has nested_blocksize {size}", "1 at least")
    codes_B = tensors.take("weight.absmax", (torch.uint8,), (num_blocks,))
    numbers = tensors.take("weight.nested_quant_map", (torch.float32,), (_NUM_BYTES_CODES,))
    largest = tensors.take("weight.nested_absmax", (torch.float32,), (-(-num_blocks // size),))
    return numbers[codes_B.long()] * largest[torch.arange(num_blocks) // size] + offset
