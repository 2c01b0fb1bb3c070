"""AWQ checkpoints: four bits, packed along outputs in an order of their own.

Owns: the layout that AutoAWQ calls gemm.
Never: checkpoints whose name says AWQ and whose quant_method is compressed-tensors.
Source: arXiv:2306.00978.

Shapes: N outputs, K inputs, G groups of inputs.
"""

from dataclasses import dataclass
from typing import Any

import torch

from worker.quantized.grouped_weight import GroupedWeight
from worker.quantized.scheme import (
    IntegerCodes,
    ModuleTensors,
    QuantizationRefused,
    SelfReadingRules,
    unpacked,
    weight_of,
)

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The one of eight outputs that each nibble of a word holds, from the lowest on."""


@dataclass(frozen=True, slots=True)
class AwqRules(SelfReadingRules):
    group_size: int
    """-1: all inputs are one group."""

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
        num_outputs, num_inputs = shape
        size = num_inputs if self.group_size == -1 else self.group_size
        if num_outputs % 8 or num_inputs % size:
            raise tensors.refusal(
                "qweight", f"of {list(shape)} in groups of {size}", "whole words and groups"
            )
        groups = num_inputs // size
        qweight = tensors.take("qweight", (torch.int32,), (num_inputs, num_outputs // 8))
        qzeros = tensors.take("qzeros", (torch.int32,), (groups, num_outputs // 8))
        scales = tensors.take("scales", (torch.float16, torch.bfloat16), (groups, num_outputs))
        return weight_of(
            IntegerCodes(
                codes_NK=unpacked(qweight, 4, _ORDER).T.contiguous(),
                zeros_NG=unpacked(qzeros, 4, _ORDER).T.contiguous(),
                scales_NG=scales.T.contiguous(),
                bits=4,
            )
        )


def read_awq_rules(config: dict[str, Any]) -> AwqRules:
    """Read the rules of AWQ from its `quantization_config`. Raises QuantizationRefused."""
    bits, version = config.get("bits", config.get("w_bit", 4)), str(config.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm" or not config.get("zero_point", True):
        raise QuantizationRefused(
            f"quantization_config asks for AWQ with bits {bits}, version {version}, "
            f"zero_point {config.get('zero_point', True)}",
            fix="take a checkpoint with bits 4, version gemm and zero_point true",
        )
    return AwqRules(int(config.get("group_size", config.get("q_group_size", 128))))
