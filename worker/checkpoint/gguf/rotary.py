"""Rotary embeddings of a GGUF file as the parameters that transformers' configurations have."""

import math
import struct
from typing import Any

from worker.checkpoint.gguf.file import GgufFile, GgufType, other_file, other_form

_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
# Llama 3.1 and later were trained with these; Llama 4 with the same one for both.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA4 = _LLAMA3 | {"high_freq_factor": 1.0}
_FREQUENCY_TOLERANCE = 1e-4
_DEFAULT_THETA = 10000.0
_LOCAL_THETA = 10000.0
_NEVER_TURNED = 1e20
"""Divisor from which on a pair is not rotated at all."""
_WITH_LOG = frozenset({"deepseek2", "mistral3"})
_WITH_LOCAL = frozenset({"gemma3", "gemma4"})
_INTERLEAVED, _TEXT_OF_SEEING = "qwen35", ("qwen2vl", "qwen3vl")
"""Families of positions in three parts, which are equal in text. Those of the second are read as plain."""


def rope_of(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Return the parameters. Raises StartupError for what no family here has."""
    theta = float(file.value("rope.freq_base", _DEFAULT_THETA))
    factor = float(file.value("rope.scaling.factor", file.value("rope.scale_linear", 0)))
    default = "linear" if factor not in (0, 1) else "none"
    kind = file.value("rope.scaling.type", default)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if _LONG in file.tensors:
        rope, kind = _longrope(file, theta), "none"
    elif _FREQUENCIES in file.tensors:
        read = _proportional if file.architecture == "gemma4" else _llama3
        rope = read(file, theta, head_dim)
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor or float(file.value("rope.scaling.factor"))}
    elif kind == "yarn":
        rope |= _yarn(file)
    _refuse_unlike(file, kind)
    rotated = file.number("rope.dimension_count", head_dim)
    # Heads with latents have a part that is rotated, and its size is a setting of their own.
    if rotated != head_dim and file.value("attention.kv_lora_rank", None) is None:
        rope["partial_rotary_factor"] = rotated / head_dim
    sections = file.value("rope.dimension_sections", None)
    if sections is not None and file.architecture.startswith(_INTERLEAVED):
        rope |= {"mrope_section": [each for each in sections if each], "mrope_interleaved": True}
    if file.architecture not in _WITH_LOCAL:
        return rope
    local = {"rope_type": "default", "rope_theta": float(file.value("rope.freq_base_swa", _LOCAL_THETA))}
    return {"full_attention": rope, "sliding_attention": local}


def _refuse_unlike(file: GgufFile, kind: str) -> None:
    """Refuse settings that would be passed over."""

    def is_set(name: str, neutral: float | None = None) -> bool:
        return bool(file.value(f"rope.{name}", neutral) != neutral)

    window_dim = file.value("attention.key_length_swa", None)
    found = {
        "scaling.yarn_attn_factor": is_set("scaling.yarn_attn_factor"),
        "scaling.alpha": is_set("scaling.alpha"),
        "scaling.yarn_ext_factor": is_set("scaling.yarn_ext_factor", 1),
        "scaling.attn_factor": _LONG not in file.tensors and is_set("scaling.attn_factor", 1),
        "scaling.yarn_log_multiplier": file.architecture not in _WITH_LOG
        and is_set("scaling.yarn_log_multiplier", 0),
        # Queries are scaled by their place where angles are stretched, see _yarn.
        "scaling.type": kind
        not in (("yarn",) if file.value("attention.temperature_scale", 0) else ("none", "linear", "yarn")),
        "dimension_count_swa": is_set("dimension_count_swa", window_dim),
        "dimension_sections": not file.architecture.startswith((_INTERLEAVED, *_TEXT_OF_SEEING))
        and is_set("dimension_sections"),
    }
    for name, is_wrong in found.items():
        if is_wrong:
            value = str(file.value(f"rope.{name}"))[:80]
            raise other_form(
                f"{file.path.name} has {file.architecture}.rope.{name} {value}, which is not read from GGUF"
            )


def _yarn(file: GgufFile) -> dict[str, Any]:
    found = {
        "rope_type": "yarn",
        "factor": float(file.value("rope.scaling.factor")),
        "original_max_position_embeddings": file.number(
            "rope.scaling.original_context_length", file.number("context_length")
        ),
    }
    for name in ("beta_fast", "beta_slow"):
        value = file.value(f"rope.scaling.yarn_{name}", None)
        if value is not None:
            found[name] = float(value)
    if file.architecture == "gpt-oss":
        found["truncate"] = False
    log = file.value("rope.scaling.yarn_log_multiplier", 0)
    if log:
        # Files of DeepSeek have a tenth of it.
        scale = round(float(log) * (10 if file.architecture == "deepseek2" else 1), 4)
        found |= {"mscale": scale, "mscale_all_dim": scale}
    temperature = file.value("attention.temperature_scale", 0)
    if temperature:
        found["llama_4_scaling_beta"] = float(temperature)
    return found


def _longrope(file: GgufFile, theta: float) -> dict[str, Any]:
    original, longest = file.number("rope.scaling.original_context_length"), file.number("context_length")
    scale = max(1.0, longest / max(1, original))
    expected = math.sqrt(1 + math.log(scale) / math.log(max(2, original)))
    stored = float(file.value("rope.scaling.attn_factor", expected))
    if not math.isclose(stored, expected, rel_tol=_FREQUENCY_TOLERANCE) or _SHORT not in file.tensors:
        raise other_form(
            f"{file.path.name} has {_LONG} with {file.architecture}.rope.scaling.attn_factor {stored}"
        )
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "original_max_position_embeddings": original,
        "long_factor": _read_floats(file, _LONG),
        "short_factor": _read_floats(file, _SHORT),
    }


def _proportional(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the share of pairs that are rotated; the others have a divisor beyond all positions."""
    divisors = _read_floats(file, _FREQUENCIES)
    num_turned = sum(each == 1 for each in divisors)
    never_turned = divisors[num_turned:]
    if len(divisors) * 2 != head_dim or any(each < _NEVER_TURNED for each in never_turned):
        raise other_form(f"{_FREQUENCIES} holds frequencies that are not those of Gemma 4")
    share = num_turned / len(divisors)
    return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": share}


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the parameters whose divisors of frequencies are those in the file. Raises StartupError."""
    divisors = _read_floats(file, _FREQUENCIES)
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": round(max(divisors), 3)}
    rope |= _LLAMA4 if file.architecture == "llama4" else _LLAMA3
    expected = [_divisor(rope, theta ** (2 * index / head_dim)) for index in range(head_dim // 2)]
    if len(divisors) != len(expected) or not all(
        math.isclose(one, other, rel_tol=_FREQUENCY_TOLERANCE)
        for one, other in zip(divisors, expected, strict=True)
    ):
        raise other_form(
            f"{_FREQUENCIES} holds frequencies that are not those of Llama 3.1 and later, for "
            f"{file.architecture}.rope.freq_base {theta:g}"
        )
    return rope


def _divisor(rope: dict[str, Any], inverse_frequency: float) -> float:
    """The divisor of a frequency, by the length of its wave."""
    wavelength = 2 * math.pi * inverse_frequency
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] / wavelength
    share = min(1.0, max(0.0, (turns - low) / (high - low))) if high > low else float(turns >= low)
    return float(1 / ((1 - share) / rope["factor"] + share))


def _read_floats(file: GgufFile, name: str) -> list[float]:
    tensor = file.tensors[name]
    if tensor.type is not GgufType.F32 or tensor.num_bytes > 1 << 16:
        raise other_file(f"{name} is {list(tensor.shape)} {tensor.type.name}")
    with tensor.path.open("rb") as stream:
        stream.seek(tensor.start)
        return [value for (value,) in struct.iter_unpack("<f", stream.read(tensor.num_bytes))]
