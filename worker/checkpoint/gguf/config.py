"""Translation of a GGUF file's metadata into config.json, and of its names into those of the model's weights.

Owns: the families that are read from such files, and the changes of each of their tensors.
Never: reads tensors but the few numbers of rotary frequencies, or knows the tokenizer.
Source: the names and metadata that llama.cpp's converter writes.
"""

import math
import re
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from worker.checkpoint.gguf.file import GgufFile, GgufTensor, GgufType
from worker.worker_errors import StartupError

METHOD = "gguf"
"""Its quant_method: see worker/quantized/gguf_blocks.py."""
BLOCKS = "gguf"
"""Last name of a tensor of blocks."""
_ROPE_FREQUENCIES = "rope_freqs.weight"
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TWO_NORMS = {"ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Llama 3.1 and later were trained with these.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_FREQUENCY_TOLERANCE = 1e-4
_DEFAULT_THETA = 10000.0
_OTHER_SCALING = ("attn_factor", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")
"""Settings of rotary embeddings that are refused."""
_GEMMA_EXTRAS = {"hidden_activation": "gelu_pytorch_tanh"}
# Models with these numbers of layers divide queries by another number than the size of a head.
_ODD_SCALED_LAYERS = {"gemma2": 46, "gemma3": 62}
_WINDOW_PATTERNS = {"gemma2": 2, "gemma3": 6}
_DEFAULT_WINDOWS = {"gemma2": 4096}
_LOCAL_THETA = 10000.0
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
_PARTS_OF_REPLIES = (({"<|return|>", "<|call|>"}, "<|end|>"), ({"<|calls|>", "<|flush|>"}, "<|end|>"))
"""Tokens beside which another one ends a part of a reply alone."""
CONTROL = 3
"""Type of a token that text never becomes."""


@dataclass(frozen=True, slots=True)
class _Experts:
    """Names of a mixture of experts in the model: of its modules, and of its configuration's keys."""

    router: str
    of_expert: dict[str, str]
    """The module of an expert for each stack of theirs, with a place for its number."""
    keys: dict[str, str]
    """The configuration's key for each of the file's."""


@dataclass(frozen=True, slots=True)
class _Family:
    model_type: str
    architecture: str
    norms: dict[str, str]
    interleaves_heads: bool = False
    """Rows of queries and keys are ordered so that both numbers of a rotary pair are neighbours."""
    adds_one_to_norms: bool = False
    is_gemma: bool = False
    experts: _Experts | None = None


_NUM_CHOSEN = {"expert_used_count": "num_experts_per_tok"}
_QWEN3_EXPERTS = _Experts(
    router="mlp.gate",
    of_expert={f"ffn_{each}_exps": f"mlp.experts.{{}}.{each}_proj" for each in ("gate", "up", "down")},
    keys={
        "expert_count": "num_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        **_NUM_CHOSEN,
    },
)
_MIXTRAL_EXPERTS = _Experts(
    router="block_sparse_moe.gate",
    of_expert={
        f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{name}"
        for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    keys={"expert_count": "num_local_experts", **_NUM_CHOSEN},
)
_MIXTRAL = _Family(
    "mixtral", "MixtralForCausalLM", _TWO_NORMS, interleaves_heads=True, experts=_MIXTRAL_EXPERTS
)
_MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
"""Numbers of Granite, and their names in its configuration."""
_WITH_BIAS_BY_CHOICE = frozenset({"llama", "qwen3", "qwen3_moe", "smollm3", "granite"})
_FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM", _TWO_NORMS, interleaves_heads=True),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM", _TWO_NORMS),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM", _TWO_NORMS),
    "qwen3moe": _Family("qwen3_moe", "Qwen3MoeForCausalLM", _TWO_NORMS, experts=_QWEN3_EXPERTS),
    "smollm3": _Family("smollm3", "SmolLM3ForCausalLM", _TWO_NORMS, interleaves_heads=True),
    "granite": _Family("granite", "GraniteForCausalLM", _TWO_NORMS, interleaves_heads=True),
    "gemma": _Family("gemma", "GemmaForCausalLM", _TWO_NORMS, adds_one_to_norms=True, is_gemma=True),
    "gemma2": _Family("gemma2", "Gemma2ForCausalLM", _FOUR_NORMS, adds_one_to_norms=True, is_gemma=True),
    "gemma3": _Family("gemma3_text", "Gemma3ForCausalLM", _FOUR_NORMS, adds_one_to_norms=True, is_gemma=True),
}


@dataclass(frozen=True, slots=True)
class GgufWeight:
    """One weight of the model, and the change of its numbers."""

    name: str
    """The model's name for it; the last part is BLOCKS where it is stored as blocks."""
    tensor: GgufTensor
    num_interleaved_heads: int
    """Heads whose rows are to be put in halves; 0: the rows are in order."""
    added: float
    """Number that is to be subtracted from all numbers."""


def find_weights_of(file: GgufFile) -> Iterator[GgufWeight]:
    """Yield all weights. Raises StartupError for a tensor that the family does not have."""
    family = _family_of(file)
    heads = {
        "attn_q": _number(file, "attention.head_count"),
        "attn_k": _number(file, "attention.head_count_kv", _number(file, "attention.head_count")),
    }
    for stored, tensor in file.tensors.items():
        if stored == _ROPE_FREQUENCIES:
            continue  # config.json says it
        stack = _LAYER.fullmatch(stored)
        if stack is not None and family.experts is not None and stack[2] in family.experts.of_expert:
            yield from _experts_in(file, family.experts, stack, tensor)
            continue
        module, kind, part = _module_of(file, family, stored)
        is_matrix = kind == "weight" and len(tensor.shape) == 2
        if not tensor.type.is_plain and not is_matrix:
            raise StartupError(
                f"{stored} is stored as {tensor.type.name}, but it is no matrix", fix="take another GGUF file"
            )
        yield GgufWeight(
            name=f"{module}.{kind if tensor.type.is_plain else BLOCKS}",
            tensor=tensor,
            num_interleaved_heads=heads.get(part, 0) if family.interleaves_heads else 0,
            added=1.0 if family.adds_one_to_norms and part.endswith("norm") else 0.0,
        )


def _experts_in(
    file: GgufFile, experts: _Experts, stack: re.Match[str], tensor: GgufTensor
) -> Iterator[GgufWeight]:
    """Yield the matrix of each expert, which lie one behind the other."""
    num_experts = _number(file, "expert_count")
    if stack[3] != "weight" or len(tensor.shape) != 3 or tensor.shape[0] != num_experts or not num_experts:
        raise StartupError(
            f"{stack[0]} is {list(tensor.shape)}, and not a stack of {num_experts} matrices",
            fix="take another GGUF file, or the model's safetensors",
        )
    num_bytes = tensor.num_bytes // num_experts
    name = f"model.layers.{stack[1]}.{experts.of_expert[stack[2]]}"
    kind = "weight" if tensor.type.is_plain else BLOCKS
    for number in range(num_experts):
        part = GgufTensor(tensor.type, tensor.shape[1:], tensor.start + number * num_bytes, num_bytes)
        yield GgufWeight(f"{name.format(number)}.{kind}", part, num_interleaved_heads=0, added=0.0)


def config_of(file: GgufFile) -> dict[str, Any]:
    """config.json. Raises StartupError, with the name of a key or tensor that is not supported."""
    family = _family_of(file)
    num_heads, hidden_size = _number(file, "attention.head_count"), _number(file, "embedding_length")
    head_dim = _number(file, "attention.key_length", hidden_size // max(1, num_heads))
    _refuse_unlike(file, head_dim)
    weights = list(find_weights_of(file))
    names = {weight.name for weight in weights}
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise StartupError(f"{file.path} lacks token_embd.weight", fix="download it again")
    config = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "dtype": _dtype(file),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _number(file, "feed_forward_length"),
        "num_hidden_layers": _num_layers(file),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _number(file, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": _number(file, "context_length"),
        "rms_norm_eps": float(_value(file, "attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_tokens(file),
        **_rope(file, family, head_dim),
    }
    has_bias = any(name.endswith("_proj.bias") for name in names)
    if has_bias and family.model_type in _WITH_BIAS_BY_CHOICE:
        config["attention_bias"] = True
    if family.experts is not None:
        config |= {key: _number(file, stored) for stored, key in family.experts.keys.items()}
        config |= {"norm_topk_prob": True}
    if family.model_type == "granite":
        config |= {key: float(_value(file, stored)) for stored, key in _MULTIPLIERS.items()}
    if family.is_gemma:
        config |= _gemma(file, hidden_size, num_heads, head_dim)
    types = {
        weight.name.removesuffix(f".{BLOCKS}"): {
            "type": weight.tensor.type.name,
            "interleaved_heads": weight.num_interleaved_heads,
        }
        for weight in weights
        if not weight.tensor.type.is_plain
    }
    return config | ({"quantization_config": {"quant_method": METHOD, "modules": types}} if types else {})


def _family_of(file: GgufFile) -> _Family:
    family = _FAMILIES.get(file.architecture)
    if file.architecture == "llama" and file.metadata.get("llama.expert_count"):
        family = _MIXTRAL
    if family is None:
        raise StartupError(
            f"{file.path.name} holds a model of the family {file.architecture}",
            fix=f"take a GGUF file of {', '.join(_FAMILIES)}, or the model's safetensors",
        )
    return family


def _module_of(file: GgufFile, family: _Family, stored: str) -> tuple[str, str, str]:
    """Module, weight or bias, and the part of the layer."""
    found = _LAYER.fullmatch(stored)
    if found is not None:
        routers = {"ffn_gate_inp": family.experts.router} if family.experts else {}
        inner = (_LAYER_NAMES | family.norms | routers).get(found[2])
        if inner is not None and int(found[1]) < _number(file, "block_count"):
            return f"model.layers.{found[1]}.{inner}", found[3], found[2]
    part, _, kind = stored.rpartition(".")
    if part in _TOP_NAMES and kind == "weight":
        return _TOP_NAMES[part], kind, part
    raise StartupError(
        f"{stored} is no tensor that is known of the family {file.architecture}",
        fix="take another GGUF file, or the model's safetensors",
    )


def _refuse_unlike(file: GgufFile, head_dim: int) -> None:
    """Refuse metadata that say something which the families here do not have."""
    metadata, family = file.metadata, file.architecture
    rotated = _number(file, "rope.dimension_count", head_dim)
    for key, is_wrong, said in (
        (
            f"{family}.expert_count",
            _family_of(file).experts is None and bool(metadata.get(f"{family}.expert_count")),
            "a mixture of experts",
        ),
        (
            f"{family}.expert_shared_count",
            bool(metadata.get(f"{family}.expert_shared_count")),
            "of shared experts",
        ),
        (
            f"{family}.expert_weights_scale",
            metadata.get(f"{family}.expert_weights_scale", 1) not in (0, 1),
            "of experts that are scaled",
        ),
        (f"{family}.rope.dimension_count", rotated != head_dim, "rotated in part"),
        (
            f"{family}.attention.value_length",
            _number(file, "attention.value_length", head_dim) != head_dim,
            "of values unlike keys",
        ),
    ):
        if is_wrong:
            raise StartupError(
                f"{file.path.name} is {said} ({key} {metadata[key]}), which is not read from GGUF",
                fix="take the model's safetensors",
            )


def _dtype(file: GgufFile) -> str:
    """bfloat16, unless all matrices are float32."""
    matrices = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return "float32" if matrices == {GgufType.F32} else "bfloat16"


def _tokens(file: GgufFile) -> dict[str, Any]:
    """Ids of tokens that begin and end a text."""
    metadata = file.metadata
    tokens, kinds = (
        metadata.get("tokenizer.ggml.tokens") or [],
        metadata.get("tokenizer.ggml.token_type") or [],
    )
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    by_name = ends_of(tokens)
    ends += [
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if token in by_name or (kind == CONTROL and token in _ENDS_IF_CONTROL)
    ]
    found = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)) or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def ends_of(tokens: Collection[str]) -> frozenset[str]:
    """Choose the tokens that end a reply by their names."""
    found = _ENDS.intersection(tokens)
    return found - {part for others, part in _PARTS_OF_REPLIES if others <= found}


def _rope(file: GgufFile, family: _Family, head_dim: int) -> dict[str, Any]:
    theta = float(_value(file, "rope.freq_base", _DEFAULT_THETA))
    factor = float(_value(file, "rope.scaling.factor", _value(file, "rope.scale_linear", 0)))
    kind = _value(file, "rope.scaling.type", "linear" if factor not in (0, 1) else "none")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if _ROPE_FREQUENCIES in file.tensors:
        rope = _llama3(file, theta, head_dim)
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor or float(_value(file, "rope.scaling.factor"))}
    elif kind == "yarn":
        original = _number(file, "rope.scaling.original_context_length")
        rope |= {"rope_type": "yarn", "factor": float(_value(file, "rope.scaling.factor"))}
        rope["original_max_position_embeddings"] = original
    if kind not in ("none", "linear", "yarn") or any(
        f"{file.architecture}.rope.scaling.{name}" in file.metadata for name in _OTHER_SCALING
    ):
        raise StartupError(
            f"{file.path.name} scales rotary embeddings by {kind}, with settings that are not read from GGUF",
            fix="take the model's safetensors",
        )
    if family.model_type != "gemma3_text":
        return {"rope_parameters": rope}
    local = {"rope_type": "default", "rope_theta": float(_value(file, "rope.freq_base_swa", _LOCAL_THETA))}
    return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the parameters whose divisors of frequencies are those in the file. Raises StartupError."""
    divisors = _read_floats(file, file.tensors[_ROPE_FREQUENCIES])
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": round(max(divisors), 3), **_LLAMA3}
    expected = [_divisor(rope, theta ** (2 * index / head_dim)) for index in range(head_dim // 2)]
    if len(divisors) != len(expected) or not all(
        math.isclose(one, other, rel_tol=_FREQUENCY_TOLERANCE)
        for one, other in zip(divisors, expected, strict=True)
    ):
        raise StartupError(
            f"{_ROPE_FREQUENCIES} holds frequencies that are not those of Llama 3.1 and later",
            fix="take the model's safetensors",
        )
    return rope


def _divisor(rope: dict[str, Any], inverse_frequency: float) -> float:
    """The divisor of a frequency, by the length of its wave."""
    wavelength = 2 * math.pi * inverse_frequency
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = (rope["original_max_position_embeddings"] / wavelength - low) / (high - low)
    share = min(1.0, max(0.0, share))
    return float(1 / ((1 - share) / rope["factor"] + share))


def _read_floats(file: GgufFile, tensor: GgufTensor) -> list[float]:
    if tensor.type is not GgufType.F32 or tensor.num_bytes > 1 << 16:
        raise StartupError(
            f"{_ROPE_FREQUENCIES} is {list(tensor.shape)} {tensor.type.name}", fix="take another GGUF file"
        )
    with file.path.open("rb") as stream:
        stream.seek(tensor.start)
        return [value for (value,) in struct.iter_unpack("<f", stream.read(tensor.num_bytes))]


def _gemma(file: GgufFile, hidden_size: int, num_heads: int, head_dim: int) -> dict[str, Any]:
    """Settings of Gemma's families beyond those of others."""
    found: dict[str, Any] = dict(_GEMMA_EXTRAS)
    family, num_layers = file.architecture, _num_layers(file)
    if family == "gemma":
        return found
    is_odd = num_layers == _ODD_SCALED_LAYERS[family]
    found["query_pre_attn_scalar"] = hidden_size // num_heads if is_odd else head_dim
    found["layer_types"] = _layer_types(file, num_layers)
    window = _number(file, "attention.sliding_window", _DEFAULT_WINDOWS.get(family, 0))
    if window:
        found["sliding_window"] = window
    caps = {"attn": 50.0, "final": 30.0} if family == "gemma2" else {"final": None}
    for part, default in caps.items():
        found[f"{part}_logit_softcapping"] = _value(file, f"{part}_logit_softcapping", default) or default
    return found


def _layer_types(file: GgufFile, num_layers: int) -> list[str]:
    family = file.architecture
    if not _number(file, "attention.sliding_window", _DEFAULT_WINDOWS.get(family, 0)):
        return ["full_attention"] * num_layers
    pattern = file.metadata.get(f"{family}.attention.sliding_window_pattern", _WINDOW_PATTERNS[family])
    if isinstance(pattern, list):
        slides = [bool(each) for each in pattern]
    else:
        slides = [pattern == 0 or (index + 1) % pattern != 0 for index in range(num_layers)]
    if len(slides) != num_layers:
        raise StartupError(
            f"{family}.attention.sliding_window_pattern is for {len(slides)} of {num_layers} layers",
            fix="take another GGUF file",
        )
    return ["sliding_attention" if each else "full_attention" for each in slides]


_NO_DEFAULT = object()


def _value(file: GgufFile, key: str, default: Any = _NO_DEFAULT) -> Any:
    """A value of the family. Raises StartupError where it is missing."""
    found = file.metadata.get(f"{file.architecture}.{key}", default)
    if found is _NO_DEFAULT:
        raise StartupError(
            f"{file.path.name} has no {file.architecture}.{key} in its metadata", fix="download it again"
        )
    return found


def _num_layers(file: GgufFile) -> int:
    found = _number(file, "block_count")
    if found > len(file.tensors):
        raise StartupError(
            f"{file.path.name} has {len(file.tensors)} tensors for {found} layers",
            fix="take another GGUF file",
        )
    return found


def _number(file: GgufFile, key: str, default: Any = _NO_DEFAULT) -> int:
    found = _value(file, key, default)
    if isinstance(found, list) and found and len(set(found)) == 1:
        found = found[0]  # one for each layer
    if not isinstance(found, int) or found < 0:
        raise StartupError(
            f"{file.architecture}.{key} is {str(found)[:80]}, and not one number",
            fix="take another GGUF file",
        )
    return found
