"""Readers against the packages that write these formats, where they are installed."""

import pytest
import torch

from worker.quantized.formats import read_rules
from worker.quantized.grouped_weight import GroupedWeight
from worker.quantized.scheme import ModuleTensors

N, K = 40, 256


def random(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) + 0.25


def codes(lowest: int, highest: int, *shape: int) -> torch.Tensor:
    return torch.randint(lowest, highest, shape, generator=torch.Generator().manual_seed(lowest))


def read(layout: str, weights: dict, tensors: dict) -> GroupedWeight:
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    reader = read_rules(config).reader_of("up_proj")
    assert reader is not None
    return reader.read(ModuleTensors("up_proj", tensors), (N, K))


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
FLOAT8 = {"num_bits": 8, "type": "float"}
CASES = {
    "int4": ("pack-quantized", INT4 | {"symmetric": True}),
    "int4 with zeros": ("pack-quantized", INT4 | {"symmetric": False}),
    "int8 packed": ("pack-quantized", INT4 | {"num_bits": 8, "symmetric": False}),
    "int4 by channel": ("pack-quantized", INT4 | {"strategy": "channel", "group_size": None}),
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "float8": ("float-quantized", FLOAT8 | {"strategy": "channel"}),
    "float8 by blocks": ("float-quantized", FLOAT8 | {"strategy": "block", "block_structure": [128, 128]}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_compressed_tensors_own_decompressor_gives_the_same_weight(name):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationScheme

    layout, weights = CASES[name]
    size = weights.get("group_size") or K
    tensors: dict[str, torch.Tensor] = {"weight_scale": random(N, K // size).bfloat16()}
    if layout == "pack-quantized":
        half = 1 << (weights["num_bits"] - 1)
        packed = pack_to_int32(codes(-half, half, N, K).to(torch.int8), weights["num_bits"])
        tensors |= {"weight_packed": packed, "weight_shape": torch.tensor([N, K])}
        if not weights.get("symmetric", True):
            zeros = codes(-half, half, N, K // size).to(torch.int8)
            tensors["weight_zero_point"] = pack_to_int32(zeros, weights["num_bits"], packed_dim=0)
    elif layout == "nvfp4-pack-quantized":
        tensors["weight_packed"] = codes(0, 256, N, K // 2).to(torch.uint8)
        tensors["weight_scale"] = (random(N, K // 16) * 100).to(torch.float8_e4m3fn)
        tensors["weight_global_scale"] = torch.tensor([512.0])
    elif weights["type"] == "int":
        tensors["weight"] = codes(-128, 128, N, K).to(torch.int8)
    else:
        tensors["weight"] = (random(N, K) * 100).to(torch.float8_e4m3fn)
        if weights["strategy"] == "block":
            tensors["weight_scale"] = random(1, 2).bfloat16()
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    expected = BaseCompressor.get_value_from_registry(layout).decompress(dict(tensors), scheme)["weight"]
    found = read(layout, weights, tensors).dequantized()
    assert torch.equal(found.to(expected.dtype), expected)


def test_transformers_dequantizes_the_experts_of_mxfp4_to_the_same_weights():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = codes(0, 256, 3, N, K // 32, 16).to(torch.uint8), codes(120, 132, 3, N, K // 32)
    expected = convert_moe_packed_tensors(blocks, scales.to(torch.uint8), dtype=torch.float32)
    for expert in range(3):
        tensors = {"blocks": blocks[expert], "scales": scales[expert].to(torch.uint8)}
        assert torch.equal(read_module({"quant_method": "mxfp4"}, tensors), expected[expert].T)


def read_module(config: dict, tensors: dict) -> torch.Tensor:
    stored = ModuleTensors("up_proj", tensors)
    reader = read_rules(config).reader_of("up_proj")
    assert reader is not None
    found = reader.read(stored, (N, K))
    stored.refuse_unread()
    return found.dequantized()


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_bitsandbytes_dequantizes_its_four_bits_to_the_same_weight(kind, is_nested):
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(
        random(N, K) - 0.7, blocksize=64, quant_type=kind, compress_statistics=is_nested
    )
    tensors = {f"weight.{name}": each for name, each in state.as_dict(packed=True).items()}
    found = read_module({"quant_method": "bitsandbytes"}, {"weight": codes, **tensors})
    assert torch.equal(found, functional.dequantize_4bit(codes, state))


def test_bitsandbytes_int8_state_is_read_to_the_same_weight():
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, largest, _ = functional.int8_vectorwise_quant((random(N, K) - 0.7).half())
    found = read_module({"quant_method": "bitsandbytes"}, {"weight": codes, "SCB": largest})
    # It multiplies by a rounded 1 / 127.
    assert torch.allclose(found, functional.int8_vectorwise_dequant(codes, largest), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["Float8WeightOnlyConfig", "Int8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_torchao_dequantizes_what_it_flattens_to_the_same_weight(name):
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    chosen = getattr(quantization, name)()
    model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(K, N, bias=False, dtype=torch.bfloat16)})
    quantization.quantize_(model, chosen)
    tensors, _ = flatten_tensor_state_dict(model.state_dict())
    config = {"quant_method": "torchao", "quant_type": {"default": config_to_dict(chosen)}}
    found = read_module(config, {key.removeprefix("up_proj."): each for key, each in tensors.items()})
    assert torch.equal(found.bfloat16(), model["up_proj"].weight.dequantize())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, whose kernel packs the words")
def test_torch_packs_the_tiles_that_torchao_stores_in_the_same_order():
    from worker.quantized.torchao import _codes_of_tiles

    numbers = codes(0, 16, 64, 1024)
    pairs = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)
    words = torch.ops.aten._convert_weight_to_int4pack(pairs.cuda(), 8)
    assert torch.equal(_codes_of_tiles(words.cpu()).long(), numbers)


def test_cut_and_merged_weights_are_those_of_the_dequantized_weight():
    from tests.worker.quantized.random_weights import KINDS, random_weight
    from worker.quantized.grouped_weight import merged

    for kind in KINDS:
        one, other = random_weight(kind, 24, 128, 32), random_weight(kind, 40, 128, 64, seed=2)
        both = merged([one, other])
        assert torch.equal(both.dequantized(), torch.cat([one.dequantized(), other.dequantized()]))
        assert torch.equal(both.outputs(slice(24, 64)).dequantized(), other.dequantized())
        assert torch.equal(both.inputs(32, 96).dequantized(), both.dequantized()[:, 32:96])
        assert torch.equal(both.inputs(16, 64).dequantized(), both.dequantized()[:, 16:64])
        with pytest.raises(ValueError, match="are none of"):
            both.inputs(16, 160)
    with pytest.raises(ValueError, match="different kinds"):
        merged([random_weight("signed", 8, 64, 32), random_weight("e2m1", 8, 64, 32)])
    mixed = [random_weight("signed", 8, 64, 32), random_weight("unsigned", 8, 64, 32)]
    expected = torch.cat([each.dequantized() for each in mixed])
    assert torch.allclose(merged(mixed).dequantized(), expected, atol=1e-5)
