"""MXFP4, as the experts of gpt-oss have it: e2m1 in blocks of 32 inputs with a power of two for each.

Source: OCP Microscaling Formats, version 1.0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.quantized.grouped_weight import E2M1_TABLE, GroupedWeight
from worker.quantized.scheme import ModuleTensors, SelfReadingRules

BLOCK = 32
_NOT_A_NUMBER = 255
_MANTISSA_BITS, _SMALLEST_BITS = 23, 1 << 22
"""Exponent of float32; 2^-127 is subnormal there."""


@dataclass(frozen=True, slots=True)
class Mxfp4Reader(SelfReadingRules):
    """Weights in two tensors of these last names, those of gpt-oss if none are given."""

    codes: str = "blocks"
    exponents: str = "scales"

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
        num_outputs, num_inputs = shape
        if num_inputs % BLOCK:
            raise tensors.refusal(self.codes, f"has {num_inputs} inputs", f"a multiple of {BLOCK} inputs")
        groups = num_inputs // BLOCK
        shapes = ((num_outputs, groups, BLOCK // 2), (num_outputs, num_inputs // 2))
        codes = tensors.take(self.codes, (torch.uint8,), *shapes)
        exponents = tensors.take(self.exponents, (torch.uint8,), (num_outputs, groups))
        scales = powers_of_two(tensors, self.exponents, exponents)
        return GroupedWeight(codes=codes.reshape(num_outputs, -1), table=E2M1_TABLE, scales_NG=scales)


def powers_of_two(tensors: ModuleTensors, name: str, exponents: Tensor) -> Tensor:
    """Scales of eight bits of exponent (e8m0) as float32. Raises QuantizationRefused."""
    try:
        return powers_of(exponents)
    except ValueError as error:
        raise tensors.refusal(name, f"has {error}", "finite") from error


def powers_of(exponents: Tensor) -> Tensor:
    """Return the scales of exponents (e8m0) as float32. Raises ValueError for one that is no number."""
    if bool((exponents == _NOT_A_NUMBER).any()):
        raise ValueError("scales that are not a number")
    bits = exponents.int() << _MANTISSA_BITS
    return torch.where(exponents == 0, _SMALLEST_BITS, bits).view(torch.float32)
