"""Attention of consecutive query tokens of one sequence over its gathered keys and values.

Owns: the mask of causality, windows and chunks, tiles that bound the memory of scores, the choice between
torch's fused kernel and explicit sums.

Shapes: H KV heads, G query heads per KV head, N queries, K keys, D key size, V value size.
The last query stands at the position of the last key; where a layer attends in chunks, the first key stands
at the beginning of one.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from scheduler.cache_groups import Lifetime
from worker.attention.interface import AttentionOptions, is_plain, softmax_with_sinks

# Numbers in the mask, or in the scores of all heads, of one tile: some MiB, so that they stay in cache.
_MOST_IN_TILE = 1 << 22
_SMALLEST_TILE = 16


def attend_densely(
    queries_HGND: Tensor,
    keys_HKD: Tensor,
    values_HKV: Tensor,
    options: AttentionOptions,
    seen_CNK: Tensor | None = None,
    ends_N: Tensor | None = None,
) -> Tensor:
    """Attend causally within the window, to what `seen_CNK` (see KeyChoice) leaves; returns [N, H * G, V].

    With `ends_N` each query sees the later keys before its end too.
    """
    num_heads, num_groups, num_queries, _ = queries_HGND.shape
    num_keys, value_dim = values_HKV.shape[1:]
    lifetime = options.lifetime
    is_causal = seen_CNK is None and ends_N is None
    fused = is_plain(options) and keys_HKD.shape[-1] == value_dim and is_causal
    if fused and num_queries == num_keys and (not lifetime.is_limited or lifetime.num_tokens >= num_keys):
        out_HGNV = scaled_dot_product_attention(
            queries_HGND,
            keys_HKD.unsqueeze(1).expand(-1, num_groups, -1, -1),
            values_HKV.unsqueeze(1).expand(-1, num_groups, -1, -1),
            is_causal=True,
            scale=options.scaling,
        )
        return out_HGNV.permute(2, 0, 1, 3).reshape(num_queries, num_heads * num_groups, value_dim)

    rows_per_key = 1 if fused else num_heads * num_groups
    tile = max(_SMALLEST_TILE, _MOST_IN_TILE // (rows_per_key * num_keys))
    out_NHGV = queries_HGND.new_empty((num_queries, num_heads, num_groups, value_dim))
    for start in range(0, num_queries, tile):
        end = min(start + tile, num_queries)
        # Keys after the tile's last query, or before what its first query sees, weigh nothing.
        last_key = num_keys - num_queries + end
        first_key = lifetime.first_read(last_key - (end - start))
        last_key = last_key if ends_N is None else num_keys
        tile_of = queries_HGND[:, :, start:end], keys_HKD[:, first_key:last_key]
        values = values_HKV[:, first_key:last_key]
        if fused:
            out_HGNV = _attend_tile_fused(*tile_of, values, options)
        else:
            seen = None if seen_CNK is None else seen_CNK[:, start:end, first_key:last_key]
            all_K = torch.arange(num_keys, device=values.device)
            positions_N1 = all_K[num_keys - num_queries :][start:end, None]
            ends_N1 = None if ends_N is None else ends_N[start:end, None]
            hidden_NK = _hidden(positions_N1, all_K[first_key:last_key], lifetime, ends_N1)
            out_HGNV = _attend_tile_explicitly(*tile_of, values, options, hidden_NK, seen)
        out_NHGV[start:end] = out_HGNV.permute(2, 0, 1, 3)
    return out_NHGV.view(num_queries, num_heads * num_groups, value_dim)


def _attend_tile_fused(
    queries_HGND: Tensor, keys_HKD: Tensor, values_HKV: Tensor, options: AttentionOptions
) -> Tensor:
    num_groups, num_queries = queries_HGND.shape[1:3]
    keys_K = torch.arange(keys_HKD.shape[1], device=queries_HGND.device)
    hidden_NK = _hidden(keys_K[len(keys_K) - num_queries :].unsqueeze(1), keys_K, options.lifetime)
    bias_NK = torch.zeros_like(hidden_NK, dtype=queries_HGND.dtype).masked_fill_(hidden_NK, float("-inf"))
    return scaled_dot_product_attention(
        queries_HGND,
        keys_HKD.unsqueeze(1).expand(-1, num_groups, -1, -1),
        values_HKV.unsqueeze(1).expand(-1, num_groups, -1, -1),
        attn_mask=bias_NK,
        scale=options.scaling,
    )


def _attend_tile_explicitly(
    queries_HGND: Tensor,
    keys_HKD: Tensor,
    values_HKV: Tensor,
    options: AttentionOptions,
    hidden_NK: Tensor,
    seen_CNK: Tensor | None,
) -> Tensor:
    num_heads, num_groups, num_queries, _ = queries_HGND.shape
    # The groups of a head are rows of one product: as products of their own they would each copy its keys.
    scores_HXK = torch.bmm(queries_HGND.flatten(1, 2), keys_HKD.transpose(1, 2)) * options.scaling
    scores_HGNK = scores_HXK.view(num_heads, num_groups, num_queries, -1)
    if options.softcap is not None:
        scores_HGNK = torch.tanh(scores_HGNK / options.softcap) * options.softcap
    scores_HGNK = scores_HGNK.masked_fill_(hidden_NK, float("-inf"))
    if seen_CNK is not None:
        seen_HNK = seen_CNK.repeat_interleave(num_heads * num_groups // len(seen_CNK), dim=0)
        scores_HGNK.masked_fill_(~seen_HNK.view(scores_HGNK.shape), float("-inf"))
    sinks = None if options.sinks is None else options.sinks.view(num_heads, num_groups, 1, 1)
    weights_HXK = softmax_with_sinks(scores_HGNK, sinks).flatten(1, 2)
    return torch.bmm(weights_HXK, values_HKV).view(num_heads, num_groups, num_queries, -1)


def _hidden(
    positions_N1: Tensor, keys_K: Tensor, lifetime: Lifetime, ends_N1: Tensor | None = None
) -> Tensor:
    """[N, K]: True where a query may not look, later keys and keys before the first that it sees."""
    hidden_NK = keys_K > positions_N1
    if ends_N1 is not None:
        hidden_NK &= keys_K >= ends_N1
    return hidden_NK | (keys_K < lifetime.first_read(positions_N1)) if lifetime.is_limited else hidden_NK
