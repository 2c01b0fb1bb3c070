"""Weights with scales of groups in the order in which the CPU's kernels read them.

Owns: the layouts of csrc/products/grouped_*_impl.h, which weights fit them, and the smallest form of
csrc/kernels.h that holds scales and offsets exactly: what no smaller form holds stays float32.

Shapes: B blocks of 32 outputs, N outputs, K inputs, G groups of inputs, U units of 256 inputs. A
block's column c is half c // 16, lane c % 16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from worker.cpu.native import (
    COLUMNS,
    WIDEST_VECTOR,
    CGroupedCodes,
    CGroupNumbers,
    CPackedWeight,
    PackedWeight,
    pointer,
)
from worker.cpu.packing.large_pages import WEIGHTS
from worker.model.layer_parts import GateActivation
from worker.quantized.grouped_weight import GroupedWeight

_HALF = COLUMNS // 2
_ZERO_OF_INT8 = 128
_HIGHEST_BYTE = 127
_PIECE_BYTES = 4 << 20
"""Codes that are packed at a time."""


class _Form(IntEnum):
    """NumberForm of csrc/kernels.h."""

    FLOAT = 0
    HALF = 1
    BF16 = 2
    BYTES = 3
    TIMES_SCALE = 4


@dataclass(frozen=True, slots=True)
class GroupNumbers:
    """Numbers by output and group; without any for a weight that has no offsets."""

    form: _Form = _Form.FLOAT
    data_BGC: Tensor | None = None
    units_BUC: Tensor | None = None
    """Half: bytes are multiples of it."""

    @property
    def c(self) -> CGroupNumbers:
        """The struct, whose pointers this keeps alive."""
        return CGroupNumbers(pointer(self.data_BGC), self.form, pointer(self.units_BUC))

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.data_BGC, self.units_BUC) if part is not None)

    def rows(self, block_R: Tensor, column_R: Tensor, scales_RG: Tensor | None = None) -> Tensor | None:
        """Look up numbers of some outputs: float32 [R, G]; None without any."""
        if self.data_BGC is None:
            return None
        found_RG = self.data_BGC[block_R, :, column_R].float()
        if self.units_BUC is not None:
            units_RU = self.units_BUC[block_R, :, column_R].float()
            found_RG *= units_RU.repeat_interleave(found_RG.shape[1] // units_RU.shape[1], dim=1)
        if self.form is _Form.TIMES_SCALE:
            assert scales_RG is not None
            found_RG *= scales_RG
        return found_RG


def pack_scales(scales_NG: Tensor, units_NU: Tensor | None) -> GroupNumbers:
    """Pack scales, which may be whole multiples of units of 256 inputs."""
    if units_NU is not None:
        spread_NG = units_NU.float().repeat_interleave(scales_NG.shape[1] // units_NU.shape[1], dim=1)
        found = _multiples(scales_NG, spread_NG)
        if found is not None:
            return GroupNumbers(_Form.BYTES, _in_blocks(found), _in_blocks(units_NU.half()))
    for form, dtype in ((_Form.HALF, torch.float16), (_Form.BF16, torch.bfloat16)):
        rounded = scales_NG.to(dtype)
        if torch.equal(rounded.float(), scales_NG) and bool(scales_NG.isfinite().all()):
            return GroupNumbers(form, _in_blocks(rounded))
    return GroupNumbers(_Form.FLOAT, _in_blocks(scales_NG))


def pack_offsets(offsets_NG: Tensor | None, scales_NG: Tensor, units_NU: Tensor | None) -> GroupNumbers:
    """Pack offsets, which may be whole multiples of their scales or of units."""
    if offsets_NG is None:
        return GroupNumbers()
    found = None if units_NU is not None else _multiples(offsets_NG, scales_NG)
    if found is not None:
        return GroupNumbers(_Form.TIMES_SCALE, _in_blocks(found))
    return pack_scales(offsets_NG, units_NU)


def _multiples(values: Tensor, units: Tensor) -> Tensor | None:
    """Return int8 multiples of the units that give the values exactly; None where there are none."""
    found = torch.where(units == 0, 0, values / units).round().clamp(-1 - _HIGHEST_BYTE, _HIGHEST_BYTE)
    return found.to(torch.int8) if torch.equal(found * units, values) else None


def _in_blocks(values: Tensor) -> Tensor:
    """[N, G] to [B, G, 32]."""
    padded = pad(values, (0, 0, 0, -len(values) % COLUMNS))
    in_blocks = padded.view(-1, COLUMNS, padded.shape[1]).transpose(1, 2)
    return WEIGHTS.zeros(in_blocks.shape, padded.dtype).copy_(in_blocks)


class CannotPack(Exception):
    """The kernels have no form for this weight; its text says why."""


class Inputs(Enum):
    """Numbers in which input rows are multiplied."""

    AS_THEY_ARE = "as they are"
    """Exact to the weight's numbers: sums are of products of bfloat16 or float32 numbers."""
    INT8 = "int8"
    """Rounded to 255 whole numbers times a scale for each row, a finer one in groups of smaller numbers.
    Faster, and another result."""


