"""Tensors tell what a config leaves open: blocks, exponents, and which of several groups a module is in."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker.quantized.test_readers import (
    K,
    N,
    assert_same,
    compressed,
    float8,
    numbers_of_float8,
    packed_bits,
    read,
)
from worker.checkpoint.checkpoint_files import StoredTensor, WeightFile, loaded_bytes
from worker.quantized.formats import read_rules
from worker.quantized.scheme import QuantizationRefused


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


MXFP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "mxfp8", "scale_fmt": "ue8m0"},
        {"quant_method": "fp8", "weight_block_size": [1, 32]},
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        {"quant_method": "compressed-tensors", "format": "mxfp8-quantized"},
    ],
)
def test_mxfp8_has_an_exponent_of_two_for_32_inputs(random, config, dtype, name):
    if config["quant_method"] == "compressed-tensors":
        config = compressed(config["format"], MXFP8_WEIGHTS)
        name = "weight_scale"
    codes, exponents = float8(random, N, K), random.integers(0, 140, (N, K // 32)).astype(np.uint8)
    tensors = {"weight": codes, name: torch.from_numpy(exponents).view(dtype)}
    spread = 2.0 ** (exponents.astype(float) - 127).repeat(32, 1)
    assert_same(read(config, tensors), numbers_of_float8(codes) * spread)
    exponents[3, 2] = 255
    with pytest.raises(QuantizationRefused, match=f"up_proj.{name} has scales that are not a number"):
        read(config, tensors)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ],
)
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("is_spread", [False, True])
def test_blocks_of_modelopt_have_two_or_four_dimensions_under_either_name(random, config, name, is_spread):
    shape = (200, 320)
    codes, scales = float8(random, *shape), random.uniform(0.1, 1, (2, 3)).astype(np.float32)
    stored = torch.from_numpy(scales)
    tensors = {"weight": codes, name: stored.view(2, 1, 3, 1) if is_spread else stored}
    spread = scales.repeat(128, 0).repeat(128, 1)[: shape[0], : shape[1]]
    assert_same(read(config, tensors, shape), numbers_of_float8(codes).astype(np.float32) * spread)


@pytest.mark.parametrize("scales", [(), (1,), (256, 1), (2, 3), (2, 1, 3, 1)])
def test_scales_are_foreseen_in_the_memory_that_they_take(random, scales):
    tensors = {"weight": float8(random, 256, 384), "weight_scale": torch.ones(scales)}
    held = read({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, tensors, (256, 384)).num_bytes
    dtypes = {"weight": "F8_E4M3", "weight_scale": "F32"}
    stored = {
        f"up_proj.{name}": StoredTensor(dtypes[name], tuple(each.shape), each.nbytes)
        for name, each in tensors.items()
    }
    assert loaded_bytes([WeightFile(Path("a"), 0, stored)], "bfloat16").codes == held


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
GROUPS = [
    ("nvfp4-pack-quantized", NVFP4),
    *(
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": each})
        for each in ("channel", "tensor")
    ),
    *(
        (
            "pack-quantized",
            {**INT4, "num_bits": bits, "group_size": size, "symmetric": is_symmetric},
        )
        for bits in (4, 8)
        for size in (32, 64)
        for is_symmetric in (True, False)
    ),
    ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
]


def tensors_of(random: np.random.Generator, layout: str, weights: dict) -> dict[str, torch.Tensor]:
    if layout == "nvfp4-pack-quantized":
        return {
            "weight_packed": torch.from_numpy(random.integers(0, 256, (N, K // 2)).astype(np.uint8)),
            "weight_scale": float8(random, N, K // 16),
            "weight_global_scale": torch.tensor([640.0]),
        }
    if layout != "pack-quantized":
        bytes_NK = torch.from_numpy(random.integers(-128, 128, (N, K)).astype(np.int8))
        codes = float8(random, N, K) if weights["type"] == "float" else bytes_NK
        return {
            "weight": codes,
            "weight_scale": torch.rand((N, 1) if weights["strategy"] == "channel" else 1) + 0.1,
        }
    bits, size = weights["num_bits"], weights["group_size"]
    packed = {
        "weight_packed": packed_bits(random.integers(0, 1 << bits, (N, K)), bits),
        "weight_scale": torch.rand(N, K // size) + 0.1,
        "weight_shape": torch.tensor([N, K]),
    }
    if not weights["symmetric"]:
        zeros = packed_bits(random.integers(0, 1 << bits, (K // size, N)), bits)
        packed["weight_zero_point"] = zeros.T.contiguous()
    return packed


def test_groups_of_compressed_tensors_are_told_apart_by_what_is_stored(random):
    """Expressions of groups overlap in published files, so that they say nothing here."""
    alone = [compressed(layout, weights) for layout, weights in GROUPS]
    groups = {
        f"group_{number}": each["config_groups"]["group_0"] | {"format": each["format"]}
        for number, each in enumerate(alone)
    }
    together = compressed("mixed-precision", NVFP4) | {"config_groups": groups}
    for config, group in zip(alone, GROUPS, strict=True):
        tensors = tensors_of(random, *group)
        assert torch.equal(read(together, tensors).dequantized(), read(config, tensors).dequantized())
    tensors = tensors_of(random, *GROUPS[0])
    del tensors["weight_global_scale"]
    with pytest.raises(QuantizationRefused, match=r"up_proj.weight_global_scale is missing"):
        read(together, tensors)
    tensors = tensors_of(random, *GROUPS[1])
    tensors["weight"].view(torch.uint8)[0, 0] = 0x7F
    with pytest.raises(QuantizationRefused, match=r"up_proj.weight has codes that are not a number"):
        read(together, tensors)


def test_zero_points_that_are_all_0_are_no_symmetry(random):
    weights = INT4 | {"symmetric": True}
    config = compressed("pack-quantized", weights)
    config["config_groups"]["group_1"] = {"targets": ["Linear"], "weights": INT4}
    codes, scales = random.integers(0, 16, (N, K)), torch.rand(N, K // 64) + 0.1
    tensors = {
        "weight_packed": packed_bits(codes, 4),
        "weight_scale": scales,
        "weight_shape": torch.tensor([N, K]),
        "weight_zero_point": torch.zeros(N // 8, K // 64, dtype=torch.int32),
    }
    assert_same(read(config, tensors), codes * scales.double().numpy().repeat(64, 1))


def test_a_config_of_more_ways_than_a_file_can_have_is_refused():
    """Each weight would be tried in all of them."""
    groups = {f"group_{size}": {"weights": INT4 | {"group_size": size}} for size in range(1, 66)}
    with pytest.raises(QuantizationRefused, match=r"65 ways of storing weights; take .* 64 at most"):
        read_rules(compressed("pack-quantized", INT4) | {"config_groups": groups})
