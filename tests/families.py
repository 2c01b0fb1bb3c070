"""The families of transformers that the matrix tries, and how each is made tiny.

Owns: one small configuration for each; what transformers' own defaults give otherwise is kept.
Never: what comes of a family: that is tried (tests/worker/family_trial.py), and stands in docs/models.md.
"""

from dataclasses import dataclass, field
from typing import Any

TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 12,
    "use_sliding_window": True,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Taken by every family that has the key."""

ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
"""Taken by every family whose layers can be of these two types and no others."""


OTHER_PARTS: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    },
    "audio_config": None,
}
"""Families of models that see and hear; their text is all that is served."""


@dataclass(frozen=True, kw_only=True)
class Family:
    model_type: str
    variant: str = ""
    """Difference from the family's first row, in words for a person."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Differences from TINY. None: transformers' default, or what the family derives by itself."""
    text_part: str = ""
    """The model_type of the part that these settings are for, where there are others for images or sound."""

    @property
    def name(self) -> str:
        return f"{self.model_type}, {self.variant}" if self.variant else self.model_type


def _rope(rope_type: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **settings}}


# Compressed keys and values: every head has keys of 16 + 16 numbers and values of 16.
_MLA = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_GROUPED_EXPERTS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
# Fewer than a sequence has, so that most tokens see some of the keys before them.
_FEW_CHOSEN = {"index_topk": 4}
_AS_DERIVED = {"head_dim": None}

_EVERY_THIRD_ATTENDS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}

_MULTIPLIERS = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.22,
    "logits_scaling": 4.0,
}

# Angles that pictures have for time, height and width; those of a text are equal.
_THREE_ANGLES = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
}

_SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": {**_THREE_ANGLES, "head_dim": None},
    "qwen2_5_vl_text": {**_THREE_ANGLES, "head_dim": None},
    "qwen3_vl_text": _THREE_ANGLES,
    "qwen3_vl_moe_text": {**_THREE_ANGLES, "sliding_window": None, "use_sliding_window": None},
    "glm4v_text": {**_THREE_ANGLES, "head_dim": None},
    "glm4v_moe_text": {**_THREE_ANGLES, "first_k_dense_replace": 1, "partial_rotary_factor": 1.0},
    "mistral4": {**_MLA, **_GROUPED_EXPERTS},
    "deepseek_v2": {**_MLA, **_GROUPED_EXPERTS},
    "deepseek_v3": {**_MLA, **_GROUPED_EXPERTS},
    "axk1": {**_MLA, **_GROUPED_EXPERTS},
    "youtu": _MLA,
    "glm4_moe_lite": {**_MLA, **_GROUPED_EXPERTS},
    "minicpm3": _MLA,
    "longcat_flash": {
        **_MLA,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 48,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "num_layers": 2,
        "num_hidden_layers": None,
        "head_dim": 16,
    },
    "llama4_text": {
        "attention_chunk_size": 8,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 0, 1],
        "floor_scale": 4,
        "attn_scale": 1.0,
    },
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "activation_sparsity_pattern": None,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
    },
    "falcon": _AS_DERIVED,
    "moshi": {"sliding_window": 512},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "index_topk_blocks": 2,
        "index_block_size": 2,
        "index_n_heads": 2,
    },
    "bloom": {"seq_length": 512},
    "mpt": {"max_seq_len": 512},
    "xlstm": {"max_position_embeddings": 512},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "phimoe": {"sliding_window": None},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 96},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv"]},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 1.0,
        }
    },
    "granite": _MULTIPLIERS,
    "granitemoe": _MULTIPLIERS,
    "granitemoeshared": _MULTIPLIERS,
    "granite_swa": _MULTIPLIERS,
    "granitemoe_swa": _MULTIPLIERS,
    "axk2": {**_MLA, **_GROUPED_EXPERTS, **_FEW_CHOSEN},
    "deepseek_v32": {**_MLA, **_GROUPED_EXPERTS, **_FEW_CHOSEN},
    "glm_moe_dsa": {**_MLA, **_GROUPED_EXPERTS, **_FEW_CHOSEN, "indexer_types": ["full", "shared", "full"]},
    "hy_v4": {**_MLA, **_GROUPED_EXPERTS, **_FEW_CHOSEN, "indexer_types": ["full", "shared", "full"]},
    "qwen3_next": _EVERY_THIRD_ATTENDS,
    "qwen3_5_text": _EVERY_THIRD_ATTENDS,
    "qwen3_5_moe_text": _EVERY_THIRD_ATTENDS,
    "olmo_hybrid": _EVERY_THIRD_ATTENDS,
    "minimax": _EVERY_THIRD_ATTENDS,
    "kimi_linear": {**_MLA, **_EVERY_THIRD_ATTENDS, "mlp_layer_types": None},
    "bailing_hybrid": {**_MLA, **_GROUPED_EXPERTS, **_EVERY_THIRD_ATTENDS},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {**_MULTIPLIERS, "layer_types": ["mamba", "attention", "mamba"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gpt_neo": {"num_layers": 2, "num_hidden_layers": None, "attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1},
}

_MODEL_TYPES = (
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "bamba", "beam", "biogpt"),
    *("bitnet", "bloom", "codegen", "cohere", "cohere2", "cohere2_moe", "ctrl", "cwm", "deepseek_v2"),
    *("deepseek_v3", "deepseek_v32", "deepseek_v4", "diffllama", "doge", "dots1", "ernie4_5"),
    *("ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba", "flex_olmo", "flint"),
    *("gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm"),
    *("glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox"),
    *("gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa"),
    *("granitemoehybrid", "granitemoeshared", "helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    *("hy_v3", "hy_v4", "hyperclovax", "inkling_text", "internlm3", "iquestcoder", "jais2", "jamba"),
    *("jetmoe", "kimi_linear", "kolibri1", "laguna", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4_text"),
    *("longcat_flash", "mamba", "mamba2", "mellum", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2"),
    *("minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mistral4", "mixtral"),
    *("modernbert-decoder", "moshi"),
    *("mpt", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe"),
    *("openai-gpt", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen4_exp_text"),
    *("recurrent_gemma", "rwkv", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2"),
    *("vaultgemma", "xglm", "xlstm", "youtu"),
)

_VARIANTS = (
    Family(
        model_type="llama",
        variant="llama3 rope",
        settings=_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    Family(model_type="llama", variant="linear rope", settings=_rope("linear", factor=4.0)),
    Family(
        model_type="llama",
        variant="yarn rope",
        settings=_rope("yarn", factor=4.0, original_max_position_embeddings=128),
    ),
    Family(
        model_type="llama",
        variant="longrope",
        settings=_rope(
            "longrope",
            factor=8.0,
            original_max_position_embeddings=8,
            short_factor=[1.0] * 8,
            long_factor=[1.0 + 0.5 * index for index in range(8)],
        ),
    ),
    Family(model_type="llama", variant="dynamic rope", settings=_rope("dynamic", factor=2.0)),
    Family(model_type="phimoe", variant="sliding window", settings={"sliding_window": 12}),
)

_WITH_OTHER_PARTS = {
    "cohere2_vision": "cohere2",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "internvl": "qwen3",
    "kimi_k25": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "llama4": "llama4_text",
    "llava": "llama",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "mistral3": "ministral3",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "smolvlm": "llama",
}
"""Families of models that see or hear too, and the part of each that is text."""

MATRIX = (
    *(Family(model_type=each, settings=_SETTINGS.get(each, {})) for each in _MODEL_TYPES),
    *(
        Family(model_type=whole, settings=_SETTINGS.get(text, {}), text_part=text)
        for whole, text in _WITH_OTHER_PARTS.items()
    ),
    *_VARIANTS,
)