class _Kind(IntEnum):
    """CodeKind of csrc/kernels.h."""

    NIBBLES = 0
    INT8 = 1
    FLOAT8 = 2
    FIVE_BITS = 3
    SIX_BITS = 4


_HIGH_BITS = {_Kind.FIVE_BITS: 1, _Kind.SIX_BITS: 2}
"""Bits of a code above its nibble, stored in a plane of their own (csrc/products/grouped_planes_impl.h)."""
WHOLE_RANGES = ((-16, 15), (-32, 31), (-128, 127))
"""Whole numbers, lowest and highest, that have a form of their own: of 5, 6 and 8 bits."""
_CODES_OF_FOUR = 4 * COLUMNS
"""Codes of four inputs of a block."""
_KINDS = {torch.uint8: _Kind.NIBBLES, torch.int8: _Kind.INT8, torch.float8_e4m3fn: _Kind.FLOAT8}
_DTYPES = {kind: dtype for dtype, kind in _KINDS.items()}


def pack_grouped(
    weight: GroupedWeight,
    bias_N: Tensor | None = None,
    activation: GateActivation = GateActivation.NONE,
    *,
    inputs: Inputs = Inputs.AS_THEY_ARE,
) -> PackedWeight:
    """Copy a weight and its bias into the kernels' order. Raises CannotPack.

    With an activation the outputs are in `gate_up_order`, and a product is half as many.
    """
    reason = find_hindrance(weight, inputs=inputs)
    if reason is not None:
        raise CannotPack(reason)
    return _pack(weight, bias_N, activation, inputs)


def find_hindrance(weight: GroupedWeight, *, inputs: Inputs = Inputs.AS_THEY_ARE) -> str | None:
    """Say why the kernels have no form for this weight; None where they have one."""
    if weight.group_size % WIDEST_VECTOR:
        return f"groups of {weight.group_size} inputs are no multiple of {WIDEST_VECTOR}"
    takes_bytes = inputs is Inputs.INT8
    if takes_bytes and weight.codes.dtype is torch.float8_e4m3fn:
        return "float8 weights have no product with int8 inputs"
    try:
        _byte_lookup(weight) if takes_bytes else _number_lookup(weight)
    except CannotPack as error:
        return str(error)
    return None


