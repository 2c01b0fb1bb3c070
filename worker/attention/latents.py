"""Keys and values kept as latents, in the families of transformers that compress them (MLA).

Owns: the seam: such an attention module expands the latents of its tokens by `expand_kv`, right before it
calls attention. In its place it gives the latents themselves, one key for all heads, whose first numbers are
the value; `kv_b_proj`, the product that would have expanded them, goes to the queries and to the outputs.
Never: knows a family. A class without `expand_kv` keeps its keys and values as it computes them.
Source: multi-head latent attention, arXiv:2405.04434, appendix C.

    score  q . [W_key c, r]        =  [W_key^T q_nope, q_rope] . [c, r]
    sum    sum of w * W_value c    =  W_value (sum of w * c)

Shapes: T tokens, H query heads, L numbers of a latent c, R rotated numbers r that a latent carries, D numbers
of a key and V of a value of one head, without rotation.
"""

from collections.abc import Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.attention.interface import KEEPS_LATENTS, is_executing

EXPANSION = "kv_b_proj"
"""Name of the product that expands latents, in every family."""


class LatentSizes(NamedTuple):
    """Sizes of a layer's heads."""

    latent_dim: int
    key_dim: int
    """Numbers of a key that are not rotated."""
    value_dim: int


class LatentExpansion(nn.Module):
    """The product that expands latents, [T, L] to [T, H * (D + V)], and its two parts the other way round."""

    def __init__(self, weight: nn.Parameter, sizes: LatentSizes) -> None:
        super().__init__()
        self.weight, self.sizes = weight, sizes
        self._is_arranged = False

    def forward(self, latents: Tensor) -> Tensor:
        """Multiply [..., L] to [..., H * (D + V)]."""
        keys_HDL, values_HLV = self._parts()
        weight = torch.cat((keys_HDL, values_HLV.mT), dim=1).flatten(0, 1)
        return functional.linear(latents, weight if self._is_arranged else self.weight)

    def arrange(self) -> None:
        """Turn the values of each head round in memory, which makes `expand` five times as fast on CPUs."""
        keys_HDL, values_HLV = self._parts()
        numbers_HX = torch.cat((keys_HDL.flatten(1), values_HLV.flatten(1)), dim=1)
        self.weight = nn.Parameter(numbers_HX.view(self.weight.shape), requires_grad=False)
        self._is_arranged = True

    def split(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Divide rows [H * (D + V), ...] into those of keys [H, D, ...] and of values [H, V, ...]."""
        _, key_dim, value_dim = self.sizes
        by_head = numbers.view(-1, key_dim + value_dim, numbers.shape[-1])
        return by_head[:, :key_dim], by_head[:, key_dim:]

    def absorb(self, queries_HTD: Tensor) -> Tensor:
        """Turn queries [H, T, D + R] into those of latents [H, T, L + R]."""
        keys_HDL, _ = self._parts()
        plain_HTD, rotated_HTR = queries_HTD.tensor_split([self.sizes.key_dim], dim=-1)
        return torch.cat((plain_HTD @ keys_HDL.to(queries_HTD.device), rotated_HTR), dim=-1)

    def expand(self, sums_THL: Tensor) -> Tensor:
        """Turn weighed sums of latents into those of values [T, H, V]."""
        _, values_HLV = self._parts()
        sums_HTV = sums_THL.transpose(0, 1) @ values_HLV.to(sums_THL.device)
        return sums_HTV.transpose(0, 1)

    def _parts(self) -> tuple[Tensor, Tensor]:
        """Return the numbers of keys [H, D, L] and of values [H, L, V]."""
        keys_HDL, values_HVL = self.split(self.weight)
        if not self._is_arranged:
            return keys_HDL, values_HVL.mT
        return keys_HDL, values_HVL.flatten(1).view(len(values_HVL), self.sizes.latent_dim, -1)


def find_expansions(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Find the attention modules that compress, each with the name of the product that expands."""
    for name, module in model.named_modules():
        product = getattr(module, EXPANSION, None)
        if callable(getattr(module, "expand_kv", None)) and isinstance(product, nn.Module):
            yield f"{name}.{EXPANSION}", module


def keep_latents(model: nn.Module) -> None:
    """Let attention be given latents while a step is under way; without one a model computes as before."""
    for name, module in list(find_expansions(model)):
        product = model.get_submodule(name)
        if type(product) is not nn.Linear or product.bias is not None:
            continue
        sizes = LatentSizes(product.in_features, module.qk_nope_head_dim, module.v_head_dim)
        model.set_submodule(name, LatentExpansion(product.weight, sizes))
        module.expand_kv = MethodType(_give_latents, module)
        setattr(module, KEEPS_LATENTS, True)


def _give_latents(module: Any, latents_1NTL: Tensor, rotated_1NTR: Tensor) -> tuple[Tensor, Tensor]:
    """Stand in for `expand_kv`: keys [1, 1, T, L + R], of which the first L numbers are the values."""
    if not is_executing():
        keys, values = type(module).expand_kv(module, latents_1NTL, rotated_1NTR)
        return keys, values
    keys_1NTD = torch.cat((latents_1NTL, rotated_1NTR), dim=-1)
    return keys_1NTD, keys_1NTD[..., : latents_1NTL.shape[-1]]
