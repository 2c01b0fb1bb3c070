"""The sizes that config.json names against the weights that are there, before a model of such sizes is built.

Owns: the refusal of layers and widths that no file of this length can hold, and of numbers that make NaN.
Never: knows a family: whether all shapes fit is found where the model is built.
"""

from collections.abc import Iterator
from math import inf, isnan
from typing import Any

from worker.checkpoint.checkpoint_files import WeightFile
from worker.worker_errors import StartupError

_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_WIDTHS = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts", "n_routed_experts"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("intermediate_size_mlp", "shared_expert_intermediate_size", "expert_ffn_hidden_size"),
)


_POSITIVE = ("rope_theta", "softcapping", "softcap")
"""Ends of the names of numbers that divide, or are raised to a power."""


def check_sizes(config: dict[str, Any], files: list[WeightFile]) -> None:
    """Refuse more layers than tensors, widths beyond all bytes of weights, and NaN. Raises StartupError."""
    num_tensors = sum(len(file.tensors) for file in files)
    num_bytes = sum(file.num_bytes for file in files)
    for part in (config, *_objects(config)):
        _check_numbers(part)
        for keys, most, counted in ((_LAYERS, num_tensors, "tensors"), (_WIDTHS, num_bytes, "bytes")):
            for key in keys:
                value = part.get(key)
                if isinstance(value, int) and not 0 <= value <= most:
                    raise StartupError(
                        f"config.json has {key} {str(value)[:40]}, and its weights have {most} {counted}",
                        fix="take the checkpoint from a source that you trust",
                    )


def _check_numbers(part: dict[str, Any]) -> None:
    for key, value in part.items():
        if isinstance(value, float) and (isnan(value) or (key.endswith(_POSITIVE) and not 0 <= value < inf)):
            raise StartupError(
                f"config.json has {key} {value}, with which nothing can be computed",
                fix="correct that file, or take it from a source that you trust",
            )


def _objects(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the configurations of parts, such as text_config, and theirs, such as rope_parameters."""
    for value in config.values():
        if isinstance(value, dict):
            yield value
            yield from (each for each in value.values() if isinstance(each, dict))
