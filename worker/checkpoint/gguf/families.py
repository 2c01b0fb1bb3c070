"""The families of models that are read from GGUF files: a row for each, and functions where a layout differs.

Owns: the names of their tensors in the file and in transformers' model, and the keys of their configurations.
Source: the names, metadata and orders that llama.cpp's converter writes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.checkpoint.gguf.file import GgufFile
from worker.checkpoint.gguf.layouts import Change
from worker.checkpoint.gguf.settings import (
    deepseek,
    deepseek_changes,
    delta_net,
    exaone4,
    experts_of,
    gemma,
    gemma4,
    glm4_moe,
    gpt_oss,
    gpt_oss_changes,
    granite,
    lfm2,
    lfm2_changes,
    llama4,
    llama4_changes,
    mistral3,
    ones_in_norms,
    pairs_of_llama,
    phi3,
    qwen3_moe,
    qwen3_next_changes,
    qwen35_changes,
)
from worker.worker_errors import StartupError

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")}
_LAYER = _ATTENTION | _MLP | {"ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _stacks(module: str) -> dict[str, str]:
    """Name the stacks of experts: gates and ups become one."""
    return {
        **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"), f"{module}.gate_up_proj"),
        "ffn_down_exps": f"{module}.down_proj",
    }


def _without(names: Mapping[str, str], *others: str) -> dict[str, str]:
    return {name: place for name, place in names.items() if name not in others}


def _shared(module: str) -> dict[str, str]:
    return {f"ffn_{each}_shexp": f"{module}.{each}_proj" for each in ("gate", "up", "down")}


def _nothing(_: GgufFile) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """A family of models; see the module."""

    model_type: str
    names: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    """The model's modules in a layer by the file's names. Names with an ending, and ssm_a, are parameters."""
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    """The same of what is in no layer."""
    changes: Callable[[GgufFile], dict[str, Change]] = _nothing
    """Changes of tensors by the file's names."""
    settings: Callable[[GgufFile], dict[str, Any]] = _nothing
    """Its configuration beyond what all families have."""
    keys: frozenset[str] = frozenset()
    """Keys that it has and most families do not: see config.py."""
    has_optional_bias: bool = False
    """Whether the configuration says that attention has biases."""


def family_of(file: GgufFile) -> GgufFamily:
    """Find a file's family. Raises StartupError for those that are not read."""
    name = file.architecture
    if name == "clip" or file.metadata.get("general.type") in ("mmproj", "adapter", "imatrix"):
        kind = "an adapter" if file.metadata.get("general.type") == "adapter" else "no language model"
        raise StartupError(
            f"{file.path.name} holds {kind} ({file.metadata.get('general.type') or name})",
            fix="name the file of the language model; towers for pictures and sound are not read from GGUF",
        )
    family = FAMILIES.get(name)
    if name == "llama" and file.metadata.get("llama.expert_count"):
        family = _MIXTRAL
    if family is None:
        raise StartupError(
            f"{file.path.name} holds a model of the family {name}",
            fix=f"take a GGUF file of {', '.join(FAMILIES)}, or the model's safetensors",
        )
    return family


