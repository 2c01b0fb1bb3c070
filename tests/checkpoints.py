"""Tiny checkpoints with random weights, complete enough to be served: weights, tokenizer, chat template.

Owns: one configuration per family, small enough to build in milliseconds, with an initial scale
large enough that the two best tokens are well apart and greedy decoding is the same in any order of sums.
Never: the network, or a random number that differs between two runs.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

EOS_TOKEN = "<|im_end|>"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", EOS_TOKEN)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Merged left to right, so that every one of these becomes a single token ("Ġ" is the space before a word).
_MERGED_WORDS = [
    "Ġthe",
    "Ġa",
    "Ġof",
    "Ġto",
    "Ġand",
    "Ġin",
    "Ġis",
    "Ġit",
    "Ġyou",
    "Ġthat",
    "Ġfor",
    "Ġon",
    "Ġwith",
    "Ġtoken",
    "Ġyard",
    "Ġtrain",
    "er",
    "ing",
    "user",
    "assistant",
    "system",
    "hello",
    "Ġworld",
    "The",
    "Once",
    "upon",
    "Ġtime",
    "Ã©",
    "Ã¼",
]

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
_LATENTS = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_EVERY_SECOND_EXPERTS = {"num_hidden_layers": 4, "num_local_experts": 4, "interleave_moe_layer_step": 2}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

# family -> (model_type, what differs from _BASE; None removes a key)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3_rope": ("llama", {"rope_parameters": _LLAMA3_ROPE}),
    "dynamic_rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "qwen2": ("qwen2", {"head_dim": None}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 12}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 12,
            "layer_types": _ALTERNATING,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            "sliding_window": 12,
            "layer_types": _ALTERNATING,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,
        },
    ),
    "phi3": ("phi3", {"head_dim": None, "pad_token_id": 0}),
    "phi3_longrope": (
        "phi3",
        {
            "head_dim": None,
            "pad_token_id": 0,
            "rope_parameters": _LONGROPE,
            "original_max_position_embeddings": 64,
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),  # of which the last rotates nothing
    "granite": (
        "granite",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 12,
            "layer_types": _ALTERNATING,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_LATENTS,
            "first_k_dense_replace": 3,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 48,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
        },
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            **_LATENTS,
            "moe_intermediate_size": 48,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "deepseek_v32": (
        "deepseek_v32",
        {
            **_LATENTS,
            "index_head_dim": 24,
            # With few, many scores are exactly 0, and which of equal keys is chosen is open.
            "index_n_heads": 16,
            "index_topk": 4,
            "first_k_dense_replace": 3,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "gpt2": (
        "gpt2",
        {
            **dict.fromkeys(_BASE.keys() - {"initializer_range"}),
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 512,
        },
    ),
    "llama4_text": (
        "llama4_text",
        {
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 16,
            "pad_token_id": 0,
            "no_rope_layers": [1, 0, 1],
        },
    ),
    "llama4_scout": ("llama4_text", {**_EVERY_SECOND_EXPERTS, "pad_token_id": 0}),
    # Families with recurrent layers.
    "lfm2": (
        "lfm2",
        {
            "head_dim": None,
            "block_ff_dim": 96,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 3,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **_EXPERTS,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "qwen3_5_text": (
        "qwen3_5_text",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        {
            **_EXPERTS,
            "intermediate_size": None,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            **_EXPERTS,
            "head_dim": None,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
        },
    ),
    "gemma4_text": (
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": False,
            "vocab_size_per_layer_input": 400,
            "hidden_size_per_layer_input": 16,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4_experts": (
        "gemma4_text",
        {
            **_EXPERTS,
            "num_experts_per_tok": None,
            "norm_topk_prob": None,
            "top_k_experts": 2,
            "enable_moe_block": True,
            "num_hidden_layers": 4,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "glm4": ("glm4", {"attention_bias": True}),
    "ernie4_5": ("ernie4_5", {}),
    "olmo2": ("olmo2", {}),
    "exaone4": ("exaone4", {"sliding_window": 12, "layer_types": _ALTERNATING}),
    "exaone4_full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "seed_oss": ("seed_oss", {}),
    "deepseek_v2": (
        "deepseek_v2",
        {
            "head_dim": None,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "moe_intermediate_size": 48,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 0.7,
                "mscale_all_dim": 0.7,
            },
        },
    ),
    "ministral3": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 8,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    # Families that no paged cache can be put under; the last one cannot be served at all.
    "bloom": ("bloom", {"head_dim": None, "n_layer": 2, "n_head": 4}),
    "mamba": ("mamba", {"head_dim": None, "max_position_embeddings": None}),
    "recurrent_gemma": ("recurrent_gemma", {"head_dim": None, "attention_window_size": 12}),
    "bert": ("bert", {"head_dim": None}),
}

RECURRENT_FAMILIES = ("lfm2", "qwen3_next", "mamba", "qwen3_5_text")
"""Families with states of a fixed size, one of them without keys and values."""

ALONE_FAMILIES = ("bloom", "lfm2", "recurrent_gemma")
"""Families whose sequences have caches of their own, lfm2 where its states have no batches."""

FAMILIES = (
    *("llama", "llama3_rope", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3"),
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "gpt2", "llama4_text"),
)
"""Families that the worker serves; the rest of what make_checkpoint builds is for tests of one case each."""


def make_checkpoint(family: str, folder: Path, **overrides: Any) -> Path:
    """Write a checkpoint of `family` into `folder` and return the folder. The same bytes every time.

    `overrides` are configuration keys. Kept as it is when the folder already holds one.
    """
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(folder)
    _write_model(family, folder, {"vocab_size": vocab_size, **overrides})
    return folder


def write_tokenizer(folder: Path) -> int:
    """Write tokenizer.json, tokenizer_config.json and the chat template; returns the number of tokens."""
    vocab, merges = _byte_level_bpe()
    added = [
        {
            "id": len(vocab) + index,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, content in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }
    _write_json(folder / "tokenizer.json", tokenizer)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TOKEN,
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    return len(vocab) + len(SPECIAL_TOKENS)


def _write_model(family: str, folder: Path, overrides: dict[str, Any]) -> None:
    # Here, because importing these takes seconds and many tests only read a checkpoint's tokenizer.
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    model_type, differences = _FAMILIES[family]
    eos_token_id = overrides["vocab_size"] - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index(EOS_TOKEN)
    ids = {"bos_token_id": None, "eos_token_id": eos_token_id, "pad_token_id": None}
    settings = {**_BASE, **ids, **differences, **overrides}
    # Some families' defaults lie outside this vocabulary, or give each a window.
    always_there = {"bos_token_id", "pad_token_id", "sliding_window"}
    settings = {key: value for key, value in settings.items() if value is not None or key in always_there}
    config = CONFIG_MAPPING[model_type](**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20260101)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        vary_constants(model, torch)
    model.generation_config = GenerationConfig(eos_token_id=eos_token_id)
    model.save_pretrained(folder)


def vary_constants(model: Any, torch: Any) -> None:
    """Give biases, sinks and norms a value each: a constant would hide that a path ignores them."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and bool((parameter == parameter[0]).all()):
            scale = 0.1 if "norm" in name or "ln_" in name else 0.3
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) * scale)


def _byte_level_bpe() -> tuple[dict[str, int], list[list[str]]]:
    tokens = list(_byte_characters())
    merges: list[list[str]] = []
    known = set(tokens)
    for word in _MERGED_WORDS:
        for left, right in pairwise([word[:end] for end in range(1, len(word) + 1)]):
            if right not in known:
                known.add(right)
                tokens.append(right)
                merges.append([left, right[-1]])
    return {token: index for index, token in enumerate(tokens)}, merges


def _byte_characters() -> Iterator[str]:
    """Yield the printable character that stands for each byte in GPT-2's byte-level BPE, bytes 0 to 255."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    num_moved = 0
    for byte in range(256):
        if byte in printable:
            yield chr(byte)
        else:
            yield chr(256 + num_moved)
            num_moved += 1


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
