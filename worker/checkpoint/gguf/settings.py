"""Settings of models that only some families have, and the changes of their tensors.

Owns: a function or two for each family whose configuration or layout is its own; families.py names them.
Source: the metadata and orders that llama.cpp's converter writes.
"""

from typing import Any

from worker.checkpoint.gguf.file import GgufFile, other_form
from worker.checkpoint.gguf.layouts import Change, RowOrder, rotary_pairs

_WINDOW_PATTERNS = {"gemma2": 2, "gemma3": 6}
_DEFAULT_WINDOWS = {"gemma2": 4096}
# Models with these numbers of layers divide queries by another number than the size of a head.
_ODD_SCALED_LAYERS = {"gemma2": 46, "gemma3": 62}
_GEMMA_EXTRAS = {"hidden_activation": "gelu_pytorch_tanh"}
_EXPERTS_OF_MAVERICK = 128
"""The one Llama 4 whose queries and keys are not normalised."""
_SOFTMAX, _SIGMOID = 1, 2
"""Functions of routers, by their numbers in a file."""


def has_tensor(file: GgufFile, ending: str) -> bool:
    """Tell whether any layer has a tensor of this name."""
    return any(name.endswith(f".{ending}") for name in file.tensors)


def pairs_of_llama(file: GgufFile) -> dict[str, Change]:
    num_heads = file.number("attention.head_count")
    return {
        "attn_q": rotary_pairs(num_heads),
        "attn_k": rotary_pairs(file.number("attention.head_count_kv", num_heads)),
    }


def ones_in_norms(_: GgufFile) -> dict[str, Change]:
    names = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "output_norm")
    return dict.fromkeys((*names, "attn_q_norm", "attn_k_norm"), Change(added=1.0))


def experts_of(file: GgufFile, count: str) -> dict[str, Any]:
    return {
        count: file.number("expert_count"),
        "num_experts_per_tok": file.number("expert_used_count"),
        "norm_topk_prob": True,
    }


def qwen3_moe(file: GgufFile) -> dict[str, Any]:
    return {
        **experts_of(file, "num_experts"),
        "moe_intermediate_size": file.number("expert_feed_forward_length"),
    }


def granite(file: GgufFile) -> dict[str, Any]:
    keys = {
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "attention.scale": "attention_multiplier",
        "logit_scale": "logits_scaling",
    }
    return {key: float(file.value(stored)) for stored, key in keys.items()}


def gemma(file: GgufFile) -> dict[str, Any]:
    """Settings of Gemma's families up to the third."""
    found: dict[str, Any] = dict(_GEMMA_EXTRAS)
    family, num_layers = file.architecture, file.num_layers
    if family == "gemma":
        return found
    num_heads, hidden_size = file.number("attention.head_count"), file.number("embedding_length")
    head_dim = file.number("attention.key_length", hidden_size // max(1, num_heads))
    is_odd = num_layers == _ODD_SCALED_LAYERS[family]
    found["query_pre_attn_scalar"] = hidden_size // num_heads if is_odd else head_dim
    window = file.number("attention.sliding_window", _DEFAULT_WINDOWS.get(family, 0))
    pattern = file.value("attention.sliding_window_pattern", _WINDOW_PATTERNS[family])
    if isinstance(pattern, list):
        found |= _layer_types(file)
    else:
        full = [bool(pattern) and (index + 1) % pattern == 0 for index in range(num_layers)]
        found["layer_types"] = ["full_attention" if each else "sliding_attention" for each in full]
    if window:
        found["sliding_window"] = window
    else:
        found["layer_types"] = ["full_attention"] * num_layers
    caps = {"attn": 50.0, "final": 30.0} if family == "gemma2" else {"final": None}
    for part, default in caps.items():
        found[f"{part}_logit_softcapping"] = file.value(f"{part}_logit_softcapping", default) or default
    return found


def _layer_types(file: GgufFile) -> dict[str, Any]:
    slides = file.by_layer("attention.sliding_window_pattern")
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in slides]}


