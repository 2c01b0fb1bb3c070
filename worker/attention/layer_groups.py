"""Groups of a model's layers by how long they keep tokens, and how many blocks a place of each takes.

Owns: the choice of groups, and of the size of a block, by the bytes of one sequence.

All blocks of the pool have one size. A place of a group, which is block_size tokens of all its layers, takes
a block for each stripe, and the layers of a group are dealt to its stripes one by one:

    all tokens      | layers 5 11 17 23 |
    window          | layers 0 4 9 14 |  | layers 1 6 10 15 |  | layers 2 7 12 |  ...

The group that keeps most has few stripes, and the largest of them is the size of a block.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from math import inf

from scheduler.cache_groups import ALL_TOKENS, CacheGroup, Lifetime, joint_lifetime
from worker.attention.kv_cache import BlockLayout, LayerGroup

_USUAL_TOKENS = 8192
"""Length of a sequence whose bytes decide about the size of a block."""
_MOST_STRIPES = 4
"""Most stripes of the group that keeps most."""
_WORTH = 0.97
"""Part of the bytes above which a division into more stripes is not worth their tables."""
_MOST_LIMITED = 3
"""Different windows and chunks; if there are more, the longest stands for all."""


def grouped(layout: BlockLayout, longest: int) -> BlockLayout:
    """Divide the layers of a layout into groups, if a sequence of `longest` tokens gains by that."""
    lifetimes = _lifetimes(layout, longest)
    if len(set(lifetimes.values())) <= 1:
        return layout
    best = _divided(layout, lifetimes, 1)
    for num_stripes in range(2, _MOST_STRIPES + 1):
        candidate = _divided(layout, lifetimes, num_stripes)
        if _size(candidate, _USUAL_TOKENS) < _WORTH * _size(best, _USUAL_TOKENS):
            best = candidate
    return best if _size(best, longest) < _WORTH * _size(layout, longest) else layout


def _lifetimes(layout: BlockLayout, longest: int) -> dict[int, Lifetime]:
    """Lifetime of each layer's group. What reaches back as far as any sequence is long is no limit."""
    found = {
        layer_idx: shape.lifetime if shape.lifetime.num_tokens < longest else ALL_TOKENS
        for layer_idx, shape in layout.layers.items()
    }
    limited = {lifetime for lifetime in found.values() if lifetime.is_limited}
    if len(limited) <= _MOST_LIMITED:
        return found
    joint = joint_lifetime(list(limited))
    return {layer_idx: joint if each.is_limited else each for layer_idx, each in found.items()}


def _divided(layout: BlockLayout, lifetimes: Mapping[int, Lifetime], num_stripes: int) -> BlockLayout:
    """Give `num_stripes` to the group that keeps most, and others as few as such blocks allow."""
    by_lifetime: dict[Lifetime, list[int]] = {}
    for layer_idx, lifetime in lifetimes.items():
        by_lifetime.setdefault(lifetime, []).append(layer_idx)
    keeps_most = max(by_lifetime, key=lambda each: each.num_tokens or inf)
    largest_layer = max(shape.numel for shape in layout.layers.values())
    block_size = max(largest_layer, _largest_stripe(layout, by_lifetime[keeps_most], num_stripes))
    division = []
    for lifetime, layers in by_lifetime.items():
        num = next(num for num in count(1) if _largest_stripe(layout, layers, num) <= block_size)
        division.append(LayerGroup(CacheGroup(lifetime, num), tuple(layers)))
    return replace(layout, division=tuple(division))


def _largest_stripe(layout: BlockLayout, layers: list[int], num_stripes: int) -> int:
    """Count the numbers of a token in the largest of `num_stripes` stripes."""
    stripes = [layers[stripe::num_stripes] for stripe in range(num_stripes)]
    return max(sum(layout.layers[layer_idx].numel for layer_idx in stripe) for stripe in stripes)


def _size(layout: BlockLayout, num_tokens: int) -> int:
    """Count the numbers that a sequence keeps."""
    return layout.block_numel * layout.most_blocks(num_tokens)
