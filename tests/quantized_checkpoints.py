"""Tiny quantized checkpoints from random codes, each beside the plain checkpoint that it stands for.

Owns: the writing of each format. Nothing is rounded: both checkpoints hold the same numbers.
Never: reads a format (worker/quantized does).
"""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import make_checkpoint

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
        *(0.07958029, 0.1609302, 0.24611230, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ]
)
_SIZE = 0.3
"""Size of a typical weight, as tests/checkpoints.py has it."""
PLAIN_MODULES = ("lm_head", "model.layers.1.mlp.down_proj")
"""Linear layers that stay as they are in every format."""
_TOWER = re.compile(r"vision|visual|multi_modal|projector|audio|mlp1|connector")
_LINEAR = re.compile(r".*(_proj(_with_mqa)?|\.w[123])\.weight$|lm_head\.weight$")


class Written(NamedTuple):
    """One weight in a format, and its numbers."""

    tensors: dict[str, Tensor]
    numbers_NK: Tensor


class Format(NamedTuple):
    """A way to quantize a checkpoint."""

    config: dict[str, Any]
    write: Callable[["Random", int, int], Written]


class Random:
    """Random codes and scales, the same every time."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(3)

    def codes(self, highest: int, *shape: int) -> Tensor:
        return torch.randint(highest, shape, generator=self._generator)

    def scales(self, typical_code: float, *shape: int) -> Tensor:
        values = torch.rand(shape, generator=self._generator) + 0.5
        return (values * _SIZE / typical_code).bfloat16().float()

    def order(self, length: int) -> Tensor:
        return torch.randperm(length, generator=self._generator)


def write_quantized(family: str, name: str, root: Path, **overrides: Any) -> tuple[Path, Path]:
    """Write a family's checkpoint in a format; returns its folder, and that of the plain one.

    `overrides` are configuration keys.
    """
    plain = root / f"{family} plain {name}"
    quantized = root / f"{family} {name}"
    make_checkpoint(family, plain, tie_word_embeddings=False, **overrides)
    quantize(plain, quantized, name)
    return quantized, plain


def quantize(plain: Path, quantized: Path, name: str) -> None:
    """Write a checkpoint in a format, and its plain one anew with the numbers that the codes stand for."""
    config = json.loads((plain / "config.json").read_text())
    tensors, stored = load_file(plain / "model.safetensors"), {}
    random, chosen, left_plain = Random(), FORMATS[name], set()
    for tensor_name in sorted(tensors):
        module = tensor_name.removesuffix(".weight")
        if name == "mxfp4" and re.fullmatch(r".*experts\.(gate_up|down)_proj", tensor_name):
            parts, tensors[tensor_name] = _write_stack(random, *tensors[tensor_name].shape)
            stored |= {f"{tensor_name}{ending}": part for ending, part in parts.items()}
        elif (
            name != "mxfp4" and _LINEAR.match(tensor_name) and not _stays_plain(module, tensors[tensor_name])
        ):
            written = chosen.write(random, *tensors[tensor_name].shape)
            tensors[tensor_name] = written.numbers_NK.contiguous()
            stored |= {f"{module}.{last}": part.contiguous() for last, part in written.tensors.items()}
        else:
            stored[tensor_name] = tensors[tensor_name]
            left_plain.add(tensor_name)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    quantized.mkdir()
    for file in plain.iterdir():
        if file.name not in ("model.safetensors", "config.json"):
            (quantized / file.name).write_bytes(file.read_bytes())
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    said = copy.deepcopy(chosen.config)
    for key in said.keys() & {"ignore", "modules_to_not_convert"}:
        # What the tools list that write such checkpoints: every layer that they left as it was.
        left = [each.removesuffix(".weight") for each in stored if each in left_plain]
        said[key] = [*(each for each in said[key] if each.startswith("re:")), *left]
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": said}))


def stack_experts(numbers: dict[str, Tensor], experts: str, ends: tuple[str, str]) -> dict[str, Tensor]:
    """Codes of FP8 for the experts of a layer, in one tensor for all; puts their numbers into `numbers`.

    `ends` are those of the names of scales of weights, and of activations.
    """
    codes = {}
    num_experts = sum(name.startswith(f"{experts}.") and "down_proj" in name for name in numbers)
    for stack, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        names = [[f"{experts}.{expert}.{part}.weight" for part in parts] for expert in range(num_experts)]
        whole = torch.stack([torch.cat([numbers[name] for name in each]) for each in names])
        scales = whole.abs().amax((1, 2), keepdim=True) / 448
        codes[f"{experts}.{stack}"] = (whole / scales).to(torch.float8_e4m3fn)
        codes[f"{experts}.{stack}_{ends[0]}"] = scales
        codes[f"{experts}.{stack}_{ends[1]}"] = torch.ones(num_experts)
        for each, found in zip(names, codes[f"{experts}.{stack}"].float() * scales, strict=True):
            parts_of_expert = [part.contiguous() for part in found.chunk(len(parts))]
            numbers |= dict(zip(each, parts_of_expert, strict=True))
    return codes


def _stays_plain(module: str, tensor: Tensor) -> bool:
    """Tell what no tool quantizes: towers, and sizes that are no whole words or groups."""
    is_odd = tensor.shape[0] % 8 > 0 or tensor.shape[1] % 16 > 0
    return is_odd or module in PLAIN_MODULES or _TOWER.search(module) is not None


def _packed(codes: Tensor, bits: int = 4) -> Tensor:
    """Pack the last dimension into int32, the lowest bits first."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_word))
    shifts = torch.arange(per_word) * bits
    words = (padded.long().view(len(codes), -1, per_word) << shifts).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _spread(values_NG: Tensor, num_inputs: int) -> Tensor:
    return values_NG.repeat_interleave(num_inputs // values_NG.shape[1], dim=1)


def _pack_quantized(*, has_zeros: bool, is_permuted: bool, size: int = 16) -> Callable[..., Written]:
    def write(random: Random, n: int, k: int) -> Written:
        size_here = k if size < 0 else size
        codes, scales = random.codes(16, n, k), random.scales(4.6, n, k // size_here)
        tensors = {
            "weight_packed": _packed(codes),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor([n, k]),
        }
        zeros = torch.full_like(scales, 8).long()
        if has_zeros:
            zeros = random.codes(16, n, k // size_here)
            tensors["weight_zero_point"] = _packed(zeros.T.contiguous()).T
        groups = torch.arange(k) // size_here
        if is_permuted:  # one order for all layers of as many inputs, as it is in truth
            groups = groups[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
            tensors["weight_g_idx"] = groups.int()
        return Written(tensors, (codes - zeros[:, groups]) * scales[:, groups])

    return write


def _int8(random: Random, n: int, k: int) -> Written:
    codes, scales = random.codes(255, n, k) - 127, random.scales(73, n, 1)
    return Written({"weight": codes.to(torch.int8), "weight_scale": scales.bfloat16()}, codes * scales)


def _float8(random: Random, n: int, k: int) -> Tensor:
    raw = random.codes(120, n, k) + 128 * random.codes(2, n, k)
    return raw.to(torch.uint8).view(torch.float8_e4m3fn)


def _float8_by_channel(random: Random, n: int, k: int) -> Written:
    codes, scales = _float8(random, n, k), random.scales(80, n, 1)
    return Written({"weight": codes, "weight_scale": scales.bfloat16()}, codes.float() * scales)


def _float8_by_block(random: Random, n: int, k: int) -> Written:
    codes, scales = _float8(random, n, k), random.scales(80, -(-n // 32), -(-k // 16))
    spread = scales.repeat_interleave(32, dim=0)[:n].repeat_interleave(16, dim=1)[:, :k]
    return Written({"weight": codes, "weight_scale_inv": scales}, codes.float() * spread)


def _nvfp4(random: Random, n: int, k: int) -> Written:
    codes, divisor = random.codes(16, n, k), torch.tensor([512.0])
    scales = (random.scales(3, n, k // 16) * divisor).to(torch.float8_e4m3fn)
    tensors = {
        "weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_global_scale": divisor,
    }
    return Written(tensors, _E2M1[codes] * _spread(scales.float() / divisor, k))


def _awq(random: Random, n: int, k: int) -> Written:
    codes, zeros = random.codes(16, n, k), random.codes(16, n, k // 16)
    scales = random.scales(4.6, n, k // 16).half()
    qweight, qzeros = (
        _packed(each.T.reshape(each.shape[1], -1, 8)[:, :, _AWQ_ORDER].reshape(each.shape[1], -1))
        for each in (codes, zeros)
    )
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales.T}
    return Written(tensors, (codes - _spread(zeros, k)) * _spread(scales.float(), k))


def _gptq(*, shift: int, is_permuted: bool) -> Callable[..., Written]:
    def write(random: Random, n: int, k: int) -> Written:
        codes = random.codes(16, n, k)
        zeros = random.codes(15, n, k // 16) + 1
        scales = random.scales(4.6, n, k // 16).half()
        groups = torch.arange(k) // 16
        if is_permuted:
            groups = groups[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
        tensors = {
            "qweight": _packed(codes).T,
            "qzeros": _packed(zeros.T.contiguous() - shift),
            "scales": scales.T,
            "g_idx": groups.int(),
        }
        return Written(tensors, (codes - zeros[:, groups]) * scales.float()[:, groups])

    return write


def _modelopt(random: Random, n: int, k: int) -> Written:
    codes, factor = random.codes(16, n, k), torch.tensor(1 / 512)
    scales = (random.scales(3, n, k // 16) / factor).to(torch.float8_e4m3fn)
    tensors = {
        "weight": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_scale_2": factor,
        "input_scale": torch.tensor(0.01),
    }
    return Written(tensors, _E2M1[codes] * _spread(scales.float() * factor, k))


def _auto_round(random: Random, n: int, k: int) -> Written:
    """GPTQ's words without an order of inputs."""
    written = _gptq(shift=1, is_permuted=False)(random, n, k)
    return Written(
        {name: each for name, each in written.tensors.items() if name != "g_idx"}, written.numbers_NK
    )


def _nf4(random: Random, n: int, k: int) -> Written:
    """One line of all rows in blocks of 64, the first code of a byte in the upper bits, scales as codes."""
    codes, num_blocks = random.codes(16, n * k), -(-n * k // 64)
    numbers = torch.linspace(0, 1, 256)
    largest, places = random.scales(0.3, -(-num_blocks // 256)) / 2, random.codes(256, num_blocks)
    absmax = numbers[places] * largest[torch.arange(num_blocks) // 256] + 0.25
    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": [n, k],
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": 0.25,
    }
    tensors = {
        "weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8).view(-1, 1),
        "weight.absmax": places.to(torch.uint8),
        "weight.quant_map": _NF4.clone(),
        "weight.nested_absmax": largest,
        "weight.nested_quant_map": numbers,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    return Written(tensors, (_NF4[codes] * absmax[torch.arange(n * k) // 64]).view(n, k))


def _llm_int8(random: Random, n: int, k: int) -> Written:
    codes, largest = random.codes(255, n, k) - 127, random.scales(73, n) * 127
    tensors = {
        "weight": codes.to(torch.int8),
        "SCB": largest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return Written(tensors, codes * (largest / 127)[:, None])


def _torchao_int4(random: Random, n: int, k: int) -> Written:
    codes, zeros = random.codes(16, n, k) - 8, random.scales(1, k // 16, n).bfloat16()
    scales = random.scales(4.6, k // 16, n).bfloat16()
    tensors = {
        "_weight_qdata": (codes[:, ::2] & 15 | codes[:, 1::2] << 4).to(torch.int8),
        "_weight_scale": scales,
        "_weight_zero_point": zeros,
    }
    return Written(tensors, codes * _spread(scales.T.float(), k) + _spread(zeros.T.float(), k))


def _torchao_float8(random: Random, n: int, k: int) -> Written:
    codes, scales = _float8(random, n, k), random.scales(80, n, 1)
    return Written({"_weight_qdata": codes, "_weight_scale": scales}, codes.float() * scales)


def _write_stack(random: Random, num_experts: int, k: int, n: int) -> tuple[dict[str, Tensor], Tensor]:
    """MXFP4 of a parameter [E, K, N]."""
    codes = random.codes(16, num_experts, n, k)
    exponents = random.codes(2, num_experts, n, k // 32) + 123
    numbers = _E2M1[codes] * (2.0 ** (exponents - 127)).repeat_interleave(32, dim=2)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    parts = {
        "_blocks": blocks.view(num_experts, n, k // 32, 16),
        "_scales": exponents.to(torch.uint8),
    }
    return parts, numbers.transpose(1, 2).contiguous()


def _no_linear(random: Random, n: int, k: int) -> Written:
    raise AssertionError(f"only experts are quantized, not {n} x {k} of {random}")


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        # Routers are no linear layers in transformers, but may be in the config of the one who wrote it.
        "ignore": [*PLAIN_MODULES, "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$"],
    }


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
FORMATS = {
    "int4": Format(
        _compressed("pack-quantized", **_INT4), _pack_quantized(has_zeros=False, is_permuted=False)
    ),
    "int4 with zeros": Format(
        _compressed("pack-quantized", **_INT4, symmetric=False, actorder="group"),
        _pack_quantized(has_zeros=True, is_permuted=True),
    ),
    "int4 by channel": Format(
        _compressed("pack-quantized", num_bits=4, type="int", strategy="channel"),
        _pack_quantized(has_zeros=False, is_permuted=False, size=-1),
    ),
    "int8": Format(_compressed("int-quantized", num_bits=8, type="int", strategy="channel"), _int8),
    "float8": Format(
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"), _float8_by_channel
    ),
    "nvfp4": Format(
        _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        _nvfp4,
    ),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, _awq),
    "gptq": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
        _gptq(shift=1, is_permuted=True),
    ),
    "gptq v2": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"},
        _gptq(shift=0, is_permuted=False),
    ),
    "fp8": Format(
        {"quant_method": "fp8", "weight_block_size": [32, 16], "modules_to_not_convert": [*PLAIN_MODULES]},
        _float8_by_block,
    ),
    "modelopt nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [*PLAIN_MODULES]}, _modelopt
    ),
    "auto-round": Format(
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 16,
            "sym": False,
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {PLAIN_MODULES[1]: {"bits": 16, "data_type": "float"}},
        },
        _auto_round,
    ),
    "nf4": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": [*PLAIN_MODULES]},
        _nf4,
    ),
    "llm.int8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, _llm_int8),
    "torchao int4": Format(
        {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 16}}},
        },
        _torchao_int4,
    ),
    "torchao float8": Format(
        {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Float8WeightOnlyConfig", "_data": {}}},
        },
        _torchao_float8,
    ),
    "mxfp4": Format({"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn"]}, _no_linear),
}
