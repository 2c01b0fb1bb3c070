"""Modules that a quantization_config means, and configurations that are refused."""

import pytest

from worker.quantized.compressed_tensors import ByteReader, PackedReader
from worker.quantized.formats import read_rules
from worker.quantized.gptq import GptqReader
from worker.quantized.scheme import QuantizationRefused, find_reader

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
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


def test_a_class_means_every_module_of_it_that_is_not_ignored():
    rules = read_rules(compressed(ignore=["lm_head", "re:.*mlp.gate$"]))
    assert find_reader(rules, Q_PROJ, PACKED) is not None
    plain = frozenset({"weight"})
    assert find_reader(rules, "lm_head", plain) is None
    assert find_reader(rules, "model.layers.3.mlp.gate", plain) is None
    assert find_reader(rules, "model.embed_tokens", plain, class_name="Embedding") is None
    assert find_reader(rules, "model.layers.3.mlp.gate_proj", PACKED) is not None


def test_a_name_goes_before_a_regular_expression_and_that_before_a_class():
    groups = {
        "group_0": {"targets": ["Linear"], "weights": INT4},
        "group_1": {"targets": ["re:.*q_proj"], "weights": INT4 | {"num_bits": 8}},
        "group_2": {"targets": [Q_PROJ], "weights": INT8, "format": "int-quantized"},
    }
    rules = read_rules(compressed(config_groups=groups))
    bits = {}
    for name in ("k_proj", "q_proj"):
        reader = rules.reader_of(f"model.layers.1.self_attn.{name}", "Linear")
        assert isinstance(reader, PackedReader)
        bits[name] = reader.bits
    assert bits == {"k_proj": 4, "q_proj": 8}
    assert isinstance(rules.reader_of(Q_PROJ, "Linear"), ByteReader)


def test_a_regular_expression_begins_at_the_start_of_the_name():
    groups = {"group_0": {"targets": ["re:self_attn.*"], "weights": INT4}}
    assert read_rules(compressed(config_groups=groups)).reader_of(Q_PROJ, "Linear") is None


def test_rules_and_tensors_must_agree():
    rules = read_rules(compressed())
    with pytest.raises(QuantizationRefused, match=r"names model.*q_proj, but its tensors are weight"):
        find_reader(rules, Q_PROJ, frozenset({"weight"}))
    with pytest.raises(QuantizationRefused, match=r"lm_head.weight_packed is quantized, but"):
        find_reader(rules, "lm_head", PACKED)


def test_gptq_takes_exceptions_by_module():
    dynamic = {r"-:.*\.down_proj": {}, r"+:.*\.q_proj": {"bits": 8, "group_size": 32}}
    rules = read_rules({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic})
    assert rules.reader_of("model.layers.0.mlp.down_proj", "Linear") is None
    assert rules.reader_of(Q_PROJ, "Linear") == GptqReader(8, 32, "gptq", is_symmetric=False)
    assert rules.reader_of("model.layers.0.self_attn.k_proj", "Linear") == GptqReader(
        4, 128, "gptq", is_symmetric=False
    )
    assert find_reader(rules, "lm_head", frozenset({"weight"})) is None


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
    found = {
        name: rules.reader_of(f"model.layers.0.{name}", "Linear") for name in ("mlp.gate", "mlp.up_proj")
    }
    assert found == {"mlp.gate": None, "mlp.up_proj": GptqReader(4, 32, "gptq", is_symmetric=True)}
    assert rules.reader_of(Q_PROJ, "Linear") is None
    assert rules.reader_of("model.layers.0.self_attn.k_proj", "Linear").bits == 8
    assert rules.reader_of("lm_head", "Linear") == GptqReader(4, 128, "gptq", is_symmetric=True)


def test_fp8_excludes_modules_their_children_and_ends_of_names():
    config = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.1", "mlp.gate"],
    }
    rules = read_rules(config)
    excluded = ("lm_head", "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.gate")
    assert [rules.reader_of(name, "Linear") for name in excluded] == [None] * 3
    for name in ("model.layers.11.self_attn.q_proj", "model.layers.0.mlp.gate_proj"):
        assert rules.reader_of(name, "Linear") is not None


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"quant_method": "hqq"},
            "quantized by 'hqq'; take one of auto-round, awq, bitsandbytes, compressed-tensors, fp8, gguf",
        ),
        ("int8", "quantized by None"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv"),
        ({"quant_method": "gptq", "bits": 3}, "codes of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:(": {}}}, r"pattern '-:\('"),
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
        ({"quant_method": "auto-round", "extra_config": {"(": {"bits": 16}}}, r"pattern '\('"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "quant_type int4_weight_only"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (compressed(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
        (compressed(config_groups={"W4A16": ["Linear"]}), "no config_groups"),
        (compressed(ignore=["re:("]), r"ignore: 're:\(' is no regular expression"),
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
