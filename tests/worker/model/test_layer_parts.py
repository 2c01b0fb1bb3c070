"""Layers and their parts, found in models of transformers."""

from typing import Any

import pytest
from torch import nn
from transformers import AutoModelForCausalLM

from tests.families import Family
from tests.worker.family_trial import tiny_config
from worker.model.layer_parts import GatedMlp, TakenWeights, Unrecognised, find_layers, find_parts

TAKEN = TakenWeights(formats=frozenset({"float32"}), size_multiple=1)


def build(model_type: str, **settings: Any) -> nn.Module:
    config = tiny_config(Family(model_type=model_type, settings=settings))
    model: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    return model


HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}


@pytest.mark.parametrize(
    ("model_type", "settings", "prefix"),
    [
        ("llama", {}, "model.layers"),
        ("gpt2", {}, "transformer.h"),
        ("qwen3_5_text", HYBRID, "model.layers"),
        ("mamba2", {"num_heads": 8, "head_dim": 16}, "backbone.layers"),
    ],
)
def test_layers_are_found_by_their_norms_whatever_mixes_tokens_in_them(
    model_type: str, settings: dict[str, Any], prefix: str
) -> None:
    layers = find_layers(build(model_type, **settings))
    assert list(layers) == [f"{prefix}.{place}" for place in range(3)]


@pytest.mark.parametrize("name", ["self_attn", "attention", "mixer"])
def test_the_mixer_is_the_module_that_is_left_beside_norms_and_mlp(name: str) -> None:
    layer: Any = next(iter(find_layers(build("qwen3")).values()))
    mixer = layer.self_attn
    del layer.self_attn
    layer.add_module(name, mixer)
    parts = find_parts(layer, TAKEN)
    assert parts.linear_names.query_key_value == (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
    assert parts.linear_names.attention_output == f"{name}.o_proj"
    assert parts.mixer.query_norm is not None
    assert isinstance(parts.mlp, GatedMlp)


def test_a_layer_with_a_second_mixer_is_not_recognised() -> None:
    layer: Any = next(iter(find_layers(build("llama")).values()))
    layer.add_module("mamba", nn.Linear(4, 4))
    with pytest.raises(Unrecognised, match="it consists of self_attn, mlp"):
        find_parts(layer, TAKEN)
