"""FP8 checkpoints as DeepSeek and Qwen publish them, with a scale for each block, and those of ModelOpt.

Owns: blocks of any size (MXFP8's are 32 inputs of an output), a single scale for a whole weight or for each
output, and ModelOpt's NVFP4.

Shapes: N outputs, K inputs.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from worker.quantized.grouped_weight import GroupedWeight
from worker.quantized.scheme import (
    ModuleTensors,
    QuantizationRefused,
    SelfReadingRules,
    e2m1_of_16,
    refuse_not_finite,
    scales_of_blocks,
    take_scales,
)

_SECOND_SCALE = "weight_scale_2"
_SCALE_NAMES = ("weight_scale_inv", "weight_scale")
"""Codes are multiplied by the scale under either name."""
_MODELOPT_ALGORITHMS = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB", "FP8_PB_WO", "FP8_BLOCK_SCALES", "MXFP8"),
    *("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"),
)
_MX_BLOCK, _MODELOPT_BLOCK = (1, 32), (128, 128)
"""Outputs and inputs."""
_KNOWN_WORDS = {
    "fmt": ("e4m3", "float8_e4m3fn"),
    "scale_fmt": ("float", "ue8m0"),  # powers of two, which are stored as floats or as their exponents
    "expert_dtype": ("fp8", "float8_e4m3fn"),
}


@dataclass(frozen=True, slots=True)
class Fp8Rules(SelfReadingRules):
    block: tuple[int, int] | None
    """Outputs and inputs; None: one scale for the weight, or for each output, as single modules may have."""

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
        codes = tensors.take("weight", (torch.float8_e4m3fn,), shape)
        refuse_not_finite(tensors, "weight", codes)
        name, outputs = _scale_name(tensors), shape[0]
        plain = ((), (1,), (1, 1), (outputs,), (outputs, 1))
        if self.block is None or (name in tensors and tensors.shape_of(name) in plain):
            scales = take_scales(tensors, name, *plain).reshape(-1, 1).expand(outputs, 1).contiguous()
        else:
            scales = scales_of_blocks(tensors, name, self.block, shape)
        return GroupedWeight(codes=codes, scales_NG=scales)


def _scale_name(tensors: ModuleTensors) -> str:
    return next((each for each in _SCALE_NAMES if each in tensors), _SCALE_NAMES[0])


def read_fp8_rules(config: dict[str, Any]) -> Fp8Rules:
    """Read the rules of FP8 from its `quantization_config`. Raises QuantizationRefused."""
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
    return Fp8Rules(None if block is None else (block[0], block[1]))


def read_mxfp8_rules(config: dict[str, Any]) -> Fp8Rules:
    """Read the rules of MXFP8 from its `quantization_config`. Raises QuantizationRefused."""
    return read_fp8_rules({**config, "weight_block_size": config.get("weight_block_size") or _MX_BLOCK})


class ModelOptRules(SelfReadingRules):
    """FP8, MXFP8 and NVFP4, which tensors tell apart."""

    def read(self, tensors: ModuleTensors, shape: tuple[int, int]) -> GroupedWeight:
        if _SECOND_SCALE not in tensors:
            is_mx = tensors.shape_of(_scale_name(tensors)) == (shape[0], -(-shape[1] // _MX_BLOCK[1]))
            return Fp8Rules(_MX_BLOCK if is_mx else _MODELOPT_BLOCK).read(tensors, shape)
        factor = tensors.take(_SECOND_SCALE, (torch.float32,), (), (1,)).reshape(())
        if not bool(factor.isfinite()):
            raise tensors.refusal(_SECOND_SCALE, f"is {float(factor)}", "finite")
        weight = e2m1_of_16(tensors, "weight", shape)
        return replace(weight, scales_NG=weight.scales_NG * factor)


def read_modelopt_rules(config: dict[str, Any]) -> ModelOptRules:
    """Read a config of FP8 or NVFP4. Raises QuantizationRefused for one of another algorithm."""
    inner = config.get("quantization")
    said = inner if isinstance(inner, dict) else config
    algorithm = said.get("quant_algo", "unknown")  # null: of keys and values alone
    if algorithm is not None and algorithm not in _MODELOPT_ALGORITHMS:
        raise QuantizationRefused(
            f"the checkpoint is quantized by modelopt {algorithm}",
            fix=f"take one of {', '.join(_MODELOPT_ALGORITHMS)}",
        )
    return ModelOptRules()
