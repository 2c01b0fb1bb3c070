"""Weights as codes with scales of groups: one type for every format of a checkpoint.

Owns: the meaning of codes, scales, offsets and permutation, and what may be cut or merged. It is a Weight of
worker/model/linear.py.

Shapes: N outputs, K inputs, G groups of inputs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

NUM_NIBBLES = 16
UNSIGNED_TABLE = torch.arange(NUM_NIBBLES, dtype=torch.float32)
"""Codes 0 to 15 stand for themselves: scales and offsets do the rest."""
SIGNED_TABLE = UNSIGNED_TABLE - 8
"""Codes are 8 more than their numbers."""
E2M1_TABLE = torch.tensor(
    [sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
)
"""Floats of 2 bits of exponent and 1 of mantissa; the highest bit is the sign."""
_BYTE_DTYPES = (torch.int8, torch.float8_e4m3fn)
FOUR_BITS = "4 bits"
EIGHT_BITS = "8 bits in groups"
FLOAT8 = "float8"
"""Formats, see Weight.format."""
_BY_GROUP = ("scales_NG", "offsets_NG")
_BY_OUTPUT = ("codes", *_BY_GROUP, "scale_units_NU", "offset_units_NU")
_TENSORS = (*_BY_OUTPUT, "table", "permutation_K")
_FORMATS = {torch.uint8: FOUR_BITS, torch.int8: EIGHT_BITS, torch.float8_e4m3fn: FLOAT8}


_Weight = TypeVar("_Weight", bound="GroupedWeight")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """A weight [N, K]: number(code) * scale - offset, the last two by output and group of inputs.

    Raises ValueError where the shapes do not belong to each other.
    """

    codes: Tensor
    """int8 or float8_e4m3fn [N, K], which stand for themselves; or uint8 [N, K / 2], two codes a byte, the
    lower four bits first, which stand for the numbers of `table`."""
    table: Tensor | None = None
    """float32 [16], for codes of four bits."""
    scales_NG: Tensor
    """float32"""
    offsets_NG: Tensor | None = None
    """float32"""
    permutation_K: Tensor | None = None
    """int64: column k of the codes is multiplied by input permutation_K[k]."""
    scale_units_NU: Tensor | None = None
    """float16 [N, K / 256]: scales are whole multiples of it, by which they can be kept in fewer bytes."""
    offset_units_NU: Tensor | None = None
    """The same of offsets."""

    def __post_init__(self) -> None:
        is_packed = self.codes.dtype is torch.uint8
        if not is_packed and self.codes.dtype not in _BYTE_DTYPES:
            raise ValueError(f"codes are {self.codes.dtype}")
        if is_packed != (self.table is not None) or (
            self.table is not None and len(self.table) != NUM_NIBBLES
        ):
            raise ValueError("a table of 16 numbers belongs to codes of four bits, and to no others")
        groups = self.scales_NG.shape
        if self.codes.dim() != 2 or len(groups) != 2 or groups[0] != self.num_outputs:
            raise ValueError(f"scales {tuple(groups)} do not fit {self.num_outputs} outputs")
        if groups[1] == 0 or self.num_inputs % groups[1]:
            raise ValueError(f"{groups[1]} groups do not divide {self.num_inputs} inputs")
        if self.offsets_NG is not None and self.offsets_NG.shape != groups:
            raise ValueError(f"offsets {tuple(self.offsets_NG.shape)} do not fit scales {tuple(groups)}")
        if self.permutation_K is not None and self.permutation_K.shape != (self.num_inputs,):
            raise ValueError(f"the permutation has {len(self.permutation_K)} of {self.num_inputs} inputs")

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[1] * (2 if self.codes.dtype is torch.uint8 else 1)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight that this stands for: [N, K]."""
        return self.num_outputs, self.num_inputs

    @property
    def group_size(self) -> int:
        return self.num_inputs // self.scales_NG.shape[1]

    @property
    def format(self) -> str:
        return _FORMATS[self.codes.dtype]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def kind(self) -> str:
        """The format, for a person, with all that a product depends on but sizes and numbers."""
        described = f"{self.format} by {self.group_size}"
        if self.table is not None and torch.equal(self.table.cpu(), E2M1_TABLE):
            described += ", e2m1"
        if self.offsets_NG is not None:
            described += ", with offsets"
        return described if self.permutation_K is None else f"{described}, inputs permuted"

    @property
    def num_bytes(self) -> int:
        """Memory of all parts but the table."""
        parts = (self.codes, self.scales_NG, self.offsets_NG, self.permutation_K)
        return sum(part.nbytes for part in parts if part is not None)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] in the order of inputs: the definition of everything above.

        It is computed in float32, and rounded once.
        """
        groups = (self.num_outputs, -1, self.group_size)
        weight = self.numbers().view(groups).mul_(self.scales_NG[:, :, None])
        if self.offsets_NG is not None:
            weight -= self.offsets_NG[:, :, None]
        weight = weight.view(self.shape)
        if self.permutation_K is None:
            return weight.to(dtype)
        ordered = torch.empty_like(weight)
        ordered[:, self.permutation_K] = weight
        return ordered.to(dtype)

    def numbers(self) -> Tensor:
        """The numbers that the codes stand for, float32 [N, K], in the order of the codes."""
        if self.table is None:
            return self.codes.float()
        # Both numbers of a byte are looked up at once, as the eight bytes that they are.
        low, high = self.table.repeat(NUM_NIBBLES), self.table.repeat_interleave(NUM_NIBBLES)
        pairs = torch.stack((low, high), dim=1).view(torch.int64)[:, 0]
        # As an index: it takes indices of four bytes, and `pairs[...]` makes eight of each.
        found = pairs.contiguous().index_select(0, self.codes.int().reshape(-1))
        return found.view(torch.float32).view(self.shape)

    def nibbles(self) -> Tensor:
        """Codes of four bits, one a byte: uint8 [N, K]."""
        assert self.codes.dtype is torch.uint8
        return torch.stack((self.codes & 15, self.codes >> 4), dim=-1).view(self.shape)

    def with_parts(
        self, names: Iterable[str], change: Callable[[Tensor], Tensor], **others: Tensor | None
    ) -> Self:
        """The weight with the tensors of these names changed, where it has them, and others replaced."""
        parts = {name: getattr(self, name) for name in names}
        changed: dict[str, Any] = {name: change(part) for name, part in parts.items() if part is not None}
        return replace(self, **(changed | others))

    def outputs(self, chosen: slice | Tensor) -> Self:
        """Some outputs, in the order given: a slice or int64 indices."""
        return self.with_parts(_BY_OUTPUT, lambda part: part[chosen])

    def inputs(self, start: int, end: int) -> Self:
        """Inputs [start, end); groups become smaller where that cuts one. Raises ValueError if permuted."""
        if self.permutation_K is not None:
            raise ValueError("permuted inputs cannot be cut: their groups are spread over all of them")
        if not 0 <= start < end <= self.num_inputs:
            raise ValueError(f"inputs {start} to {end} are none of {self.num_inputs}")
        size = gcd(self.group_size, start, end)
        if size != self.group_size:
            return _cut(self, size).inputs(start, end)
        groups = slice(start // size, end // size)
        per_byte = self.num_inputs // self.codes.shape[1]
        if start % per_byte or end % per_byte:
            raise ValueError(f"inputs {start} to {end} cut bytes of {per_byte} codes")
        codes = self.codes[:, start // per_byte : end // per_byte]
        return self.with_groups(lambda part: part[:, groups], codes)

    def with_groups(self, change: Callable[[Tensor], Tensor], codes: Tensor) -> Self:
        """The weight with its groups changed, as `codes` are already."""
        return self.with_parts(_BY_GROUP, change, codes=codes, scale_units_NU=None, offset_units_NU=None)

    def merge(self, others: Sequence[Self]) -> Self:
        """Merge with weights of the same inputs, as `merged` does."""
        return merged([self, *others])

    def to(self, device: torch.device | str) -> Self:
        return self.with_parts(_TENSORS, lambda part: part.to(device))


def for_products_in(dtype: torch.dtype, weight: GroupedWeight) -> GroupedWeight:
    """The weight with a table of bfloat16's numbers, unless products are in float32.

    Kernels look numbers up in bfloat16. NF4's are the only ones that it lacks, and a product in bfloat16 or
    float16 rounds its weights as much.
    """
    if weight.table is None or dtype is torch.float32:
        return weight
    return replace(weight, table=weight.table.bfloat16().float())


def pack_nibbles(codes_NK: Tensor) -> Tensor:
    """Codes of four bits, one a byte, to two a byte: uint8 [N, K] to [N, K / 2]."""
    pairs = codes_NK.view(len(codes_NK), -1, 2)
    return pairs[:, :, 0] | pairs[:, :, 1] << 4


def merged(weights: Sequence[_Weight]) -> _Weight:
    """Outputs of several weights of the same inputs, one after the other.

    Group sizes may differ: the larger groups are cut. Next to whole numbers of eight bits, those of four
    become such. Raises ValueError where other codes, tables or permutations differ.
    """
    if len({each.codes.dtype for each in weights}) > 1:
        weights = [_in_bytes(weight) for weight in weights]
    if not all(_are_equal(each.table, weights[0].table) for each in weights):
        weights = [_without_sign(weight) for weight in weights]
    first = weights[0]
    for other in weights[1:]:
        if other.codes.dtype is not first.codes.dtype or not _are_equal(other.table, first.table):
            raise ValueError("weights with codes of different kinds cannot be merged")
        if other.num_inputs != first.num_inputs or not _are_equal(other.permutation_K, first.permutation_K):
            raise ValueError("weights of different inputs, or in different orders of them, cannot be merged")
    size = min(weight.group_size for weight in weights)
    if any(weight.group_size % size for weight in weights):
        raise ValueError(f"groups of {', '.join(str(each.group_size) for each in weights)} cannot be merged")
    weights = [_cut(weight, size) for weight in weights]
    if any(weight.offsets_NG is not None for weight in weights):
        weights = [_with_offsets(weight) for weight in weights]
    parts: dict[str, Any] = {
        name: _all_or_none([getattr(weight, name) for weight in weights]) for name in _BY_OUTPUT
    }
    return replace(first, **parts)


def _with_offsets(weight: _Weight) -> _Weight:
    """The same weight with offsets: zeros where it has none."""
    if weight.offsets_NG is not None:
        return weight
    units_NU = weight.scale_units_NU
    return replace(
        weight,
        offsets_NG=torch.zeros_like(weight.scales_NG),
        offset_units_NU=None if units_NU is None else torch.zeros_like(units_NU),
    )


def gathered(num_outputs: int, pieces: "Iterable[GroupedWeight]") -> GroupedWeight:
    """Outputs of pieces that are cut from one weight, of which one at a time need be there."""
    whole: dict[str, Tensor] = {}
    num_done = 0
    for piece in pieces:
        if piece.num_outputs == num_outputs:
            return piece
        for name in _BY_OUTPUT:
            part: Tensor | None = getattr(piece, name)
            if part is not None:
                if not num_done:
                    whole[name] = part.new_empty((num_outputs, part.shape[1]))
                whole[name][num_done : num_done + len(part)] = part
        num_done += piece.num_outputs
    return replace(piece, **whole)


def _in_bytes(weight: _Weight) -> _Weight:
    """The same weight in codes of int8, where its numbers are whole."""
    if weight.table is None or not torch.equal(weight.table, weight.table.round()):
        return weight
    codes = weight.table.to(torch.int8)[weight.nibbles().int()]
    return replace(weight, codes=codes, table=None)


def _without_sign(weight: _Weight) -> _Weight:
    """The same weight by UNSIGNED_TABLE, where its own is SIGNED_TABLE: 8 scales go into the offsets."""
    if weight.table is None or not torch.equal(weight.table, SIGNED_TABLE.to(weight.device)):
        return weight
    offsets = 8 * weight.scales_NG
    if weight.offsets_NG is not None:
        offsets = offsets + weight.offsets_NG
    table = UNSIGNED_TABLE.to(weight.device)
    return replace(weight, table=table, offsets_NG=offsets, offset_units_NU=None)


def _all_or_none(parts: list[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if len(there) == len(parts) else None


def _cut(weight: _Weight, size: int) -> _Weight:
    times = weight.group_size // size
    if times == 1:
        return weight
    return weight.with_parts(_BY_GROUP, lambda part: part.repeat_interleave(times, dim=1))


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
