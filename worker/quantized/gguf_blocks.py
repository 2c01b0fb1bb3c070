"""Blocks of GGUF files as weights: codes with scales of groups, exactly as their types define them.

Owns: the layouts of the types, and the changes of numbers that worker/checkpoint/gguf/layouts.py names.
Source: ggml's block types.

Shapes: N outputs, K inputs, B blocks of an output, G groups of inputs.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from worker.checkpoint.gguf.file import BLOCKS, GgufTensor, GgufType, GgufWeight
from worker.checkpoint.gguf.layouts import RowOrder
from worker.quantized.grouped_weight import (
    E2M1_TABLE,
    SIGNED_TABLE,
    UNSIGNED_TABLE,
    GroupedWeight,
    gathered,
    merged,
)
from worker.quantized.mxfp4 import powers_of
from worker.quantized.scheme import ModuleTensors, SelfReadingRules
from worker.worker_errors import StartupError

_PIECE_BYTES = 4 << 20
"""Blocks that are decoded at a time: what that takes meanwhile is several times as much."""
_IQ4_TABLE = torch.tensor(
    [-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32
)
"""Numbers of the codes of IQ4_NL and IQ4_XS."""
_PLAIN = {GgufType.F32: torch.float32, GgufType.F16: torch.float16, GgufType.BF16: torch.bfloat16}


class GgufRules(SelfReadingRules):
    """Each module whose weight is stored as blocks is quantized, and no other."""

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
        assert tensors.gguf is not None
        weight = weight_of(tensors.gguf)
        if weight.shape != shape:
            raise tensors.refusal(BLOCKS, f"is {list(weight.shape)}", str(list(shape)))
        return weight


def weight_of(stored: GgufWeight) -> GroupedWeight:
    """Codes of a module, with its outputs and inputs in the model's order. Raises ValueError."""
    change = stored.change
    parts = [weight_of_blocks(read_tensor(each), each.type) for each in stored.tensors]
    weight = merged(parts) if len(parts) > 1 else parts[0]
    if change.rows is not None:
        weight = weight.outputs(order_of(change.rows, weight.num_outputs))
    if change.inputs is not None:
        weight = _with_inputs(weight, order_of(change.inputs, weight.num_inputs))
    return weight


def numbers_of(stored: GgufWeight) -> Tensor:
    """Numbers of a weight that is no matrix of codes, changed as the model has them. Raises ValueError."""
    change, parts = stored.change, []
    for number, tensor in enumerate(stored.tensors):
        part = read_tensor(tensor)
        if not tensor.type.is_plain:
            rows = part.view(-1, part.shape[-1])
            part = weight_of_blocks(rows, tensor.type).dequantized().view(tensor.shape)
        parts.append(part.transpose(-1, -2) if number in change.transposed else part)
    numbers = torch.cat(parts, dim=change.axis) if len(parts) > 1 else parts[0]
    if change.rows is not None:
        order = order_of(change.rows, numbers.shape[change.axis])
        numbers = numbers.index_select(change.axis, order)
    if change.inputs is not None:
        numbers = numbers[:, order_of(change.inputs, numbers.shape[1])]
    if change.added:
        numbers = numbers - change.added
    if change.is_decay:
        numbers = numbers.neg().log()
    return (numbers.reshape(change.shape) if change.shape else numbers).contiguous()


