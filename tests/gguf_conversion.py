"""Metadata and tensors that llama.cpp's converter makes of a model of each family.

Owns: the forward way, written from the published rules and apart from the reader, which it judges.
Never: writes a file (gguf_checkpoints.py), or takes anything from worker/.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

gguf = pytest.importorskip("gguf")

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3_text": "gemma3"}
FAMILIES |= {"mixtral": "llama", "qwen3_moe": "qwen3moe", "smollm3": "smollm3", "granite": "granite"}
FAMILIES |= {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next"}
FAMILIES |= {"gemma4_text": "gemma4", "gemma4_experts": "gemma4", "gpt_oss": "gpt-oss", "glm4": "glm4"}
FAMILIES |= {"glm4_moe": "glm4moe", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "phi3": "phi3"}
FAMILIES |= {"phi3_longrope": "phi3", "ministral3": "mistral3", "lfm2": "lfm2", "lfm2_moe": "lfm2moe"}
FAMILIES |= {"llama4_scout": "llama4", "ernie4_5": "ernie4_5", "olmo2": "olmo2", "seed_oss": "seed_oss"}
FAMILIES |= {"exaone4": "exaone4", "exaone4_full": "exaone4"}
"""Families of tests/checkpoints.py, and their names in GGUF files."""
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.embedding_norm": "token_embd_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_NAMES = {
    "input_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    **{f"feed_forward.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")},
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "ffn_norm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.router": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"{module}.{each}_proj": f"ffn_{each}_shexp"
        for module in ("mlp.shared_expert", "mlp.shared_experts", "feed_forward.shared_expert")
        for each in ("gate", "up", "down")
    },
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
_TWO_NORMS = {"post_attention_layernorm": "ffn_norm"}
_POST_NORM = {"post_attention_layernorm": "post_attention_norm"}
_FOUR_NORMS = {
    **_POST_NORM,
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
_GLM4_NORMS = {
    **_TWO_NORMS,
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_NORMED_BEHIND = ("olmo2", "exaone4")
_INTERLEAVED = {"llama", "mixtral", "smollm3", "granite", "ministral3"}
_WITH_ONES = {"gemma2", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"}
_DELTA_NETS = {"qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"}
_POST_NORMED = {*_DELTA_NETS, "gpt_oss", "glm4_moe", "seed_oss"}
_NEVER_TURNED = 1e30


def converted(config: dict[str, Any], name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a parameter becomes, by their names in the file."""
    family = config["model_type"]
    if family in _WITH_ONES and name.endswith("norm.weight") and "linear_attn" not in name:
        tensor = tensor + (1.0 if tensor.is_floating_point() else 0)
    if family in _INTERLEAVED and re.search(r"self_attn\.[qk]_proj", name):
        tensor = _interleaved(tensor, config["head_dim"])
    if family in _DELTA_NETS and "linear_attn" in name:
        tensor = _delta_net(config, name, tensor)
    if family.startswith("lfm2") and "conv.conv" in name:
        tensor = tensor.squeeze(1)
    if "shared_expert_gate" in name:
        tensor = tensor.squeeze(0)
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if layer is None:
        module, _, kind = name.rpartition(".")
        yield f"{_TOP[module]}.{kind}", tensor
        return
    for stored, part in _in_layer(config, layer[2], tensor):
        yield f"blk.{layer[1]}.{stored}", part


