"""Corrections of what transformers' models compute by the batch that a token is in, and not by its sequence.

Owns: two of them, made once at load. Rotary embeddings that choose their frequencies by the longest sequence
of a batch choose for good: otherwise one sequence's length would change the tokens of others, and keys in the
cache would no longer agree with queries. Attention temperatures that are derived from the place of a token in
its batch are derived from its position.
Never: computes a rotation, or changes layers that get positions; they are right by themselves.
Sources: rope types `dynamic` and `longrope` of transformers' modeling_rope_utils; temperature tuning of
layers without rotation in transformers' Llama 4 (arXiv:2501.19399).

Shapes: T tokens, N numbers of a projection's output.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from worker.worker_errors import StartupError

_CHOOSING = ("dynamic", "longrope")


def longest_right_len(text_config: Any, checkpoint_len: int, asked_len: int | None) -> int:
    """Cut the context window to what one fixed choice of frequencies can serve.

    `dynamic` stretches its frequencies anew with each token beyond the trained window, which no KV
    cache can follow: up to the trained window it is the plain rotation, beyond it we refuse.
    """
    if "dynamic" not in rope_types(text_config):
        return checkpoint_len
    trained_len = min(checkpoint_len, int(text_config.max_position_embeddings))
    if asked_len is not None and asked_len > trained_len:
        raise StartupError(
            f"max_model_len {asked_len}: dynamic rope changes all rotations beyond {trained_len} tokens, "
            "which a KV cache cannot follow",
            fix=f"ask for --max-model-len {trained_len} or less",
        )
    return trained_len


def fix_rope(model: nn.Module, text_config: Any, max_model_len: int) -> None:
    """Choose frequencies for good. Longrope gets its long ones if any sequence may outgrow the short ones.

    Left to itself, a module looks at the positions of each batch, for which the host waits on a GPU.
    """
    choices = [
        (layer_type, rope["rope_type"], _deciding_position(text_config, rope, max_model_len))
        for layer_type, rope in _rope_dicts(text_config)
        if rope.get("rope_type") in _CHOOSING
    ]
    for module in model.modules():
        if hasattr(module, "rope_type"):
            for layer_type, rope_type, position in choices:
                _choose(module, layer_type, rope_type, position)


def _deciding_position(text_config: Any, rope: dict[str, Any], max_model_len: int) -> int:
    """Return a length whose frequencies all sequences shall have."""
    if rope["rope_type"] == "longrope":
        original = rope.get("original_max_position_embeddings")
        short_len = int(original or text_config.original_max_position_embeddings)
        return short_len if max_model_len > short_len else 0
    return 0  # no sequence outgrows what dynamic rope was trained on: `longest_right_len`


def _choose(module: Any, layer_type: str | None, rope_type: str, position: int) -> None:
    types = module.rope_type
    if (types if layer_type is None else types.get(layer_type)) != rope_type:
        return
    # One call at the position makes the module choose; the relabelling keeps it from choosing again.
    device = next(module.buffers()).device
    arguments = () if layer_type is None else (layer_type,)
    with torch.no_grad():
        module(torch.zeros((1, 1, 1), device=device), torch.tensor([[position]], device=device), *arguments)
    if layer_type is None:
        module.rope_type = "default"
    else:
        types[layer_type] = "default"


def rope_types(text_config: Any) -> set[str]:
    """Name the types of a model's rotary embeddings, which kinds of layers may have of their own."""
    return {str(rope.get("rope_type")) for _, rope in _rope_dicts(text_config)}


def _rope_dicts(text_config: Any) -> Iterator[tuple[str | None, dict[str, Any]]]:
    rope = getattr(text_config, "rope_parameters", None) or {}
    if "rope_type" in rope:
        yield None, rope
    else:
        yield from ((layer_type, each) for layer_type, each in rope.items() if isinstance(each, dict))


class _Positions:
    """The positions of the forward pass that is under way."""

    def __init__(self) -> None:
        self.position_ids_1T: Tensor | None = None
        """Positions; None for one sequence from its beginning."""

    def note(self, _model: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        """A forward pre-hook."""
        self.position_ids_1T = kwargs.get("position_ids")


def fix_temperatures(model: nn.Module) -> None:
    """Scale queries where they are projected: these layers do not change them in between."""
    tuned: list[Any] = [
        module
        for module in model.modules()
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope
    ]
    if not tuned:
        return
    positions = _Positions()
    model.register_forward_pre_hook(positions.note, with_kwargs=True)
    for attention in tuned:
        attention.attn_temperature_tuning = False
        attention.q_proj.register_forward_hook(
            partial(_scale_queries, positions, attention.floor_scale, attention.attn_scale)
        )


def _scale_queries(
    positions: _Positions, floor_scale: int, attn_scale: float, _module: nn.Module, _args: Any, out: Tensor
) -> Tensor:
    """A forward hook of a projection to [1, T, N]."""
    position_ids_1T = positions.position_ids_1T
    if position_ids_1T is None:
        position_ids_1T = torch.arange(out.shape[1], device=out.device)[None]
    steps_1T = torch.floor((position_ids_1T.float() + 1.0) / floor_scale)
    temperatures_1T = torch.log1p(steps_1T) * attn_scale + 1.0
    return (out * temperatures_1T[..., None]).to(out.dtype)
