"""Translation of a GGUF file's metadata into config.json.

Owns: what is the same for all families, the ids of tokens, and the refusal of what a family does not have.
Source: the metadata that llama.cpp's converter writes.
"""

from collections.abc import Collection
from typing import Any

from worker.checkpoint.gguf.families import GgufFamily, family_of
from worker.checkpoint.gguf.file import GgufFile, GgufType, damaged
from worker.checkpoint.gguf.rotary import rope_of
from worker.checkpoint.gguf.weights import find_weights_of
from worker.worker_errors import StartupError

METHOD = "gguf"
"""Its quant_method: see worker/quantized/gguf_blocks.py."""
_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>"),
        *("<|flush|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<turn|>", "<|tool_response>"),
        *("<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", "<｜end▁of▁sentence｜>"),
    }
)
"""Tokens that end a reply in any template that has them, whatever their type: files name one of theirs."""
_ENDS_IF_CONTROL = frozenset({"</s>", "<eos>"})
"""Some vocabularies have them as plain text."""
_ENDS_OF_GLM, _GLMS = frozenset({"<|observation|>", "<|user|>"}), frozenset({"glm4", "glm4moe", "deepseek2"})
"""Begins of others' turns, which end those of these models (GLM-4.7-Flash is a deepseek2)."""
_PARTS_OF_REPLIES = (({"<|return|>", "<|call|>"}, "<|end|>"), ({"<|calls|>", "<|flush|>"}, "<|end|>"))
"""Tokens that end replies, and the one that then ends only a part of a reply."""
NORMAL, CONTROL = 1, 3
"""Types of tokens: of those where a file has none, and of those that text never becomes."""
_NAMED = ("bos", "eos", "unknown", "padding", "eot", "eom")

_CHANGES_OF_RESULTS = {
    "pooling_type": "for embeddings",
    "attention.scale": "of scaled attention",
    "attention.temperature_scale": "of queries that are scaled by their place",
    "attention.clamp_kqv": "of keys and values that are cut off",
    "attn_logit_softcapping": "of capped attention",
    "logit_scale": "of scaled logits",
    "final_logit_softcapping": "of capped logits",
}
"""Numbers by their keys, with what a model is that has them; 0 is none."""


def config_of(file: GgufFile) -> dict[str, Any]:
    """config.json. Raises StartupError, with the name of a key or tensor that is not supported."""
    family = family_of(file)
    num_heads, hidden_size = file.number("attention.head_count"), file.number("embedding_length")
    head_dim = file.number("attention.key_length", hidden_size // max(1, num_heads))
    _refuse_unlike(file, family, head_dim)
    weights = list(find_weights_of(file))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise damaged(f"{file.path} lacks token_embd.weight")
    config = {
        "model_type": family.model_type,
        "dtype": _dtype(file),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": file.num_layers,
        "num_attention_heads": num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": file.number("context_length"),
        "rms_norm_eps": float(file.value("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "pad_token_id": None,
        **_tokens(file),
        "rope_parameters": rope_of(file, head_dim),
        **family.settings(file),
    }
    if "num_key_value_heads" not in config:
        config["num_key_value_heads"] = file.number("attention.head_count_kv", num_heads)
    is_all_experts = file.number("expert_count", 0) and file.value("feed_forward_length", None) is None
    if "intermediate_size" not in config and not is_all_experts:
        config["intermediate_size"] = file.number("feed_forward_length")
    has_bias = any(weight.name.endswith("_proj.bias") for weight in weights)
    if has_bias and family.has_optional_bias:
        config["attention_bias"] = True
    if any(weight.has_codes for weight in weights):
        config["quantization_config"] = {"quant_method": METHOD}
    return config


def _refuse_unlike(file: GgufFile, family: GgufFamily, head_dim: int) -> None:
    """Refuse metadata that say something which the family does not have here."""
    rotated = file.number("rope.dimension_count", head_dim)
    window = file.number("attention.sliding_window", 0)
    for key, is_wrong, said in (
        ("expert_count", bool(file.value("expert_count", 0)), "a mixture of experts"),
        ("expert_shared_count", bool(file.value("expert_shared_count", 0)), "of shared experts"),
        (
            "expert_weights_scale",
            file.value("expert_weights_scale", 1) not in (0, 1),
            "of experts that are scaled",
        ),
        ("rope.dimension_count", rotated != head_dim, "rotated in part"),
        (
            "attention.value_length",
            file.number("attention.value_length", head_dim) != head_dim,
            "of values unlike keys",
        ),
        ("attention.sliding_window", 0 < window < file.number("context_length"), "of a sliding window"),
        ("attention.causal", not file.value("attention.causal", True), "of attention to later tokens"),  # noqa: FBT003 -- the file's default
        *((key, bool(file.value(key, 0)), said) for key, said in _CHANGES_OF_RESULTS.items()),
    ):
        if is_wrong and key not in family.keys:
            raise StartupError(
                f"{file.path.name} is {said} ({file.architecture}.{key} {file.value(key)}), which is not "
                "read from GGUF",
                fix="serve embeddings from the model's safetensors"
                if key == "pooling_type"
                else "take the model's safetensors",
            )


def _dtype(file: GgufFile) -> str:
    """bfloat16, unless all matrices are float32."""
    matrices = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return "float32" if matrices == {GgufType.F32} else "bfloat16"


def _tokens(file: GgufFile) -> dict[str, Any]:
    """Ids of tokens that begin and end a text."""
    metadata = file.metadata
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    kinds = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    named = named_ids(file)
    ends = [named.get(name) for name in ("eos", "eot", "eom")]
    by_name = ends_of(tokens)
    if_control = _ENDS_IF_CONTROL | (_ENDS_OF_GLM if file.architecture in _GLMS else frozenset())
    ends += [
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if token in by_name or (kind == CONTROL and token in if_control)
    ]
    found = {
        "bos_token_id": named.get("bos"),
        "pad_token_id": named.get("padding"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)) or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def named_ids(file: GgufFile) -> dict[str, int]:
    """Ids of tokens by their names in the file, without those that are beyond its tokens."""
    tokens = file.metadata.get("tokenizer.ggml.tokens") or []
    ids = {name: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _NAMED}
    return {name: found for name, found in ids.items() if isinstance(found, int) and 0 <= found < len(tokens)}


def ends_of(tokens: Collection[str]) -> frozenset[str]:
    """Choose the tokens that end a reply by their names."""
    found = _ENDS.intersection(tokens)
    return found - {part for others, part in _PARTS_OF_REPLIES if others <= found}
