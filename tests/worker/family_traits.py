"""Demands of a model on attention, seen from one call, and the kinds of its layers.

Owns: the words for it.
Never: the model's configuration: a key may be there and mean nothing.
"""

from typing import Any

import torch
from torch import Tensor

from worker.attention.interface import AttentionOptions, active
from worker.attention.probe_attention import ProbeAttention

_HEAD_NORMS = ("q_norm", "k_norm", "qk_norm", "q_layernorm", "query_layernorm")


class _Noting(ProbeAttention):
    def __init__(self) -> None:
        super().__init__()
        self.options: list[AttentionOptions] = []
        self.attended: list[int] = []
        """Layers other than those of index keys."""
        self.num_query_heads = 0

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        self.options.append(options)
        self.attended.append(layer_idx)
        self.num_query_heads = query.shape[0]
        return super().attend(layer_idx, query, key, value, options)


def find_traits(model: Any) -> tuple[str, ...]:
    """Call a model that is set to our attention; say what is not the same everywhere."""
    noting = _Noting()
    with torch.inference_mode(), active(noting):
        model(input_ids=torch.zeros((1, 2), dtype=torch.long), use_cache=False)
    shapes, options = [noting.shapes[layer_idx] for layer_idx in noting.attended], noting.options
    sizes = {(shape.num_heads, shape.key_dim, shape.value_dim) for shape in shapes}
    names = [name for name, _ in model.named_modules()]
    parts = {part for name in names if ".indexer." not in name for part in name.split(".")}
    traits = {
        "grouped heads": any(shape.num_heads < noting.num_query_heads for shape in shapes),
        "sliding window": any(each.lifetime.window for each in options),
        "chunked attention": any(each.lifetime.chunk for each in options),
        "soft cap": any(each.softcap is not None for each in options),
        "sinks": any(each.sinks is not None for each in options),
        "keys and values of different size": any(shape.key_dim != shape.value_dim for shape in shapes),
        "layers of different shape": len(sizes) > 1,
        "norms of queries and keys": not parts.isdisjoint(_HEAD_NORMS),
        "compressed keys and values": "kv_a_layernorm" in parts,
        "a choice of keys": "indexer" in parts,
        "experts": any("experts" in part for part in parts),
        "no rotation": not any("rotary" in part for part in parts),
    }
    return tuple(name for name, is_so in traits.items() if is_so)
