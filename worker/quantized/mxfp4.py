"""MXFP4 experts as gpt-oss stores them: e2m1 in blocks of 32 inputs with a power of two for each.

Owns: the two tensors of a stack of experts.
Source: OCP Microscaling Formats, version 1.0.

Shapes: E experts, N outputs, K inputs.
"""

import torch
from torch import Tensor

from worker.quantized.grouped_weight import E2M1_TABLE, GroupedWeight
from worker.quantized.scheme import ModuleTensors

BLOCK = 32
_NOT_A_NUMBER = 255
_MANTISSA_BITS, _SMALLEST_BITS = 23, 1 << 22
"""Exponent of float32; 2^-127 is subnormal there."""


def read_experts(tensors: ModuleTensors, name: str, shape: tuple[int, int, int]) -> tuple[GroupedWeight, ...]:
    """Weights [N, K] of all experts in `{name}_blocks` and `{name}_scales`. Raises QuantizationRefused."""
    num_experts, num_outputs, num_inputs = shape
    if num_inputs % BLOCK:
        raise tensors.refusal(f"{name}_blocks", f"has {num_inputs} inputs", f"a multiple of {BLOCK} inputs")
    groups = num_inputs // BLOCK
    blocks = tensors.take(
        f"{name}_blocks",
        (torch.uint8,),
        (num_experts, num_outputs, groups, BLOCK // 2),
        (num_experts, num_outputs, num_inputs // 2),
    )
    exponents = tensors.take(f"{name}_scales", (torch.uint8,), (num_experts, num_outputs, groups))
    scales = powers_of_two(tensors, f"{name}_scales", exponents)
    return tuple(
        GroupedWeight(codes=codes.reshape(num_outputs, -1), table=E2M1_TABLE, scales_NG=scale)
        for codes, scale in zip(blocks, scales, strict=True)
    )


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
