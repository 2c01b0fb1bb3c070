"""Modules that a quantization_config means, and configurations that are refused."""

import pytest

from worker.quantized.bitsandbytes import BitsAndBytesRules
from worker.quantized.formats import read_rules
from worker.quantized.gptq import GptqReader
from worker.quantized.scheme import QuantizationRefused, find_reader

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
PACKED = frozenset({"weight_packed", "weight_scale", "weight_shape"})
Q_PROJ = "model.layers.0.self_attn.q_proj"


def compressed(**changes: object) -> dict:
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
        "ignore": ["lm_head"],
    }
    return config | changes


def test_tensors_and_no_lists_say_which_modules_are_of_codes():
    plain = frozenset({"weight"})
    for rules in (
        read_rules(compressed(ignore=[Q_PROJ, "re:(", 3])),
        read_rules(compressed(config_groups={"g": {"targets": ["re:other.*"], "weights": INT4}})),
        read_rules({"quant_method": "fp8", "modules_to_not_convert": [Q_PROJ, "model"]}),
        read_rules({"quant_method": "gptq", "dynamic": {f"-:{Q_PROJ}": {}}}),
        read_rules({"quant_method": "auto-round", "extra_config": {Q_PROJ: {"bits": 16}}}),
    ):
        assert find_reader(rules, Q_PROJ, PACKED) is not None
        assert find_reader(rules, "lm_head", plain) is None


def test_older_and_other_writers_of_a_format_are_known():
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64}
    for version in ({}, {"version": None}, {"version": "GEMM"}, {"checkpoint_format": "gemm"}):
        assert read_rules(awq | version) == read_rules(awq | {"version": "gemm"})
    for size in ("load_in_4bit", "load_in_8bit"):
        assert isinstance(read_rules({size: True, "bnb_4bit_quant_type": "nf4"}), BitsAndBytesRules)


@pytest.mark.parametrize("groups", [{}, {"group_0": {"targets": ["LlamaAttention"], "weights": None}}])
def test_a_config_about_keys_and_values_alone_leaves_weights_plain(groups):
    rules = read_rules(compressed(config_groups=groups, kv_cache_scheme={"num_bits": 8}))
    assert find_reader(rules, Q_PROJ, frozenset({"weight", "k_scale"})) is None
    with pytest.raises(QuantizationRefused, match=r"q_proj.weight_packed is quantized, and .* not say how"):
        find_reader(rules, Q_PROJ, PACKED)


def test_gptq_takes_exceptions_by_module():
    dynamic = {r"-:.*\.down_proj": {}, r"+:.*\.q_proj": {"bits": 8, "group_size": 32}}
    rules = read_rules({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic})
    assert rules.reader_of(Q_PROJ) == GptqReader(8, 32, "gptq", is_symmetric=False)
    usual = GptqReader(4, 128, "gptq", is_symmetric=False)
    for name in ("self_attn.k_proj", "mlp.down_proj"):
        assert rules.reader_of(f"model.layers.0.{name}") == usual


def test_auto_round_has_settings_for_single_modules():
    other = {
        "model.layers.0.self_attn.k_proj": {"bits": 8},
        Q_PROJ: {"bits": 16, "data_type": "float"},
        r".*mlp\.gate.*": {"bits": 16},
        r".*mlp\..*": {"group_size": 32},
    }
    rules = read_rules(
        {"quant_method": "intel/auto-round", "bits": 4, "group_size": 128, "extra_config": other}
    )
    assert rules.reader_of("model.layers.0.mlp.up_proj") == GptqReader(4, 32, "gptq", is_symmetric=True)
    assert rules.reader_of("model.layers.0.self_attn.k_proj").bits == 8
    assert rules.reader_of("lm_head") == GptqReader(4, 128, "gptq", is_symmetric=True)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"quant_method": "hqq"},
            "quantized by 'hqq'; take one of auto-round, awq, bitsandbytes, compressed-tensors, fp8, gguf",
        ),
        ("int8", "quantized and names no method"),
        ({"group_size": 64, "bits": 4}, "as files of MLX do not"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv"),
        ({"quant_method": "awq", "bits": 4, "checkpoint_format": "gemv_fast"}, "version gemv_fast"),
        ({"quant_method": "gptq", "bits": 3}, "codes of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, r"pattern '\('"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": "x"},
            "quantization_config of gptq cannot be read: invalid literal",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ({"quant_method": "fp8", "scale_fmt": "ue4m3"}, "scale_fmt ue4m3"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt W4A8_AWQ; take one of FP8"),
        (
            {
                "quant_method": "auto-round",
                "packing_format": "auto_round:llm_compressor",
                "data_type": "mx_fp",
            },
            "packing_format auto_round:llm_compressor and data_type mx_fp",
        ),
        ({"quant_method": "auto-round", "bits": 3}, "codes of 3 bits"),
        ({"quant_method": "auto-round", "extra_config": {"(": {"bits": 8}}}, r"pattern '\('"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "quant_type int4_weight_only"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (compressed(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
        (compressed(config_groups={"W4A16": ["Linear"]}), "no config_groups"),
        (
            compressed(config_groups={"g": {"targets": ["Linear"], "weights": INT4 | {"num_bits": 3}}}),
            "g has weights int of 3 bits in pack-quantized; take a checkpoint with int of 4 or 8",
        ),
        (
            compressed(config_groups={"g": {"targets": ["Linear"], "weights": INT4 | {"group_size": None}}}),
            "g has strategy group",
        ),
    ],
)
def test_what_is_not_supported_is_refused_in_a_line_that_says_what_is(config, text):
    with pytest.raises(QuantizationRefused, match=text) as caught:
        read_rules(config)
    assert "\n" not in str(caught.value)
