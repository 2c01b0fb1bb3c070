"""Scales and offsets of groups in the smallest form that holds them exactly, as the CPU's kernels read them.

Owns: the choice among the forms of csrc/kernels.h, and looking numbers up again.
Never: rounds: what no smaller form holds stays float32.

Shapes: B blocks of 32 outputs, N outputs, G groups of inputs, U units of 256 inputs.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

from worker.cpu.native import COLUMNS, CGroupNumbers, pointer
from worker.cpu.packing.large_pages import WEIGHTS

_HIGHEST_BYTE = 127


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
