"""Grouped weights of random codes: no rounding, so that what is expected is exact."""

import torch

from worker.quantized.grouped_weight import (
    E2M1_TABLE,
    SIGNED_TABLE,
    UNSIGNED_TABLE,
    GroupedWeight,
    pack_nibbles,
)

_RANGES = {
    "int8": (-128, 128),
    "int8 with offsets": (-128, 128),
    "six bits": (-32, 32),
    "five bits with offsets": (0, 32),
    "five bits": (-16, 16),
}
"""Whole numbers, the second being the first that is none of them."""
KINDS = ("signed", "unsigned", "e2m1", "float8", *_RANGES)


def random_weight(
    kind: str, num_outputs: int, num_inputs: int, group_size: int, *, seed: int = 1
) -> GroupedWeight:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_outputs, num_inputs)
    groups = (num_outputs, num_inputs // group_size)
    scales = torch.rand(groups, generator=generator) + 0.5
    offsets = None
    if kind == "unsigned" or kind.endswith("with offsets"):
        offsets = scales * torch.randint(16, groups, generator=generator)
    if kind in _RANGES:
        codes = torch.randint(*_RANGES[kind], shape, generator=generator).to(torch.int8)
        return GroupedWeight(codes=codes, scales_NG=scales, offsets_NG=offsets)
    if kind == "float8":
        # All but the two codes that are not numbers.
        raw = torch.randint(127, shape, generator=generator) + 128 * torch.randint(
            2, shape, generator=generator
        )
        codes = raw.to(torch.uint8).view(torch.float8_e4m3fn)
        return GroupedWeight(codes=codes, scales_NG=scales)
    table = {"signed": SIGNED_TABLE, "unsigned": UNSIGNED_TABLE, "e2m1": E2M1_TABLE}[kind]
    nibbles = torch.randint(16, shape, generator=generator).to(torch.uint8)
    return GroupedWeight(codes=pack_nibbles(nibbles), table=table, scales_NG=scales, offsets_NG=offsets)
