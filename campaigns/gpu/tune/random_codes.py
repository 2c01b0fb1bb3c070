"""Weights of random codes, of the kinds of which the part `tiles` tries products.

Never: multiplies.

Shapes: N outputs, K inputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from worker.quantized.grouped_weight import SIGNED_TABLE, UNSIGNED_TABLE, GroupedWeight

_SCALE = 0.01


class _Kind(NamedTuple):
    """Codes of one way."""

    group: int
    """Inputs of a group; 0 for all."""
    dtype: torch.dtype = torch.uint8
    table: Tensor | None = None
    """Numbers of codes of four bits."""
    has_offsets: bool = False


KINDS = {
    "int4 by 32": _Kind(32, table=SIGNED_TABLE),
    "int4 by 128, offsets": _Kind(128, table=UNSIGNED_TABLE, has_offsets=True),
    "float8": _Kind(0, torch.float8_e4m3fn),
}


def random_codes(kind: str, num_outputs: int, num_inputs: int, device: torch.device) -> GroupedWeight:
    """Make a weight on the device; its numbers are small, so that sums are about 1."""
    this = KINDS[kind]
    groups = (num_outputs, num_inputs // min(this.group or num_inputs, num_inputs))
    # Most checkpoints have them in 16 bits.
    scales = ((torch.rand(groups, device=device) + 0.5) * _SCALE).half().float()
    if this.dtype is torch.float8_e4m3fn:
        # All but the two codes that are not numbers.
        raw = torch.randint(127, (num_outputs, num_inputs), device=device)
        raw += 128 * torch.randint(2, (num_outputs, num_inputs), device=device)
        return GroupedWeight(codes=raw.byte().view(this.dtype), scales_NG=scales / 64)
    assert this.table is not None
    codes = torch.randint(256, (num_outputs, num_inputs // 2), device=device).byte()
    offsets = scales * 7.5 if this.has_offsets else None
    return GroupedWeight(codes=codes, table=this.table.to(device), scales_NG=scales, offsets_NG=offsets)