def grouped_rows(packed: PackedWeight, indices_U: Tensor) -> Tensor:
    """Look up rows of a packed weight as the kernels multiply by them: numbers [U, K] in float32."""
    grouped, numbers = packed.c.grouped, packed.numbers
    _, table, lookup, permutation = packed.kept
    is_whole = grouped.takes_bytes or grouped.kind in _HIGH_BITS
    assert numbers is not None
    assert permutation is None
    block_U, column_U = indices_U // COLUMNS, indices_U % COLUMNS
    codes_UK = _codes_of_rows(packed, block_U, column_U)
    if not is_whole:
        numbers_UK = codes_UK.view(_DTYPES[grouped.kind]).float() if table is None else table[codes_UK.int()]
    else:
        raised_UK = codes_UK if table is None or lookup is None else lookup[codes_UK.int()]
        numbers_UK = raised_UK.float() - grouped.shift
    numbers_UGS = numbers_UK.view(len(indices_U), -1, int(grouped.group_size))
    scales, offsets = numbers
    scales_UG: Tensor | None = scales.rows(block_U, column_U)
    assert scales_UG is not None
    numbers_UGS = numbers_UGS * scales_UG.unsqueeze(2)
    offsets_UG = offsets.rows(block_U, column_U, scales_UG)
    if offsets_UG is not None:
        numbers_UGS = numbers_UGS - offsets_UG.unsqueeze(2)
    return numbers_UGS.flatten(1)


