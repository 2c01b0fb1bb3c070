"""Attention temperatures that a model derives from the place of a token in its batch.

Owns: deriving them from the token's position instead. In a flattened batch the two differ: the model would
take the tokens of a neighbour for earlier ones of the same sequence.
Never: layers that get positions; they are right by themselves.
Source: temperature tuning of layers without rotation in transformers' Llama 4 (arXiv:2501.19399).

Shapes: T tokens, N numbers of a projection's output.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


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
