"""Towers that compute a few rows at a time, so that they can pause within some ten milliseconds.

Owns: the attention of towers, whose tokens see all others of their picture, and modules that compute their
rows in parts. All rows of a large picture take a tenth of a second and more.
Never: decides when a pause is due: a function is called at each point.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from worker.adapters.adapted_linear import WrappedModule

TOWER_ATTENTION = "tokenyard_tower"
_LEAST_ROWS, _MOST_ROWS = 16, 256
_MOST_PRODUCTS = 2**30
"""Multiplications of a part: 12 ms of one core with bfloat16, and twice as much in attention."""
_ACTIVATIONS = (nn.GELU, nn.SiLU, nn.ReLU)
"""Activations of PyTorch that compute each number alone; so do all of `transformers.activations`."""
_PARTS = "parts_of_tower"


class TowerParts(NamedTuple):
    """The rule by which work is divided. It depends on shapes alone, as the last bits of results do."""

    may_pause: Callable[[], None]
    """Called before each part."""
    num_products: int
    """Multiplications of a part, about."""
    scale: int = 1
    """Work of a part on this device, in those of a CPU."""

    def num_rows(self, num_products: int) -> int:
        """Return the number of rows of a part, by the multiplications of a row."""
        wanted = self.scale * min(self.num_products, _MOST_PRODUCTS) // num_products
        return min(max(wanted, _LEAST_ROWS), self.scale * _MOST_ROWS)


class _RowsInParts(WrappedModule):
    """A module whose outputs for a row depend on that row alone."""

    def __init__(self, module: nn.Module, parts: TowerParts, num_dims: int) -> None:
        """Take in how many dimensions, from the last on, are of one row."""
        super().__init__(module)
        self._parts, self._num_dims = parts, num_dims

    def forward(self, x: Tensor) -> Tensor:
        """Compute all rows, at whatever dimensions they are."""
        own = x.dim() - self._num_dims
        rows, done = x.reshape(-1, *x.shape[own:]), []
        weight = getattr(self.inner, "weight", rows[:1])
        num_rows = self._parts.num_rows(weight.numel())
        for start in range(0, len(rows), num_rows):
            self._parts.may_pause()
            done.append(self.inner(rows[start : start + num_rows]))
        return torch.cat(done).view(*x.shape[:own], *done[0].shape[1:])


def cut_tower(tower: nn.Module, parts: TowerParts) -> None:
    """Let a tower pause before each of its parts, and within the larger ones."""
    for name, module in list(tower.named_modules()):
        setattr(module, _PARTS, parts)
        is_leaf = next(module.children(), None) is None
        is_of_transformers = type(module).__module__ == "transformers.activations"
        if isinstance(module, (nn.Linear, *_ACTIVATIONS)) or (is_leaf and is_of_transformers):
            tower.set_submodule(name, _RowsInParts(module, parts, 1))
        elif isinstance(module, nn.Conv3d):
            tower.set_submodule(name, _RowsInParts(module, parts, 4))
        elif is_leaf:
            module.register_forward_pre_hook(lambda *_: parts.may_pause())


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
    parts, done = getattr(module, _PARTS), []
    num_rows = parts.num_rows(4 * key.numel())
    for start in range(0, query.shape[2], num_rows):
        parts.may_pause()
        rows = slice(start, start + num_rows)
        mask = attention_mask if attention_mask is None else attention_mask[..., rows, :]
        done.append(
            scaled_dot_product_attention(query[:, :, rows], key, value, attn_mask=mask, scale=scaling)
        )
    return torch.cat(done, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(TOWER_ATTENTION, _attend)
AttentionMaskInterface.register(TOWER_ATTENTION, sdpa_mask)