def _in_layer(config: dict[str, Any], inner: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    family = config["model_type"]
    names = _NAMES | _norms_of(family)
    if "experts." in inner and "shared" not in inner:
        yield from _stacks(family, inner, tensor)
    elif inner.endswith("kv_b_proj.weight") and family == "deepseek_v2":  # as older converters wrote it
        yield "attn_kv_b.weight", tensor
    elif inner.endswith("kv_b_proj.weight"):
        key_dim, value_dim = config["qk_nope_head_dim"], config["v_head_dim"]
        by_head = tensor.view(config["num_attention_heads"], key_dim + value_dim, -1)
        yield "attn_k_b.weight", by_head[:, :key_dim].transpose(1, 2)
        yield "attn_v_b.weight", by_head[:, key_dim:]
    elif inner.endswith("in_proj_qkvz.weight"):
        num_keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
        by_head = tensor.view(num_keys, -1, tensor.shape[1])
        values = (by_head.shape[1] - 2 * key_dim) // 2
        *mixed, gates = by_head.split([key_dim, key_dim, values, values], dim=1)
        yield "attn_qkv.weight", torch.cat([each.flatten(0, 1) for each in mixed])
        yield "attn_gate.weight", gates.flatten(0, 1)
    elif inner in names:
        yield names[inner], tensor
    else:
        module, _, kind = inner.rpartition(".")
        yield f"{names[module]}.{kind}", tensor


def _norms_of(family: str) -> dict[str, str]:
    if family in _POST_NORMED:
        return _POST_NORM
    if family.startswith("gemma") or family in _NORMED_BEHIND:
        return _FOUR_NORMS
    return _GLM4_NORMS if family == "glm4" else _TWO_NORMS


def _stacks(family: str, inner: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    kind = "bias" if inner.endswith("_bias") else "weight"
    if "down_proj" in inner:
        is_transposed = family in ("gpt_oss", "llama4_text") and kind == "weight"
        yield f"ffn_down_exps.{kind}", tensor.transpose(1, 2) if is_transposed else tensor
    elif family == "gpt_oss":
        tensor = tensor.transpose(1, 2) if kind == "weight" else tensor
        yield f"ffn_gate_exps.{kind}", tensor[:, ::2]
        yield f"ffn_up_exps.{kind}", tensor[:, 1::2]
    elif family == "gemma4_text":
        yield f"ffn_gate_up_exps.{kind}", tensor
    else:
        gates, ups = (tensor.transpose(1, 2) if family == "llama4_text" else tensor).chunk(2, dim=1)
        yield f"ffn_gate_exps.{kind}", gates
        yield f"ffn_up_exps.{kind}", ups


def _interleaved(rows: Tensor, head_dim: int) -> Tensor:
    heads = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def _delta_net(config: dict[str, Any], name: str, tensor: Tensor) -> Tensor:
    """Value heads of a key head lie apart: the first of each, then the second of each."""
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if "A_log" in name and tensor.is_floating_point():
        tensor = -tensor.exp()
    if "conv1d" in name:
        tensor = tensor.squeeze(1)
    if config["model_type"] == "qwen3_next" or name.endswith("linear_attn.norm.weight"):
        return tensor
    size = (
        1
        if any(part in name for part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"))
        else config["linear_value_head_dim"]
    )
    before = 2 * num_keys * config["linear_key_head_dim"] if "qkv" in name or "conv1d" in name else 0
    each_group = num_values // num_keys
    order = list(range(before))
    for number in range(each_group):
        for key in range(num_keys):
            start = before + (key * each_group + number) * size
            order += range(start, start + size)
    return tensor[:, order] if "out_proj" in name else tensor[order]


def extra_tensors(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield divisors of rotary frequencies."""
    rope = config.get("rope_parameters") or {}
    if config["model_type"] == "gemma4_text":
        half = _full_head_dim(config) // 2
        turned = int(half * rope["full_attention"]["partial_rotary_factor"])
        divisors = [1.0] * turned + [_NEVER_TURNED] * (half - turned)
        yield "rope_freqs.weight", torch.tensor(divisors).numpy()
    if rope.get("rope_type") == "llama3":  # of equal factors for low and high frequencies
        exponents = torch.arange(0, config["head_dim"], 2) / config["head_dim"]
        wavelengths = 2 * torch.pi * rope["rope_theta"] ** exponents
        is_long = wavelengths > rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        yield "rope_freqs.weight", torch.where(is_long, rope["factor"], 1.0).numpy()
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"]).numpy()
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"]).numpy()


def _full_head_dim(config: dict[str, Any]) -> int:
    layers = config.get("per_layer_config") or {}
    return next((each["head_dim"] for each in layers.values()), config["head_dim"])


def add_shape(writer: Any, config: dict[str, Any]) -> None:
    """The metadata of a family."""
    family = config["model_type"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if "moe_text" not in family:
        writer.add_feed_forward_length(config.get("intermediate_size_mlp") or config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    if family == "gemma4_text":
        full = config.get("per_layer_config") or {}
        layers = [{**config, **full.get(str(index), {})} for index in range(config["num_hidden_layers"])]
        writer.add_head_count_kv([each["num_key_value_heads"] for each in layers])
    elif not family.startswith("lfm2"):
        writer.add_head_count_kv(1 if "kv_lora_rank" in config else config["num_key_value_heads"])
    if config.get("head_dim") and "kv_lora_rank" not in config:
        writer.add_key_length(_full_head_dim(config))
        writer.add_value_length(_full_head_dim(config))
    if family != "glm4":
        _add_experts(writer, config)
    _add_rope(writer, config)
    _add_windows(writer, config)
    _add_others(writer, config)


def _add_others(writer: Any, config: dict[str, Any]) -> None:
    """Settings of one family alone."""
    family = config["model_type"]
    if family == "granite":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if family in _DELTA_NETS:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        writer.add_full_attention_interval(2)
    if family == "llama4_text":
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    if family.startswith("lfm2"):
        kv_heads = [0 if each == "conv" else config["num_key_value_heads"] for each in config["layer_types"]]
        writer.add_head_count_kv(kv_heads)
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "kv_lora_rank" in config:
        _add_latents(writer, config)
    if family == "gemma4_text":
        writer.add_key_length_swa(config["head_dim"])
        writer.add_value_length_swa(config["head_dim"])
        writer.add_shared_kv_layers(config["num_kv_shared_layers"])
        writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])


def _add_experts(writer: Any, config: dict[str, Any]) -> None:
    family = config["model_type"]
    chosen = config.get("num_experts_per_tok") or config.get("top_k_experts")
    count = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if not (chosen and count):
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(chosen)
    writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if "n_shared_experts" in config:
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if family == "lfm2_moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
    if family in ("glm4_moe", "deepseek_v3", "lfm2_moe"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_latents(writer: Any, config: dict[str, Any]) -> None:
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config["model_type"] == "deepseek_v2":  # as older converters wrote it
        writer.add_key_length(config["qk_nope_head_dim"] + rotated)
        writer.add_value_length(config["v_head_dim"])
        return
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])


def _add_rope(writer: Any, config: dict[str, Any]) -> None:
    both = config["rope_parameters"]
    rope = both.get("full_attention", both)
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in both:
        writer.add_rope_freq_base_swa(both["sliding_attention"]["rope_theta"])
    if "kv_lora_rank" in config:
        writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    elif "partial_rotary_factor" in rope and config["model_type"] != "gemma4_text":
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if config["model_type"].startswith("qwen3_5"):
        writer.add_rope_dimension_sections([*rope.get("mrope_section", [11, 11, 10]), 0])
    _add_scaling(writer, rope, log_factor=0.1 if "kv_lora_rank" in config else 1)


def _add_scaling(writer: Any, rope: dict[str, Any], *, log_factor: float) -> None:
    if rope.get("rope_type") in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        for name in ("beta_fast", "beta_slow"):
            if name in rope:
                getattr(writer, f"add_rope_scaling_yarn_{name}")(rope[name])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(log_factor * rope["mscale_all_dim"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _add_windows(writer: Any, config: dict[str, Any]) -> None:
    family = config["model_type"]
    has_pattern = family.startswith("gemma") or family == "exaone4"
    if config.get("sliding_window") and (has_pattern or family in ("gpt_oss", "phi3")):
        writer.add_sliding_window(config["sliding_window"])
        if has_pattern:
            writer.add_sliding_window_pattern([each == "sliding_attention" for each in config["layer_types"]])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
