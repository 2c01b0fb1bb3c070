"""torchao checkpoints: int4 and int8 in groups, float8 by row, tensor or block, as safetensors hold them.

Owns: the layouts of its tensors, which dtypes and shapes tell apart; the config tells how they were made.
Never: pickled tensors, or its layouts for one kind of processor.

Shapes: N outputs, K inputs, G groups of inputs.
"""

from typing import Any

import torch
from torch import Tensor

from worker.quantized.grouped_weight import SIGNED_TABLE, GroupedWeight, pack_nibbles
from worker.quantized.scheme import (
    FLOATS,
    ModuleTensors,
    QuantizationRefused,
    SelfReadingRules,
    refuse_not_finite,
)

_CODES, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_SCALES_AND_ZEROS = "_weight_scale_and_zero"
_UPPER_HALF = 0x88
"""Turns two codes of four bits with a sign into codes that are 8 more than their numbers."""
# A tile of an NVIDIA tensor core, eight of which lie behind each other along the inputs.
_TILE_OUTPUTS, _TILE_INPUTS, _TILES = 8, 16, 8
_LANES, _CODES_OF_WORD = 32, 8
_PADDED_INPUTS = 1024
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of four bits each, the lowest first, of the eight inputs that a lane has of two tiles."""


class TorchAoRules(SelfReadingRules):
    """All layouts, which tensors tell apart."""

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
        if _SCALES_AND_ZEROS in tensors:
            return _read_tiles(tensors, shape)
        num_outputs, num_inputs = shape
        dtypes = (torch.int8, torch.uint8, torch.float8_e4m3fn)
        codes = tensors.take(_CODES, dtypes, shape, (num_outputs, num_inputs // 2))
        if tuple(codes.shape) != shape:
            return _read_nibbles(tensors, codes, shape)
        scales_NG = _scales_of_blocks(tensors, shape)
        if codes.dtype is torch.float8_e4m3fn:
            refuse_not_finite(tensors, _CODES, codes)
            return GroupedWeight(codes=codes, scales_NG=scales_NG)
        offsets_NG = None
        if _ZERO in tensors:
            zeros_NG = tensors.take(_ZERO, (torch.int8, *FLOATS), tuple(scales_NG.shape)).float()
            offsets_NG = zeros_NG * scales_NG if bool(zeros_NG.any()) else None
        return GroupedWeight(codes=codes.view(torch.int8), scales_NG=scales_NG, offsets_NG=offsets_NG)


def read_torchao_rules(config: dict[str, Any]) -> TorchAoRules:
    """Read torchao's rules. Raises QuantizationRefused for a config that is none of its own objects."""
    kind = config.get("quant_type")
    if not isinstance(kind, dict) or not isinstance(kind.get("default"), dict):
        raise QuantizationRefused(
            f"quantization_config of torchao has quant_type {str(kind)[:80]}",
            fix="take a checkpoint that transformers 5 wrote as safetensors",
        )
    return TorchAoRules()


def _read_nibbles(tensors: ModuleTensors, codes: Tensor, shape: tuple[int, int]) -> GroupedWeight:
    """Int4Tensor: codes with a sign, the first of a byte in its lower bits; a zero is a number, no code."""
    num_outputs, num_inputs = shape
    num_groups = _divisor(tensors, _SCALE, 0, num_inputs)
    scales_GN = tensors.take(_SCALE, FLOATS, (num_groups, num_outputs))
    zeros_GN = tensors.take(_ZERO, FLOATS, (num_groups, num_outputs))
    return GroupedWeight(
        codes=codes.view(torch.uint8) ^ _UPPER_HALF,
        table=SIGNED_TABLE,
        scales_NG=scales_GN.T.float().contiguous(),
        offsets_NG=-zeros_GN.T.float().contiguous(),
    )


def _divisor(tensors: ModuleTensors, name: str, place: int, length: int) -> int:
    """Return a size of a tensor that is to divide `length`. Raises QuantizationRefused."""
    sizes = tensors.shape_of(name)
    if place >= len(sizes) or not sizes[place] or length % sizes[place]:
        raise tensors.refusal(name, f"is {list(sizes)}", f"for parts of {length} that are of equal size")
    return sizes[place]


def _scales_of_blocks(tensors: ModuleTensors, shape: tuple[int, int]) -> Tensor:
    """Scales of blocks of outputs and inputs, whose number is that of the scales, as float32 [N, G]."""
    num_outputs, num_inputs = shape
    if len(tensors.shape_of(_SCALE)) < 2:
        scales = tensors.take(_SCALE, FLOATS, (), (1,), (num_outputs,)).reshape(-1, 1)
    else:
        sizes = (_divisor(tensors, _SCALE, 0, num_outputs), _divisor(tensors, _SCALE, 1, num_inputs))
        scales = tensors.take(_SCALE, FLOATS, sizes)
    return scales.float().repeat_interleave(num_outputs // len(scales), dim=0).contiguous()


def _read_tiles(tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
    """Int4TilePackedTo4dTensor: words for tensor cores, of inputs and outputs that may be filled up."""
    num_outputs, num_inputs = shape
    rows = -(-num_outputs // _TILE_OUTPUTS)
    columns = -(-num_inputs // _PADDED_INPUTS) * (_PADDED_INPUTS // (_TILES * _TILE_INPUTS))
    words = tensors.take(_CODES, (torch.int32,), (rows, columns, _LANES, _TILES // 2))
    padded = columns * _TILES * _TILE_INPUTS
    num_groups = _divisor(tensors, _SCALES_AND_ZEROS, 0, padded)
    size = padded // num_groups
    if num_inputs % size:
        raise tensors.refusal(_SCALES_AND_ZEROS, f"is for groups of {size} of {num_inputs} inputs", "whole")
    kept = (num_groups, rows * _TILE_OUTPUTS, 2)
    both_GN2 = tensors.take(_SCALES_AND_ZEROS, (torch.bfloat16,), kept).float()
    scales_NG, zeros_NG = both_GN2[: num_inputs // size, :num_outputs].permute(2, 1, 0)
    codes_NK = _codes_of_tiles(words)[:num_outputs, :num_inputs]
    return GroupedWeight(
        codes=pack_nibbles(codes_NK.contiguous()),
        table=SIGNED_TABLE,
        scales_NG=scales_NG.contiguous(),
        offsets_NG=-zeros_NG.contiguous(),
    )


def _codes_of_tiles(words: Tensor) -> Tensor:
    """Words [N / 8, K / 128, lane, pair of tiles] to codes, uint8 [N, K].

    Of each of two tiles a lane has two inputs and the two that are 8 further on; four lanes have an output.
    """
    raw = words.contiguous().view(torch.uint8)
    nibbles = torch.stack((raw & 15, raw >> 4), dim=-1).view(*words.shape, _CODES_OF_WORD)
    ordered = nibbles[..., torch.tensor(_ORDER)]
    # Output tile, column, output, lane, pair, tile, half of a tile, input of two.
    split = ordered.view(*words.shape[:2], _TILE_OUTPUTS, _LANES // _TILE_OUTPUTS, _TILES // 2, 2, 2, 2)
    return split.permute(0, 2, 1, 4, 5, 6, 3, 7).reshape(words.shape[0] * _TILE_OUTPUTS, -1)