def _codes_of_rows(packed: PackedWeight, block_U: Tensor, column_U: Tensor) -> Tensor:
    """Undo `_data` for some outputs: codes [U, K] of a byte each."""
    half_U, lane_U = column_U // _HALF, column_U % _HALF
    grouped, data = packed.c.grouped, packed.data
    if grouped.kind in _HIGH_BITS:
        return _join_planes(data, block_U, _places_of_four(column_U, takes_bytes=grouped.takes_bytes))
    if grouped.kind != _Kind.NIBBLES:
        if grouped.takes_bytes:
            return data[block_U, :, half_U, lane_U].flatten(1)
        return data[block_U, :, lane_U // 4, half_U, lane_U % 4].flatten(1)
    shift_U = (4 * half_U).to(torch.uint8)
    if grouped.takes_bytes:
        return (data[block_U, :, lane_U] >> shift_U[:, None, None] & 15).flatten(1)
    return (data[block_U, :, lane_U] >> shift_U[:, None, None, None] & 15).transpose(2, 3).flatten(1)


def _pack(
    weight: GroupedWeight, bias_N: Tensor | None, activation: GateActivation, inputs: Inputs
) -> PackedWeight:
    takes_bytes = inputs is Inputs.INT8
    kind, lowest = _kind_of(weight)
    if kind in _HIGH_BITS:
        unit, lookup, shift = 1.0, None if takes_bytes else _lookup_from(lowest, kind), -lowest
    else:
        unit, lookup, shift = _byte_lookup(weight) if takes_bytes else (1.0, _number_lookup(weight), 0)
    data = _data(weight, kind, lowest, takes_bytes=takes_bytes)
    is_same = unit == 1
    scales_NG = weight.scales_NG if is_same else weight.scales_NG * unit
    scales = pack_scales(scales_NG, weight.scale_units_NU if is_same else None)
    offsets = pack_offsets(weight.offsets_NG, scales_NG, weight.offset_units_NU)
    table = None if weight.table is None else weight.table.float().contiguous()
    permutation = None if weight.permutation_K is None else weight.permutation_K.int().contiguous()
    bias = None if bias_N is None else pad(bias_N.float(), (0, -len(bias_N) % COLUMNS))
    c = CPackedWeight(None, pointer(bias), weight.num_inputs, weight.num_outputs, activation)
    c.grouped = CGroupedCodes(
        data=pointer(data),
        kind=kind,
        takes_bytes=takes_bytes,
        group_size=weight.group_size,
        table=pointer(table),
        lookup=pointer(lookup),
        shift=shift,
        scales=scales.c,
        offsets=offsets.c,
        permutation=pointer(permutation),
    )
    return PackedWeight(data, c, (bias, table, lookup, permutation), (scales, offsets))


def _kind_of(weight: GroupedWeight) -> tuple[_Kind, int]:
    """Return the kind that takes the fewest bits, and the lowest code."""
    kind = _KINDS[weight.codes.dtype]
    if kind is not _Kind.INT8:
        return kind, 0
    ends = [torch.aminmax(some) for some in torch.split(weight.codes, _PIECE_BYTES // weight.num_inputs + 1)]
    # Outputs that fill a block up have codes of 0.
    lowest, highest = min(0, *(int(end.min) for end in ends)), max(0, *(int(end.max) for end in ends))
    for smaller in _HIGH_BITS:
        if highest - lowest < 16 << _HIGH_BITS[smaller]:
            return smaller, lowest
    return kind, 0


def _data(weight: GroupedWeight, kind: _Kind, lowest: int, *, takes_bytes: bool) -> Tensor:
    """Bytes [B, ...] of each block, in order of K, some blocks at a time: packing needs further memory."""
    codes, num_inputs = weight.codes.view(torch.uint8), weight.num_inputs
    pack: Callable[[Tensor, Tensor], None]
    shape: tuple[int, ...]
    if kind in _HIGH_BITS:
        pack = partial(_pack_planes, lowest=lowest, takes_bytes=takes_bytes)
        shape = (num_inputs // 4, _CODES_OF_FOUR // 8 * (4 + _HIGH_BITS[kind]))
    elif kind is _Kind.NIBBLES:
        pack = _pack_nibbles
        # [B, K / 4, lane, input of four], or input of a pair, pair; the first half's code in the lower bits
        shape = (num_inputs // 4, _HALF, 4) if takes_bytes else (num_inputs // 4, _HALF, 2, 2)
    elif takes_bytes:
        pack, shape = _pack_by_four, (num_inputs // 4, 2, _HALF, 4)
    else:  # four lanes of a half, half, lane of four, input of a pair: what unpacking bytes undoes
        pack, shape = _pack_by_two, (num_inputs // 2, _HALF // 4, 2, 4, 2)
    num_blocks = -(-weight.num_outputs // COLUMNS)
    packed = WEIGHTS.zeros((num_blocks, *shape), torch.uint8)
    size = max(1, _PIECE_BYTES // (COLUMNS * codes.shape[1]))
    for some, out in zip(torch.split(codes, size * COLUMNS), torch.split(packed, size), strict=True):
        rest = -len(some) % COLUMNS
        pack(pad(some, (0, 0, 0, rest)) if rest else some, out)
    return packed


def _pack_nibbles(codes: Tensor, out: Tensor) -> None:
    fours = codes.contiguous().view(torch.int16)  # the first code lowest
    halves = fours.view(-1, 2, _HALF, fours.shape[1]).permute(1, 0, 3, 2)
    low, high = (_spread(half, keeps_order=out.dim() == 4) for half in halves)
    torch.bitwise_or(low, high << 4, out=out.view(-1).view(torch.int32).view(low.shape))


def _pack_by_four(codes: Tensor, out: Tensor) -> None:
    """Whole numbers without a sign."""
    by_four = codes.view(-1, 2, _HALF, codes.shape[1] // 4, 4).permute(0, 3, 1, 2, 4)
    torch.bitwise_xor(by_four, _ZERO_OF_INT8, out=out)


def _pack_by_two(codes: Tensor, out: Tensor) -> None:
    out.copy_(codes.view(-1, 2, _HALF // 4, 4, codes.shape[1] // 2, 2).permute(0, 4, 2, 1, 3, 5))


def _pack_planes(codes: Tensor, out: Tensor, *, lowest: int, takes_bytes: bool) -> None:
    """Nibbles of codes that begin at 0, and behind those of four inputs their other bits."""
    raised = (codes.view(torch.int8) - lowest).view(torch.uint8)
    if takes_bytes:
        ordered = raised.view(-1, 2, _HALF, codes.shape[1] // 4, 4).permute(0, 3, 1, 2, 4)
    else:
        ordered = raised.view(-1, 2, _HALF // 4, 4, codes.shape[1] // 2, 2).permute(0, 4, 2, 1, 3, 5)
    fours = ordered.reshape(*out.shape[:2], _CODES_OF_FOUR)
    half = _CODES_OF_FOUR // 2
    nibbles, plane = out[..., :half], out[..., half:]
    torch.bitwise_or(fours[..., :half] & 15, fours[..., half:] << 4, out=nibbles)
    num_bits = 8 * plane.shape[-1] // _CODES_OF_FOUR
    parts = (fours >> 4).view(*out.shape[:2], -1, plane.shape[-1]).unbind(2)
    for place, part in enumerate(parts):
        plane.bitwise_or_(part << place * num_bits)


def _places_of_four(column_U: Tensor, *, takes_bytes: bool) -> Tensor:
    """Find the codes of some columns among those of four inputs: places [U, 4]."""
    half_U1, lane_U1 = (column_U // _HALF).unsqueeze(1), (column_U % _HALF).unsqueeze(1)
    input_4 = torch.arange(4)
    if takes_bytes:
        return half_U1 * (_CODES_OF_FOUR // 2) + 4 * lane_U1 + input_4
    return 64 * (input_4 // 2) + lane_U1 // 4 * 16 + half_U1 * 8 + lane_U1 % 4 * 2 + input_4 % 2


def _join_planes(data: Tensor, block_U: Tensor, place_U4: Tensor) -> Tensor:
    """Undo `_pack_planes` for some outputs: codes from 0 on, [U, K]."""
    half, num_high = _CODES_OF_FOUR // 2, data.shape[2] - _CODES_OF_FOUR // 2
    num_bits = 8 * num_high // _CODES_OF_FOUR
    block_U1, shift_U4 = block_U.unsqueeze(1), place_U4 // half * 4
    nibble_U4G = data[block_U1, :, place_U4 % half] >> shift_U4.unsqueeze(2).to(torch.uint8) & 15
    shift_U4 = place_U4 // num_high * num_bits
    high_U4G = data[block_U1, :, half + place_U4 % num_high] >> shift_U4.unsqueeze(2).to(torch.uint8)
    codes_U4G = nibble_U4G | (high_U4G & (1 << num_bits) - 1) << 4
    return codes_U4G.transpose(1, 2).flatten(1)


def _spread(fours: Tensor, *, keeps_order: bool) -> Tensor:
    """Codes of four bits, one a byte: int16 to int32. For other codes the second and third change places."""
    words = fours.to(torch.int32, memory_format=torch.contiguous_format)
    if not keeps_order:
        return (words & 0x0F0F).bitwise_or_((words & 0xF0F0) << 12)
    words.bitwise_and_(0xFFFF)
    words = words.bitwise_or_(words << 8).bitwise_and_(0x00FF00FF)
    return words.bitwise_or_(words << 4).bitwise_and_(0x0F0F0F0F)


def _number_lookup(weight: GroupedWeight) -> Tensor:
    """The numbers of all codes as bfloat16: 16 of them twice, or lower bytes and upper bytes of 256."""
    if weight.table is not None:
        words = weight.table.bfloat16()
        if not torch.equal(words.float(), weight.table.float()):
            raise CannotPack("the table has numbers that bfloat16 has not")
        return words.repeat(2).view(torch.uint8)
    codes = torch.arange(256, dtype=torch.uint8).view(weight.codes.dtype)
    return _bytes_of(codes.float())


def _lookup_from(lowest: int, kind: _Kind) -> Tensor:
    """The whole numbers from the lowest on: lower bytes of 64, then upper ones. 32 are there twice."""
    return _bytes_of(lowest + (torch.arange(64) % (16 << _HIGH_BITS[kind])).float())


def _bytes_of(numbers: Tensor) -> Tensor:
    return numbers.bfloat16().view(torch.uint8).view(-1, 2).T.contiguous()


def _byte_lookup(weight: GroupedWeight) -> tuple[float, Tensor | None, int]:
    """Return a unit, the table as multiples of it in bytes from 0 on, and the shift that made them so."""
    if weight.table is None:
        return 1.0, None, _ZERO_OF_INT8
    sizes = weight.table.abs()
    unit = float(sizes[sizes > 0].min())
    whole = weight.table / unit
    shift = -int(whole.min())
    raised = whole + shift
    if not torch.equal(raised, raised.round()) or int(raised.max()) > _HIGHEST_BYTE:
        raise CannotPack("the table's numbers are no whole multiples of one: no product with int8 inputs")
    return unit, raised.to(torch.uint8), shift
