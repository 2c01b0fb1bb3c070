"""Towers that compute a few rows at a time, so that they can pause within milliseconds.

Owns: the attention of towers, whose tokens see all others of their picture, and modules that compute their
rows in parts. All rows of a large picture take a tenth of a second and more.
Never: decides when a pause is due: a function is called at each point.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

TOWER_ATTENTION = "tokenyard_tower"
_ROWS_AT_ONCE = 256
_MAY_PAUSE = "may_pause"


class _RowsInParts(nn.Module):
    """A module whose outputs for a row depend on that row alone."""

    def __init__(self, module: nn.Module, may_pause: Callable[[], None], num_dims: int) -> None:
        """Take in how many dimensions, from the last on, are of one row."""
        super().__init__()
        self.module, self._may_pause, self._num_dims = module, may_pause, num_dims

    def __getattr__(self, name: str) -> Any:
        """Give what towers ask of the module itself, such as the dtype of its weight."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, x: Tensor) -> Tensor:
        """Compute all rows, at whatever dimensions they are."""
        own = x.dim() - self._num_dims
        rows, parts = x.reshape(-1, *x.shape[own:]), []
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            self._may_pause()
            parts.append(self.module(rows[start : start + _ROWS_AT_ONCE]))
        return torch.cat(parts).view(*x.shape[:own], *parts[0].shape[1:])


def cut_tower(tower: nn.Module, may_pause: Callable[[], None]) -> None:
    """Let a tower call `may_pause` before each of its parts, and within the larger ones."""
    for name, module in list(tower.named_modules()):
        setattr(module, _MAY_PAUSE, may_pause)
        if isinstance(module, nn.Linear):
            tower.set_submodule(name, _RowsInParts(module, may_pause, 1))
        elif isinstance(module, nn.Conv3d):
            tower.set_submodule(name, _RowsInParts(module, may_pause, 4))
        elif not any(True for _ in module.children()):
            module.register_forward_pre_hook(lambda *_: may_pause())


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend, called by transformers' modules: query [B, Hq, N, D], key and value [B, Hk, N, D]."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    parts = []
    for start in range(0, query.shape[2], _ROWS_AT_ONCE):
        getattr(module, _MAY_PAUSE)()
        rows = slice(start, start + _ROWS_AT_ONCE)
        mask = attention_mask if attention_mask is None else attention_mask[..., rows, :]
        parts.append(
            scaled_dot_product_attention(query[:, :, rows], key, value, attn_mask=mask, scale=scaling)
        )
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(TOWER_ATTENTION, _attend)
AttentionMaskInterface.register(TOWER_ATTENTION, sdpa_mask)
