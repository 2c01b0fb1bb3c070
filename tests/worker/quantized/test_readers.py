"""Every format's tensors against its definition, written once more in numpy, from random codes."""

import json
import math

import numpy as np
import pytest
import torch

from worker.quantized.formats import read_rules
from worker.quantized.grouped_weight import GroupedWeight
from worker.quantized.scheme import ModuleTensors, QuantizationRefused, find_reader

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
N, K = 40, 256
NAME = "model.layers.0.mlp.up_proj"


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


def read(config: dict, tensors: dict, shape: tuple[int, int] = (N, K)) -> GroupedWeight:
    reader = find_reader(read_rules(config), NAME, frozenset(tensors))
    assert reader is not None
    return reader.read(ModuleTensors(NAME, tensors), shape)


def packed_bits(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Along the last dimension, the lowest bits first."""
    per_word = 32 // bits
    rest = -codes.shape[-1] % per_word
    padded = np.pad(codes, ((0, 0), (0, rest))).astype(np.uint64).reshape(len(codes), -1, per_word)
    words = sum(padded[:, :, i] << np.uint64(bits * i) for i in range(per_word))
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def halves(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.uniform(0.01, 0.1, shape).astype(np.float16)


def assert_same(found: GroupedWeight, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(found.dequantized().numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("size", [32, 128, -1])
def test_awq(random, size):
    groups = K // (K if size == -1 else size)
    codes, zeros = random.integers(0, 16, (K, N)), random.integers(0, 16, (groups, N))
    scales = halves(random, groups, N)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    shuffled = [each.reshape(len(each), -1, 8)[:, :, order].reshape(len(each), -1) for each in (codes, zeros)]
    tensors = {
        "qweight": packed_bits(shuffled[0], 4),
        "qzeros": packed_bits(shuffled[1], 4),
        "scales": torch.from_numpy(scales),
    }
    found = read({"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}, tensors)
    times = K // groups
    expected = (codes - zeros.repeat(times, 0)) * scales.repeat(times, 0).astype(np.float64)
    assert_same(found, expected.T)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("is_permuted", [False, True])
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_gptq(random, bits, version, is_permuted, is_symmetric):
    size, highest = 64, 1 << bits
    groups = K // size
    g_idx = np.arange(K) // size
    if is_permuted:
        g_idx = random.permutation(g_idx)
    codes = random.integers(0, highest, (K, N))
    stored = random.integers(0, highest, (groups, N))  # of no meaning where `sym` is true
    stored[:, ::5] = 0
    zeros = np.full((groups, N), highest // 2) if is_symmetric else stored
    scales = halves(random, groups, N)
    # The first version takes one off all zeros of a word by one subtraction, which borrows where one is 0.
    ones = packed_bits(np.ones((groups, N), int), bits) if version == "gptq" else 0
    tensors = {
        "qweight": packed_bits(codes.T, bits).T.contiguous(),
        "qzeros": packed_bits(stored, bits) - ones,
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(g_idx.astype(np.int32)),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "checkpoint_format": version}
    found = read(config | {"sym": is_symmetric}, tensors)
    assert_same(found, ((codes - zeros[g_idx]) * scales[g_idx].astype(np.float64)).T)
    assert (found.permutation_K is not None) == is_permuted
    assert (found.offsets_NG is None) == is_symmetric


def float8(random: np.random.Generator, *shape: int) -> torch.Tensor:
    raw = random.integers(0, 127, shape) + 128 * random.integers(0, 2, shape)
    return torch.from_numpy(raw.astype(np.uint8)).view(torch.float8_e4m3fn)


def numbers_of_float8(codes: torch.Tensor) -> np.ndarray:
    raw = codes.view(torch.uint8).numpy().astype(int)
    exponent, mantissa = raw >> 3 & 15, raw & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.where(raw & 128, -size, size)


@pytest.mark.parametrize("shape", [(N, K), (200, 320), (136, 192)])
def test_fp8_by_blocks_of_which_the_last_may_be_short(random, shape):
    codes = float8(random, *shape)
    scales = random.uniform(0.1, 1, [-(-each // 128) for each in shape]).astype(np.float32)
    tensors = {"weight": codes, "weight_scale_inv": torch.from_numpy(scales)}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    spread = scales.repeat(128, 0).repeat(128, 1)[: shape[0], : shape[1]]
    expected = numbers_of_float8(codes).astype(np.float32) * spread
    assert_same(read(config, tensors, shape), expected)


@pytest.mark.parametrize("is_stored_as_exponents", [False, True])
def test_fp8_by_blocks_with_powers_of_two(random, is_stored_as_exponents):
    codes, exponents = float8(random, N, K), random.integers(120, 132, (1, 2)).astype(np.uint8)
    scales = 2.0 ** (exponents.astype(np.float32) - 127)
    stored = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
    tensors = {
        "weight": codes,
        "weight_scale_inv": stored if is_stored_as_exponents else torch.from_numpy(scales),
    }
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    assert_same(read(config, tensors), numbers_of_float8(codes) * scales.repeat(128, 1))
    exponents[0, 1] = 255
    tensors["weight_scale_inv"] = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
    with pytest.raises(QuantizationRefused, match="weight_scale_inv has scales that are not a number"):
        read(config, tensors)


@pytest.mark.parametrize("block", [None, [128, 128]])
def test_fp8_with_one_scale(random, block):
    codes = float8(random, N, K)
    tensors = {"weight": codes, "weight_scale": torch.tensor(0.25)}
    config = {"quant_method": "fp8", "weight_block_size": block}
    assert_same(read(config, tensors), numbers_of_float8(codes) / 4)


def powers(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.integers(100, 140, shape).astype(np.uint8)


def test_the_experts_of_mxfp4(random):
    blocks, exponents = random.integers(0, 256, (N, K // 32, 16)), powers(random, N, K // 32)
    tensors = {
        "blocks": torch.from_numpy(blocks.astype(np.uint8)),
        "scales": torch.from_numpy(exponents),
    }
    numbers = E2M1[np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(N, K // 32, 32)]
    expected = (numbers * 2.0 ** (exponents.astype(float) - 127)[..., None]).reshape(N, K)
    for shape in ((N, K // 32, 16), (N, K // 2)):
        stored = ModuleTensors(NAME, tensors | {"blocks": tensors["blocks"].view(shape)})
        assert_same(read_rules({"quant_method": "mxfp4"}).reader_of(NAME).read(stored, (N, K)), expected)


def compressed(layout: str, weights: dict) -> dict:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("strategy", "size"), [("group", 32), ("group", 128), ("channel", None)])
@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("num_outputs", [40, 37])
def test_compressed_tensors_pack_quantized(random, bits, strategy, size, is_symmetric, num_outputs):
    groups, middle = 1 if size is None else K // size, 1 << (bits - 1)
    codes = random.integers(0, 2 * middle, (num_outputs, K))
    zeros = random.integers(0, 2 * middle, (num_outputs, groups))
    scales = torch.from_numpy(random.uniform(0.01, 0.1, (num_outputs, groups))).bfloat16()
    tensors = {
        "weight_packed": packed_bits(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([num_outputs, K]),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = packed_bits(zeros.T, bits).T.contiguous()
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": is_symmetric}
    found = read(compressed("pack-quantized", weights | {"group_size": size}), tensors, (num_outputs, K))
    lowered = codes - (middle if is_symmetric else zeros.repeat(K // groups, 1))
    assert_same(found, lowered * scales.double().numpy().repeat(K // groups, 1))


@pytest.mark.parametrize("shape", [(N, 1), (1,), ()])
def test_compressed_tensors_int_quantized(random, shape):
    codes = torch.from_numpy(random.integers(-128, 128, (N, K)).astype(np.int8))
    scales = torch.from_numpy(random.uniform(0.01, 0.1, shape)).bfloat16()
    weights = {"num_bits": 8, "type": "int", "strategy": "channel" if shape == (N, 1) else "tensor"}
    found = read(compressed("int-quantized", weights), {"weight": codes, "weight_scale": scales})
    assert_same(found, codes.numpy() * scales.double().numpy())


def test_compressed_tensors_float_quantized(random):
    codes, scales = float8(random, N, K), torch.from_numpy(random.uniform(0.1, 1, (N, 1))).bfloat16()
    tensors = {"weight": codes, "weight_scale": scales}
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    expected = numbers_of_float8(codes) * scales.double().numpy()
    assert_same(read(compressed("float-quantized", weights), tensors), expected)
    tensors["weight_scale"] = torch.from_numpy(random.uniform(0.1, 1, (1, 2))).bfloat16()
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    expected = numbers_of_float8(codes) * tensors["weight_scale"].double().numpy().repeat(128, 1)
    assert_same(read(compressed("float-quantized", weights), tensors), expected)


def test_compressed_tensors_nvfp4(random):
    codes, scales = random.integers(0, 256, (N, K // 2)), float8(random, N, K // 16)
    tensors = {
        "weight_packed": torch.from_numpy(codes.astype(np.uint8)),
        "weight_scale": scales,
        "weight_global_scale": torch.tensor([640.0]),
    }
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    numbers = E2M1[np.stack((codes & 15, codes >> 4), axis=-1).reshape(N, K)]
    spread = (numbers_of_float8(scales).astype(np.float32) / np.float32(640)).repeat(16, 1)
    expected = numbers.astype(np.float32) * spread
    assert_same(read(compressed("nvfp4-pack-quantized", weights), tensors), expected)


def test_compressed_tensors_mxfp4(random):
    codes, exponents = random.integers(0, 256, (N, K // 2)), powers(random, N, K // 32)
    tensors = {
        "weight_packed": torch.from_numpy(codes.astype(np.uint8)),
        "weight_scale": torch.from_numpy(exponents),
    }
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    numbers = E2M1[np.stack((codes & 15, codes >> 4), axis=-1).reshape(N, K)]
    spread = 2.0 ** (exponents.astype(float) - 127).repeat(32, 1)
    assert_same(read(compressed("mxfp4-pack-quantized", weights), tensors), numbers * spread)


def gptq_tensors() -> dict[str, torch.Tensor]:
    return {
        "qweight": torch.zeros((K // 8, N), dtype=torch.int32),
        "qzeros": torch.zeros((2, N // 8), dtype=torch.int32),
        "scales": torch.ones((2, N), dtype=torch.float16),
        "g_idx": torch.arange(K, dtype=torch.int32) // 128,
    }


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("qweight", lambda found: found[:-1], r"up_proj.qweight is \[31, 40\]; .*\[32, 40\]"),
        ("scales", lambda found: found[:1], r"up_proj.scales is \[1, 40\]"),
        ("qzeros", lambda found: found.long(), r"up_proj.qzeros is int64; .*int32"),
        ("g_idx", lambda found: found * 0, r"up_proj.g_idx has groups that are not of 128 inputs"),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_is_refused_by_name(name, change, text):
    tensors = gptq_tensors()
    tensors[name] = change(tensors[name])
    with pytest.raises(QuantizationRefused, match=text):
        read({"quant_method": "gptq", "bits": 4, "group_size": 128}, tensors)


def test_a_missing_tensor_is_refused_by_name():
    tensors = gptq_tensors()
    del tensors["scales"]
    with pytest.raises(QuantizationRefused, match=r"up_proj.scales is missing"):
        read({"quant_method": "gptq", "bits": 4, "group_size": 128}, tensors)


def test_codes_that_are_not_a_number_are_refused():
    codes = torch.zeros((N, K), dtype=torch.uint8)
    codes[3, 7] = 0xFF
    tensors = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": torch.tensor(1.0)}
    with pytest.raises(QuantizationRefused, match=r"up_proj.weight has codes that are not a number"):
        read({"quant_method": "fp8"}, tensors)


def test_memory_is_that_of_the_codes_and_scales():
    found = read({"quant_method": "gptq", "bits": 4, "group_size": 128}, gptq_tensors())
    assert found.num_bytes == N * K // 2 + 2 * N * 2 * 4  # codes; float32 scales and offsets
    assert math.prod(found.shape) == N * K


def test_modelopt_nvfp4_multiplies_by_its_second_scale(random):
    codes, scales = random.integers(0, 256, (N, K // 2)), float8(random, N, K // 16)
    tensors = {
        "weight": torch.from_numpy(codes.astype(np.uint8)),
        "weight_scale": scales,
        "weight_scale_2": torch.tensor(0.0021),
        "input_scale": torch.tensor(3.0),
    }
    numbers = E2M1[np.stack((codes & 15, codes >> 4), axis=-1).reshape(N, K)]
    spread = (numbers_of_float8(scales).astype(np.float32) * np.float32(0.0021)).repeat(16, 1)
    for algorithm in ("NVFP4", "MIXED_PRECISION"):
        config = {"quant_method": "modelopt", "quant_algo": algorithm}
        assert_same(read(config, tensors), numbers.astype(np.float32) * spread)


@pytest.mark.parametrize("shape", [(), (1,), (N,), (N, 1)])
def test_modelopt_fp8_has_a_scale_for_the_weight_or_for_each_output(random, shape):
    codes, scales = float8(random, N, K), random.uniform(0.1, 1, shape)
    tensors = {"weight": codes, "weight_scale": torch.tensor(scales, dtype=torch.float32)}
    expected = numbers_of_float8(codes) * tensors["weight_scale"].double().numpy().reshape(-1, 1)
    assert_same(read({"quant_method": "modelopt", "quant_algo": "FP8"}, tensors), expected)
    assert_same(read({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, tensors), expected)


@pytest.mark.parametrize("packing", ["auto_round", "auto_round:auto_gptq", "auto_round:auto_awq"])
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_auto_round_packs_as_gptq_or_awq_do(random, packing, is_symmetric):
    codes, scales = random.integers(0, 16, (K, N)), halves(random, K // 64, N)
    zeros = np.full((K // 64, N), 8) if is_symmetric else random.integers(0, 16, (K // 64, N))
    if packing.endswith("awq"):
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        both = [each.reshape(len(each), -1, 8)[:, :, order].reshape(len(each), -1) for each in (codes, zeros)]
        qweight, qzeros = (packed_bits(each, 4) for each in both)
    else:
        is_first = packing.endswith("gptq")
        qweight, qzeros = packed_bits(codes.T, 4).T.contiguous(), packed_bits(zeros, 4)
        qzeros = qzeros - packed_bits(np.ones_like(zeros), 4) if is_first else qzeros
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": torch.from_numpy(scales)}
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": is_symmetric}
    expected = (codes - zeros.repeat(64, 0)) * scales.repeat(64, 0).astype(np.float64)
    assert_same(read({**config, "packing_format": packing}, tensors), expected.T)


def nibbles_of_bitsandbytes(codes: np.ndarray, blocksize: int, **state: object) -> dict[str, torch.Tensor]:
    """The first code of a byte in the upper bits, all rows behind each other."""
    line = codes.reshape(-1, 2)
    content = json.dumps({"shape": list(codes.shape), "blocksize": blocksize, **state}).encode()
    return {
        "weight": torch.from_numpy((line[:, 0] << 4 | line[:, 1]).astype(np.uint8)).view(-1, 1),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(content), dtype=torch.uint8),
    }


@pytest.mark.parametrize("blocksize", [64, 128, 512])  # one is longer than a row
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_bitsandbytes_looks_its_codes_up(random, blocksize, storage):
    codes, table = random.integers(0, 16, (N, K)), random.uniform(-1, 1, 16).astype(np.float32)
    largest = random.uniform(0.1, 1, -(-N * K // blocksize)).astype(np.float32)
    tensors = nibbles_of_bitsandbytes(codes, blocksize)
    tensors["weight"] = tensors["weight"].view(-1).view(storage).view(-1, 1)
    tensors |= {"weight.absmax": torch.from_numpy(largest), "weight.quant_map": torch.from_numpy(table)}
    expected = table[codes].reshape(-1) * largest[np.arange(N * K) // blocksize]
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert_same(read(config, tensors), expected.reshape(N, K))


def test_bitsandbytes_scales_may_be_codes_themselves(random):
    codes, table = random.integers(0, 16, (N, K)), random.uniform(-1, 1, 16).astype(np.float32)
    places, numbers = random.integers(0, 256, N * K // 16), random.uniform(-1, 1, 256).astype(np.float32)
    largest = random.uniform(0.1, 1, -(-len(places) // 256)).astype(np.float32)
    state = {"nested_blocksize": 256, "nested_offset": 0.5}
    tensors = nibbles_of_bitsandbytes(codes, 16, **state) | {
        "weight.quant_map": torch.from_numpy(table),
        "weight.absmax": torch.from_numpy(places.astype(np.uint8)),
        "weight.nested_absmax": torch.from_numpy(largest),
        "weight.nested_quant_map": torch.from_numpy(numbers),
    }
    scales = numbers[places] * largest[np.arange(len(places)) // 256] + np.float32(0.5)
    expected = table[codes].reshape(-1) * scales.repeat(16)
    assert_same(read({"quant_method": "bitsandbytes"}, tensors), expected.reshape(N, K))


def test_bitsandbytes_int8_has_the_largest_number_of_each_output(random):
    codes = torch.from_numpy(random.integers(-128, 128, (N, K)).astype(np.int8))
    largest = random.uniform(0.1, 9, N).astype(np.float32)
    tensors = {"weight": codes, "SCB": torch.from_numpy(largest), "weight_format": torch.tensor(0).byte()}
    expected = codes.numpy() * (largest / np.float32(127))[:, None]
    assert_same(read({"quant_method": "bitsandbytes"}, tensors), expected)
    tensors["weight_format"] = torch.tensor(1).byte()
    with pytest.raises(QuantizationRefused, match="weight_format is the order of one kind of GPU"):
        read({"quant_method": "bitsandbytes"}, tensors)


TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}


def test_torchao_int4_in_plain_order(random):
    codes = random.integers(-8, 8, (N, K))
    scales, zeros = (torch.from_numpy(random.uniform(0.1, 1, (K // 32, N))).bfloat16() for _ in range(2))
    tensors = {
        "_weight_qdata": torch.from_numpy((codes[:, ::2] & 15 | codes[:, 1::2] << 4).astype(np.int8)),
        "_weight_scale": scales,
        "_weight_zero_point": zeros,
    }
    spread = scales.double().numpy().repeat(32, 0).T
    assert_same(read(TORCHAO, tensors), codes * spread + zeros.double().numpy().repeat(32, 0).T)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(40, 1024), (37, 256), (16, 1536)])
def test_torchao_int4_in_tiles_of_tensor_cores(random, num_outputs, num_inputs):
    rows, columns = -(-num_outputs // 8) * 8, -(-num_inputs // 1024) * 1024
    codes = random.integers(0, 16, (rows, columns))
    scales, zeros = (
        torch.from_numpy(random.uniform(0.1, 1, (columns // 64, rows))).bfloat16() for _ in range(2)
    )
    words = np.zeros((rows // 8, columns // 128, 32, 4), np.uint64)
    for lane in range(32):
        for pair in range(4):
            for place in range(8):
                # Two inputs of a tile, two that are 8 further on, and the same of the next tile.
                inputs = pair * 32 + place // 4 * 16 + place // 2 % 2 * 8 + lane % 4 * 2 + place % 2
                found = codes[lane // 4 :: 8, inputs::128].astype(np.uint64)
                nibble = place // 2 if place % 2 == 0 else 4 + place // 2
                words[:, :, lane, pair] |= found << np.uint64(4 * nibble)
    tensors = {
        "_weight_qdata": torch.from_numpy(words.astype(np.uint32).view(np.int32)),
        "_weight_scale_and_zero": torch.stack((scales, zeros), dim=-1),
    }
    spread = scales.double().numpy().repeat(64, 0).T
    expected = (codes - 8) * spread + zeros.double().numpy().repeat(64, 0).T
    found = read(TORCHAO, tensors, (num_outputs, num_inputs))
    assert_same(found, expected[:num_outputs, :num_inputs])


@pytest.mark.parametrize("shape", [(), (1, 1), (N, 1), (N // 8, K // 64)])
def test_torchao_float8_by_tensor_row_or_block(random, shape):
    codes, scales = float8(random, N, K), random.uniform(0.1, 1, shape)
    tensors = {"_weight_qdata": codes, "_weight_scale": torch.tensor(scales, dtype=torch.float32)}
    by_block = np.atleast_2d(tensors["_weight_scale"].double().numpy())
    spread = by_block.repeat(N // len(by_block), 0).repeat(K // by_block.shape[1], 1)
    assert_same(read(TORCHAO, tensors), numbers_of_float8(codes) * spread)


@pytest.mark.parametrize("has_zeros", [False, True])
def test_torchao_int8_in_groups(random, has_zeros):
    codes = random.integers(-128, 128, (N, K))
    scales = torch.from_numpy(random.uniform(0.1, 1, (N, K // 32))).bfloat16()
    zeros = random.integers(-8, 8, (N, K // 32)) * has_zeros
    tensors = {"_weight_qdata": torch.from_numpy(codes.astype(np.int8)), "_weight_scale": scales}
    if has_zeros:
        tensors["_weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
    expected = (codes - zeros.repeat(32, 1)) * scales.double().numpy().repeat(32, 1)
    assert_same(read(TORCHAO, tensors), expected)


def test_scales_of_torchao_that_divide_nothing_are_refused(random):
    tensors = {"_weight_qdata": float8(random, N, K), "_weight_scale": torch.ones(3, 1)}
    with pytest.raises(QuantizationRefused, match=r"up_proj._weight_scale is \[3, 1\]; .* parts of 40"):
        read(TORCHAO, tensors)