def order_of(order: RowOrder, num_rows: int) -> Tensor:
    """Return the place in the file of each of the model's rows. Raises ValueError where they do not fit."""
    size = order.num_heads * sum(order.sizes) * order.num_blocks
    if num_rows <= order.start or size <= 0 or (num_rows - order.start) % size:
        raise ValueError(f"{num_rows} rows are not those of {order}")
    places = torch.arange(order.start, num_rows).view(order.num_blocks, -1)
    sizes = order.sizes * ((num_rows - order.start) // size)
    runs = torch.split(places, [order.num_heads * each for each in sizes], dim=1)
    by_head = [
        run.view(order.num_blocks, order.num_heads, each) for run, each in zip(runs, sizes, strict=True)
    ]
    ordered = torch.cat(by_head, dim=2).reshape(-1)
    return torch.cat((torch.arange(order.start), ordered))


def _with_inputs(weight: GroupedWeight, order_K: Tensor) -> GroupedWeight:
    """Order the inputs: whole groups of codes where that is possible, by a permutation where it is not."""
    size = weight.group_size
    groups = order_K.view(-1, size)
    if not torch.equal(groups, groups[:, :1] + torch.arange(size)) or bool((groups[:, 0] % size).any()):
        return replace(weight, permutation_K=order_K.argsort())
    chosen = groups[:, 0] // size
    codes = weight.codes.view(weight.num_outputs, len(chosen), -1)[:, chosen]
    return weight.with_groups(lambda part: part[:, chosen], codes.reshape(weight.codes.shape))


def read_tensor(tensor: GgufTensor) -> Tensor:
    """Copy a tensor into this process's memory; blocks as uint8 [..., bytes of a row]."""
    memory = bytearray(tensor.num_bytes)
    with tensor.path.open("rb", buffering=0) as stream:
        stream.seek(tensor.start)
        num_read, view = 0, memoryview(memory)
        while num_read < len(memory):
            count = stream.readinto(view[num_read:])
            if not count:
                raise StartupError(
                    f"{tensor.path} is shorter than its header promises", fix="download it again"
                )
            num_read += count
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    if tensor.type.is_plain:
        return raw.view(_PLAIN[tensor.type]).view(tensor.shape)
    return raw.view(*tensor.shape[:-1], -1)


def weight_of_blocks(raw: Tensor, kind: GgufType) -> GroupedWeight:
    """A weight of uint8 [N, bytes of a row]."""
    rows = raw.view(len(raw), -1, kind.block_bytes)
    pieces = torch.split(rows, max(1, _PIECE_BYTES // raw.shape[1]))
    return gathered(len(rows), map(_DECODERS[kind], pieces))


def _halves(raw_NB: Tensor, place: int) -> Tensor:
    """The float16 number at a place of each block: float32 [N, B]."""
    return raw_NB[:, :, place : place + 2].contiguous().view(torch.float16)[:, :, 0].float()


def _split(bytes_: Tensor) -> Tensor:
    """All lower halves of some bytes, then all upper ones."""
    return torch.cat((bytes_ & 15, bytes_ >> 4), dim=-1)


def _split_in_pairs(bytes_: Tensor) -> Tensor:
    """The same, two a byte: by words of two bytes, since there are many."""
    words = bytes_.contiguous().view(torch.int16)
    halves = (words & 0x0F0F, words >> 4 & 0x0F0F)
    return torch.cat([(half | half >> 4).to(torch.uint8) for half in halves], dim=-1)


def _by_row(blocks: Tensor) -> Tensor:
    return blocks.reshape(len(blocks), -1)


def _q4_0(raw: Tensor) -> GroupedWeight:
    codes = _by_row(_split_in_pairs(raw[:, :, 2:]))
    return GroupedWeight(codes=codes, table=SIGNED_TABLE, scales_NG=_halves(raw, 0))


def _q4_1(raw: Tensor) -> GroupedWeight:
    codes = _by_row(_split_in_pairs(raw[:, :, 4:]))
    return GroupedWeight(
        codes=codes, table=UNSIGNED_TABLE, scales_NG=_halves(raw, 0), offsets_NG=-_halves(raw, 2)
    )


def _fifth_bits(raw: Tensor) -> Tensor:
    """Bits of four bytes as 16 or 0 each: [..., 4] to [..., 32]."""
    bits = raw.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2) << 4


def _q5_0(raw: Tensor) -> GroupedWeight:
    codes = _split(raw[:, :, 6:]) | _fifth_bits(raw[:, :, 2:6])
    return GroupedWeight(codes=_by_row(codes.view(torch.int8) - 16), scales_NG=_halves(raw, 0))


def _q5_1(raw: Tensor) -> GroupedWeight:
    codes = _split(raw[:, :, 8:]) | _fifth_bits(raw[:, :, 4:8])
    return GroupedWeight(
        codes=_by_row(codes.view(torch.int8)), scales_NG=_halves(raw, 0), offsets_NG=-_halves(raw, 2)
    )


def _q8_0(raw: Tensor) -> GroupedWeight:
    codes = _by_row(raw[:, :, 2:]).contiguous().view(torch.int8)
    return GroupedWeight(codes=codes, scales_NG=_halves(raw, 0))


def _scales_and_offsets(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of the eight groups of a block: six bits each, packed into twelve bytes."""
    packed = raw[:, :, 4:16]
    first, middle, last = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scales = torch.cat((first & 63, last & 15 | (first >> 6) << 4), dim=-1)
    offsets = torch.cat((middle & 63, last >> 4 | (middle >> 6) << 4), dim=-1)
    return (
        _by_row(_halves(raw, 0).unsqueeze(-1) * scales.float()),
        _by_row(_halves(raw, 2).unsqueeze(-1) * offsets.float()),
    )


def _pairs_of_groups(raw: Tensor) -> Tensor:
    """Codes of four bits [N, B, 8, 32]: of 32 bytes the lower halves are a group, the upper ones the next."""
    bytes_ = raw.reshape(*raw.shape[:2], 4, 32)
    return torch.stack((bytes_ & 15, bytes_ >> 4), dim=3).flatten(2, 3)


def _units(raw: Tensor) -> dict[str, Tensor]:
    """The numbers of a block that its scales and offsets are multiples of."""
    return {"scale_units_NU": _halves(raw, 0).half(), "offset_units_NU": _halves(raw, 2).half()}


def _q4_k(raw: Tensor) -> GroupedWeight:
    scales, offsets = _scales_and_offsets(raw)
    codes = _by_row(_split_in_pairs(raw[:, :, 16:].reshape(*raw.shape[:2], 4, 32)))
    return GroupedWeight(
        codes=codes, table=UNSIGNED_TABLE, scales_NG=scales, offsets_NG=offsets, **_units(raw)
    )


def _q5_k(raw: Tensor) -> GroupedWeight:
    scales, offsets = _scales_and_offsets(raw)
    fifth = raw[:, :, 16:48].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    codes = _pairs_of_groups(raw[:, :, 48:]) | fifth << 4
    return GroupedWeight(
        codes=_by_row(codes).view(torch.int8), scales_NG=scales, offsets_NG=offsets, **_units(raw)
    )


def _q6_k(raw: Tensor) -> GroupedWeight:
    low = raw[:, :, :128].reshape(*raw.shape[:2], 2, 64)
    high = raw[:, :, 128:192].reshape(*raw.shape[:2], 2, 1, 32)
    high = (high >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3) << 4
    codes = _split(low).view(*raw.shape[:2], 2, 4, 32) | high
    scales = raw[:, :, 192:208].contiguous().view(torch.int8).float() * _halves(raw, 208).unsqueeze(-1)
    return GroupedWeight(
        codes=_by_row(codes).view(torch.int8) - 32,
        scales_NG=_by_row(scales),
        scale_units_NU=_halves(raw, 208).half(),
    )


def _iq4_nl(raw: Tensor) -> GroupedWeight:
    codes = _by_row(_split_in_pairs(raw[:, :, 2:]))
    return GroupedWeight(codes=codes, table=_IQ4_TABLE, scales_NG=_halves(raw, 0))


def _iq4_xs(raw: Tensor) -> GroupedWeight:
    """Eight groups of a block have scales of six bits: four in four bytes, the two highest in a word."""
    high = (
        raw[:, :, 2:4].repeat_interleave(4, dim=-1) >> torch.arange(0, 8, 2, dtype=torch.uint8).repeat(2) & 3
    )
    low = torch.stack((raw[:, :, 4:8] & 15, raw[:, :, 4:8] >> 4), dim=-1).flatten(-2)
    scales = ((high << 4 | low).float() - 32) * _halves(raw, 0).unsqueeze(-1)
    codes = _by_row(_split_in_pairs(raw[:, :, 8:].reshape(*raw.shape[:2], 8, 16)))
    return GroupedWeight(
        codes=codes, table=_IQ4_TABLE, scales_NG=_by_row(scales), scale_units_NU=_halves(raw, 0).half()
    )


def _mxfp4(raw: Tensor) -> GroupedWeight:
    """MXFP4 as in safetensors, but with the power before the codes, and lower halves as the first ones."""
    codes = _by_row(_split_in_pairs(raw[:, :, 1:]))
    return GroupedWeight(codes=codes, table=E2M1_TABLE, scales_NG=powers_of(raw[:, :, 0]))


_DECODERS: dict[GgufType, Callable[[Tensor], GroupedWeight]] = {
    GgufType.Q4_0: _q4_0,
    GgufType.Q4_1: _q4_1,
    GgufType.Q5_0: _q5_0,
    GgufType.Q5_1: _q5_1,
    GgufType.Q8_0: _q8_0,
    GgufType.Q4_K: _q4_k,
    GgufType.Q5_K: _q5_k,
    GgufType.Q6_K: _q6_k,
    GgufType.IQ4_NL: _iq4_nl,
    GgufType.IQ4_XS: _iq4_xs,
    GgufType.MXFP4: _mxfp4,
}