def exaone4(file: GgufFile) -> dict[str, Any]:
    """Settings of windows; where some layers have them, the others have no angles."""
    window = file.number("attention.sliding_window", 0)
    types = _layer_types(file) if window else {"layer_types": ["full_attention"] * file.num_layers}
    return {"sliding_window": window or None, **types}


def gemma4(file: GgufFile) -> dict[str, Any]:
    per_layer = file.tensors.get("per_layer_token_embd.weight")
    widths, kv_heads = file.by_layer("feed_forward_length"), file.by_layer("attention.head_count_kv")
    types = _layer_types(file)["layer_types"]
    full = types.index("full_attention") if "full_attention" in types else 0
    sliding = types.index("sliding_attention") if "sliding_attention" in types else 0
    found = {
        **_GEMMA_EXTRAS,
        "layer_types": types,
        "head_dim": file.number("attention.key_length_swa"),
        "global_head_dim": file.number("attention.key_length"),
        "num_key_value_heads": kv_heads[sliding],
        "num_global_key_value_heads": kv_heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": file.number("attention.shared_kv_layers", 0),
        "sliding_window": file.number("attention.sliding_window"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "hidden_size_per_layer_input": file.number("embedding_length_per_layer_input", 0),
        "final_logit_softcapping": file.value("final_logit_softcapping", None),
        "enable_moe_block": bool(file.number("expert_count", 0)),
    }
    if per_layer is not None:
        found["vocab_size_per_layer_input"] = per_layer.shape[0]
    if found["enable_moe_block"]:
        found |= {
            "num_experts": file.number("expert_count"),
            "top_k_experts": file.number("expert_used_count"),
            "moe_intermediate_size": file.number("expert_feed_forward_length"),
        }
    return found


def gpt_oss(file: GgufFile) -> dict[str, Any]:
    types = ("sliding_attention", "full_attention")
    return {
        **experts_of(file, "num_local_experts"),
        "intermediate_size": file.number("expert_feed_forward_length"),
        "sliding_window": file.number("attention.sliding_window"),
        "layer_types": [types[index % 2] for index in range(file.num_layers)],
    }


def gpt_oss_changes(file: GgufFile) -> dict[str, Change]:
    """Stacks of gpt-oss: each gate is next to its up, and inputs come before outputs."""
    order = RowOrder(num_heads=file.number("expert_feed_forward_length"))
    return {
        "ffn_gate_exps": Change(transposed=(0, 1), rows=order),
        "ffn_down_exps": Change(transposed=(0,)),
    }


def llama4(file: GgufFile) -> dict[str, Any]:
    """Settings that files leave to the reader: every fourth layer has no angles, and attends to all."""
    num_experts, step = file.number("expert_count", 0), file.number("interleave_moe_layer_step")
    has_angles_everywhere = file.value("attention.sliding_window", None) == 0
    angles = [has_angles_everywhere or (index + 1) % 4 != 0 for index in range(file.num_layers)]
    chunked = [each and not has_angles_everywhere for each in angles]
    return {
        "intermediate_size": file.number("expert_feed_forward_length"),
        "intermediate_size_mlp": file.number("feed_forward_length"),
        "num_local_experts": num_experts,
        "num_experts_per_tok": file.number("expert_used_count", 0),
        "moe_layers": [index for index in range(file.num_layers) if step and (index + 1) % step == 0],
        "no_rope_layers": [int(each) for each in angles],
        "layer_types": ["chunked_attention" if each else "full_attention" for each in chunked],
        "attention_chunk_size": 8192,
        "use_qk_norm": num_experts != _EXPERTS_OF_MAVERICK,
    }


def llama4_changes(_: GgufFile) -> dict[str, Change]:
    """Experts of all tokens are one product of whole stacks, inputs before outputs.

    The family's code asks the embedding's weight for its device.
    """
    return {
        "token_embd": Change(is_read_as_numbers=True),
        "ffn_gate_exps": Change(transposed=(0, 1), is_read_as_numbers=True),
        "ffn_down_exps": Change(transposed=(0,), is_read_as_numbers=True),
    }


def delta_net(file: GgufFile) -> dict[str, Any]:
    """Settings of layers with a gated delta net among those of attention."""
    num_values, interval = file.number("ssm.time_step_rank"), file.number("full_attention_interval", 4)
    recurrent = [bool(interval) and (index + 1) % interval != 0 for index in range(file.num_layers)]
    if file.value("attention.recurrent_layers", None) is not None:
        recurrent = file.by_layer("attention.recurrent_layers")
    found = {
        "linear_conv_kernel_dim": file.number("ssm.conv_kernel"),
        "linear_key_head_dim": file.number("ssm.state_size"),
        "linear_num_key_heads": file.number("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "linear_value_head_dim": file.number("ssm.inner_size") // max(1, num_values),
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
    }
    if file.number("expert_count", 0):
        found |= qwen3_moe(file)
        found["shared_expert_intermediate_size"] = file.number("expert_shared_feed_forward_length")
    return found


def _delta_changes(file: GgufFile) -> dict[str, Change]:
    kernel = file.number("ssm.conv_kernel")
    return {
        **ones_in_norms(file),
        "ssm_a": Change(is_decay=True),
        "ssm_conv1d": Change(shape=(-1, 1, kernel)),
        "ffn_gate_inp_shexp": Change(shape=(1, -1)),
    }


def qwen35_changes(file: GgufFile) -> dict[str, Change]:
    """Changes where each run of value heads has one head for every key head."""
    num_keys, key_dim = file.number("ssm.group_count"), file.number("ssm.state_size")
    value_dim = file.number("ssm.inner_size") // max(1, file.number("ssm.time_step_rank"))
    heads = RowOrder(num_heads=num_keys)
    values = RowOrder(num_heads=num_keys, sizes=(value_dim,))
    mixed = RowOrder(num_heads=num_keys, sizes=(value_dim,), start=2 * num_keys * key_dim)
    kernel = file.number("ssm.conv_kernel")
    return {
        **_delta_changes(file),
        **dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_dt.bias"), Change(rows=heads)),
        "ssm_a": Change(rows=heads, is_decay=True),
        "ssm_conv1d": Change(rows=mixed, shape=(-1, 1, kernel)),
        "attn_qkv": Change(rows=mixed),
        "attn_gate": Change(rows=values),
        "ssm_out": Change(inputs=values),
    }


def qwen3_next_changes(file: GgufFile) -> dict[str, Change]:
    """Changes of queries, keys, values and gates, which lie head after head in the model."""
    num_keys, key_dim = file.number("ssm.group_count"), file.number("ssm.state_size")
    value_dim = file.number("ssm.inner_size") // max(1, num_keys)
    order = RowOrder(num_heads=num_keys, sizes=(key_dim, key_dim, value_dim, value_dim))
    return {**_delta_changes(file), "attn_qkv": Change(rows=order)}


def glm4_moe(file: GgufFile) -> dict[str, Any]:
    _refuse_router(file, of=_SIGMOID)
    return {**_grouped_experts(file), "use_qk_norm": has_tensor(file, "attn_q_norm.weight")}


def _refuse_router(file: GgufFile, *, of: int) -> None:
    """Raise StartupError for routers of another function."""
    found = file.number("expert_gating_func", of) or of
    if found != of:
        raise other_form(
            f"{file.path.name} has routers of function {found} ({file.architecture}.expert_gating_func)"
        )


def _grouped_experts(file: GgufFile) -> dict[str, Any]:
    """Settings of routers that choose groups first. Without experts, all layers are dense."""
    num_experts = file.number("expert_count", 0)
    return {
        "n_routed_experts": num_experts or None,
        "num_experts_per_tok": file.number("expert_used_count", 0) or None,
        "n_shared_experts": file.number("expert_shared_count", 0) or None,
        "n_group": file.number("expert_group_count", 1) or 1,
        "topk_group": file.number("expert_group_used_count", 1) or 1,
        "moe_intermediate_size": file.number("expert_feed_forward_length"),
        "first_k_dense_replace": file.number("leading_dense_block_count", 0)
        if num_experts
        else file.num_layers,
        "routed_scaling_factor": float(file.value("expert_weights_scale", 1.0)) or 1.0,
        "norm_topk_prob": bool(file.value("expert_weights_norm", False)),  # noqa: FBT003 -- the file's default
    }


def deepseek(file: GgufFile) -> dict[str, Any]:
    rotated, num_heads = file.number("rope.dimension_count"), file.number("attention.head_count")
    found = {
        **_grouped_experts(file),
        "head_dim": rotated,
        "num_key_value_heads": num_heads,
        "q_lora_rank": file.number("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": file.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": _mla_length(file, "key") - rotated,
        "v_head_dim": _mla_length(file, "value"),
    }
    # Early files of GLM-4.7-Flash have no function; those of softmax have no bias that corrects a choice.
    has_correction = has_tensor(file, "exp_probs_b.bias")
    if has_correction or file.value("expert_gating_func", None) == _SIGMOID:
        _refuse_router(file, of=_SIGMOID)
        return found
    _refuse_router(file, of=_SOFTMAX)
    if found["n_routed_experts"] and found["norm_topk_prob"]:
        raise other_form(
            f"{file.path.name} has routers of softmax whose weights are normalised "
            f"({file.architecture}.expert_weights_norm)"
        )
    is_grouped = found["n_group"] > 1
    return found | {
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy" if is_grouped else "greedy",
    }


def _mla_length(file: GgufFile, name: str) -> int:
    """Size of a head once latents are expanded: older files have it under the shorter key."""
    return file.number(f"attention.{name}_length_mla", file.number(f"attention.{name}_length"))


def deepseek_changes(file: GgufFile) -> dict[str, Change]:
    """The two parts of a product are stacks of a matrix for each head, the first of them transposed."""
    shape = (-1, file.number("attention.kv_lora_rank"))
    return {"attn_k_b": Change(transposed=(0,), axis=1, shape=shape)}


def lfm2(file: GgufFile) -> dict[str, Any]:
    kv_heads = file.by_layer("attention.head_count_kv")
    found = {
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["full_attention" if each else "conv" for each in kv_heads],
        "conv_L_cache": file.number("shortconv.l_cache"),
        "conv_bias": has_tensor(file, "shortconv.in_proj.bias"),
        "norm_eps": float(file.value("attention.layer_norm_rms_epsilon")),
        "block_auto_adjust_ff_dim": False,
    }
    if not file.number("expert_count", 0):
        return found
    _refuse_router(file, of=_SIGMOID)
    return found | {
        **experts_of(file, "num_experts"),
        "moe_intermediate_size": file.number("expert_feed_forward_length"),
        "num_dense_layers": file.number("leading_dense_block_count"),
        "use_expert_bias": has_tensor(file, "exp_probs_b.bias"),
    }


def lfm2_changes(file: GgufFile) -> dict[str, Change]:
    return {"shortconv.conv": Change(shape=(-1, 1, file.number("shortconv.l_cache")))}


def mistral3(file: GgufFile) -> dict[str, Any]:
    """Settings of Ministral 3; a file without its scale of queries holds a Mistral, which is a llama."""
    if not file.value("attention.temperature_scale", 0):
        return {"model_type": "llama"}
    return {"sliding_window": None}


def phi3(file: GgufFile) -> dict[str, Any]:
    found = {"sliding_window": file.number("attention.sliding_window", 0) or None}
    original = file.value("rope.scaling.original_context_length", None)
    return found if original is None else {**found, "original_max_position_embeddings": original}