_NORMS_BEHIND = {
    **_without(_ATTENTION, "attn_norm"),
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_DELTA_NET = _ATTENTION | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_gate": "linear_attn.in_proj_z",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "ssm_a": "linear_attn.A_log",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_EXPERTS = {
    **_stacks("mlp.experts"),
    **_shared("mlp.shared_expert"),
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_QWEN3_NEXT = {
    **_without(_DELTA_NET, "ssm_alpha", "ssm_beta"),
    **dict.fromkeys(("attn_qkv", "attn_gate", "ssm_in"), "linear_attn.in_proj_qkvz"),
    "ssm_ba": "linear_attn.in_proj_ba",
}
_GROUPED_EXPERTS = {
    **_stacks("mlp.experts"),
    **_shared("mlp.shared_experts"),
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_QKV_IN_ONE = {
    **_without(_LAYER, "attn_q", "attn_k", "attn_v", "ffn_gate"),
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}
_GLM4 = {
    **_without(_LAYER, "ffn_gate"),
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_LATENTS = {
    **_LAYER,
    **_GROUPED_EXPERTS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    **dict.fromkeys(("attn_kv_b", "attn_k_b", "attn_v_b"), "self_attn.kv_b_proj"),
}
_LFM2 = {
    **_ATTENTION,
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
    **{f"shortconv.{each}": f"conv.{each}" for each in ("conv", "in_proj", "out_proj")},
}
_LFM2_TOP = _without(_TOP, "output_norm") | {"token_embd_norm": "model.embedding_norm"}
_GEMMA4 = {
    **_FOUR_NORMS,
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    **_stacks("experts"),
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_GEMMA4_TOP = {
    **_TOP,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GPT_OSS = {
    **_ATTENTION,
    **_stacks("mlp.experts"),
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
}

_LLAMA4 = {
    **_ATTENTION,
    **{f"ffn_{each}": f"feed_forward.{each}_proj" for each in ("gate", "up", "down")},
    **_stacks("feed_forward.experts"),
    **_shared("feed_forward.shared_expert"),
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "feed_forward.router",
}

_EXPERTS = frozenset({"expert_count"})
_PARTIAL = frozenset({"rope.dimension_count"})
_SHARED = frozenset({"expert_count", "expert_shared_count", "expert_weights_scale"})
_HEADS = frozenset({"attention.value_length"})
_WINDOW = frozenset({"attention.sliding_window"})
_CAP = frozenset({"final_logit_softcapping"})
_SCALES = frozenset({"attention.scale", "logit_scale"})
_TEMPERATURE = frozenset({"attention.temperature_scale"})


def _like_llama(model_type: str, **others: Any) -> GgufFamily:
    return GgufFamily(model_type=model_type, changes=pairs_of_llama, has_optional_bias=True, **others)


def _like_gemma(model_type: str, names: Mapping[str, str], keys: frozenset[str]) -> GgufFamily:
    return GgufFamily(model_type=model_type, names=names, changes=ones_in_norms, settings=gemma, keys=keys)


_MIXTRAL = GgufFamily(
    model_type="mixtral",
    names=_LAYER | _stacks("mlp.experts") | {"ffn_gate_inp": "mlp.gate"},
    changes=pairs_of_llama,
    settings=lambda file: experts_of(file, "num_local_experts"),
    keys=_EXPERTS,
)
FAMILIES = {
    "llama": _like_llama("llama"),
    "qwen2": GgufFamily(model_type="qwen2"),
    "qwen3": GgufFamily(model_type="qwen3", has_optional_bias=True),
    "qwen3moe": GgufFamily(
        model_type="qwen3_moe",
        names=_LAYER | _stacks("mlp.experts") | {"ffn_gate_inp": "mlp.gate"},
        settings=qwen3_moe,
        keys=_EXPERTS,
        has_optional_bias=True,
    ),
    "qwen35": GgufFamily(
        model_type="qwen3_5_text",
        names=_DELTA_NET | _MLP,
        changes=qwen35_changes,
        settings=delta_net,
        keys=_PARTIAL,
        has_optional_bias=True,
    ),
    "qwen35moe": GgufFamily(
        model_type="qwen3_5_moe_text",
        names=_DELTA_NET | _DELTA_EXPERTS,
        changes=qwen35_changes,
        settings=delta_net,
        keys=_PARTIAL | _EXPERTS,
        has_optional_bias=True,
    ),
    "qwen3next": GgufFamily(
        model_type="qwen3_next",
        names=_QWEN3_NEXT | _DELTA_EXPERTS,
        changes=qwen3_next_changes,
        settings=delta_net,
        keys=_PARTIAL | _EXPERTS,
        has_optional_bias=True,
    ),
    "smollm3": _like_llama("smollm3"),
    "granite": _like_llama("granite", settings=granite, keys=_SCALES),
    "mistral3": _like_llama("ministral3", settings=mistral3, keys=_TEMPERATURE),
    "gemma": _like_gemma("gemma", _LAYER, frozenset()),
    "gemma2": _like_gemma("gemma2", _FOUR_NORMS, _WINDOW | _CAP | {"attn_logit_softcapping"}),
    "gemma3": _like_gemma("gemma3_text", _FOUR_NORMS, _WINDOW | _CAP),
    "gemma4": GgufFamily(
        model_type="gemma4_text",
        names=_GEMMA4,
        top=_GEMMA4_TOP,
        settings=gemma4,
        keys=_EXPERTS | _WINDOW | _CAP,
    ),
    "gpt-oss": GgufFamily(
        model_type="gpt_oss",
        names=_GPT_OSS,
        changes=gpt_oss_changes,
        settings=gpt_oss,
        keys=_EXPERTS | _WINDOW,
    ),
    "glm4": GgufFamily(model_type="glm4", names=_GLM4, keys=_PARTIAL, has_optional_bias=True),
    "glm4moe": GgufFamily(
        model_type="glm4_moe",
        names=_ATTENTION | _MLP | _GROUPED_EXPERTS | {"post_attention_norm": "post_attention_layernorm"},
        settings=glm4_moe,
        keys=_PARTIAL | _SHARED,
        has_optional_bias=True,
    ),
    "deepseek2": GgufFamily(
        model_type="deepseek_v3",
        names=_LATENTS,
        changes=deepseek_changes,
        settings=deepseek,
        keys=_PARTIAL | _SHARED | _HEADS,
    ),
    "phi3": GgufFamily(model_type="phi3", names=_QKV_IN_ONE, settings=phi3, keys=_PARTIAL | _WINDOW),
    "lfm2": GgufFamily(model_type="lfm2", names=_LFM2, top=_LFM2_TOP, changes=lfm2_changes, settings=lfm2),
    "lfm2moe": GgufFamily(
        model_type="lfm2_moe",
        names=_LFM2
        | _stacks("feed_forward.experts")
        | {"ffn_gate_inp": "feed_forward.gate", "exp_probs_b.bias": "feed_forward.expert_bias"},
        top=_LFM2_TOP,
        changes=lfm2_changes,
        settings=lfm2,
        keys=_EXPERTS,
    ),
    "ernie4_5": GgufFamily(model_type="ernie4_5"),
    "exaone4": GgufFamily(model_type="exaone4", names=_NORMS_BEHIND, settings=exaone4, keys=_WINDOW),
    "olmo2": GgufFamily(model_type="olmo2", names=_NORMS_BEHIND),
    "seed_oss": GgufFamily(
        model_type="seed_oss",
        names=_ATTENTION | _MLP | {"post_attention_norm": "post_attention_layernorm"},
    ),
    "llama4": GgufFamily(
        model_type="llama4_text",
        names=_LLAMA4,
        changes=llama4_changes,
        settings=llama4,
        keys=_EXPERTS,
    ),
}
# Models that see too, and have a file of their own for that.
FAMILIES |= {name: FAMILIES[name.replace("vl", "")] for name in ("qwen2vl", "qwen3vl", "qwen3vlmoe")}
"""Families by their names in files."""
