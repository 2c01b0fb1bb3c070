"""FP8 checkpoints as DeepSeek and Qwen publish them, with a scale for each block, and those of ModelOpt.

Owns: blocks of any size, a single scale for a whole weight or for each output, and ModelOpt's NVFP4.

Shapes: N outputs, K inputs.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from worker.quantized.grouped_weight import GroupedWeight
from worker.quantized.scheme import (
    FLOATS,
    ModuleTensors,
    QuantizationRefused,
    SelfReadingRules,
    e2m1_of_16,
    refuse_not_finite,
    scales_of_blocks,
)

_SECOND_SCALE = "weight_scale_2"
_MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
_KNOWN_WORDS = {
    "fmt": ("e4m3", "float8_e4m3fn"),
    "scale_fmt": ("float", "ue8m0"),  # powers of two, which are stored as floats or as their exponents
    "expert_dtype": ("fp8", "float8_e4m3fn"),
}


@dataclass(frozen=True, slots=True)
class Fp8Rules:
    """Every module with a scale is quantized, but for those that are excluded by name."""

    block: tuple[int, int] | None
    """Outputs and inputs; None: one scale for the weight, or for each output."""
    excluded: tuple[str, ...]
    must_agree: bool = False

    def reader_of(self, module: str, class_name: str) -> "Fp8Rules | None":  # noqa: ARG002
        return None if any(_names(pattern, module) for pattern in self.excluded) else self

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
        codes = tensors.take("weight", (torch.float8_e4m3fn,), shape)
        refuse_not_finite(tensors, "weight", codes)
        if self.block is not None:
            scales = scales_of_blocks(tensors, "weight_scale_inv", self.block, shape)
        else:
            # Multiplies under either name.
            name = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
            outputs = shape[0]
            stored = tensors.take(name, FLOATS, (), (1,), (1, 1), (outputs,), (outputs, 1))
            scales = stored.float().reshape(-1, 1).expand(outputs, 1)
        return GroupedWeight(codes=codes, scales_NG=scales.contiguous())


def _names(pattern: str, module: str) -> bool:
    """Whether it is the module's name, a parent's, the end of its name, or a regular expression for one."""
    return module.endswith(pattern) or re.match(rf"(?:{pattern})(?:\.|$)", module) is not None


def read_fp8_rules(config: dict[str, Any]) -> Fp8Rules:
    """Raises QuantizationRefused."""
    block = config.get("weight_block_size")
    unknown = [
        f"{name} {config[name]}"
        for name, known in _KNOWN_WORDS.items()
        if config.get(name) is not None and config[name] not in known
    ]
    if block is not None and (
        len(block) != 2 or not all(isinstance(each, int) and each > 0 for each in block)
    ):
        unknown.append(f"weight_block_size {block}")
    if unknown:
        raise QuantizationRefused(
            f"quantization_config of fp8 has {', '.join(unknown)}",
            fix="take a checkpoint of e4m3 numbers with float scales of blocks of outputs and inputs",
        )
    excluded = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
    return Fp8Rules(None if block is None else (block[0], block[1]), tuple(excluded))


_FP8 = Fp8Rules(None, ())


class ModelOptRules(SelfReadingRules):
    """FP8 and NVFP4, which tensors tell apart."""

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
        if _SECOND_SCALE not in tensors:
            return _FP8.read(tensors, shape)
        factor = tensors.take(_SECOND_SCALE, (torch.float32,), (), (1,)).reshape(())
        if not bool(factor.isfinite()):
            raise tensors.refusal(_SECOND_SCALE, f"is {float(factor)}", "finite")
        weight = e2m1_of_16(tensors, "weight", shape)
        return replace(weight, scales_NG=weight.scales_NG * factor)


def read_modelopt_rules(config: dict[str, Any]) -> ModelOptRules:
    """Read a config of FP8 or NVFP4. Raises QuantizationRefused for one of another algorithm."""
    inner = config.get("quantization")
    algorithm = (inner if isinstance(inner, dict) else config).get("quant_algo")
    if algorithm not in _MODELOPT_ALGORITHMS:
        raise QuantizationRefused(
            f"the checkpoint is quantized by modelopt {algorithm}",
            fix=f"take one of {', '.join(_MODELOPT_ALGORITHMS)}",
        )
    return ModelOptRules()
