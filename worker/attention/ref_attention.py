"""Paged attention in plain torch, on any device and dtype: the definition of correct.

Owns: the indices of a step into the pool's pages, and the two paths over them. Decodes are batched:
pages are gathered into one buffer, then product, softmax, product, the query heads of one KV head
together. Prefill chunks go one by one through dense_attention.py.

Decodes are grouped by length, so that a short sequence is not padded to the longest one's length.
Index tensors depend on the step, the layer's lifetime and its shape; they are made once and shared by
all layers alike.

Shapes: T tokens, R sequences of a group, B blocks of its longest, S block size, K = B * S keys,
H KV heads, G query heads per KV head, D key size, V value size.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scheduler.cache_groups import Lifetime
from worker.attention.dense_attention import attend_densely
from worker.attention.interface import (
    AttentionMetadata,
    AttentionOptions,
    StepSpan,
    softmax_with_sinks,
)
from worker.attention.kv_cache import KVCache, PagedTensor
from worker.devices.device import Device
from worker.states.ref_states import RefStates
from worker.states.states_in_waves import StatesInWaves

# A group of decodes is cut where the longest has this many times the blocks of the shortest, ...
_LONGEST_OVER_SHORTEST = 2
# ... or where the gathered keys would exceed this many numbers: larger falls out of the CPU's cache.
_MOST_IN_GROUP = 1 << 22


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decodes that are computed together."""

    name: tuple[Lifetime, int, int]
    """The lifetime of its layers, their stripe and a number, which name the group within its step."""
    decodes: Tensor | slice
    """[R]: which of the step's decodes."""
    blocks_RB: NDArray[np.int64]
    """Padded with block 0."""
    hidden_R11K: Tensor
    """True for gathered places that hold no key of the sequence, or one that is not seen."""
    unwritten: NDArray[np.int64]
    """Flat indices r * K + k of places in a sequence's last block that it has not reached."""


class RefAttention:
    """AttentionBackend and IndexKeys. One step at a time; buffers grow to the largest step seen and stay."""

    def __init__(self, cache: KVCache, device: Device) -> None:
        self._cache = cache
        self._device = device
        layout = cache.layout.states
        self.states = (
            None if layout is None else StatesInWaves(RefStates(cache.pool_NE, layout), cache.pool_NE, layout)
        )
        self._metadata: AttentionMetadata
        self._buffers: dict[str, Tensor] = {}
        self._groups: dict[tuple[Lifetime, int], list[_DecodeGroup]] = {}
        self._indices: dict[Hashable, Tensor] = {}

    @property
    def index_keys(self) -> "RefAttention":
        return self

    def begin_step(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._groups = {}
        self._indices = {}
        if self.states is not None:
            self.states.begin_step(metadata.states)

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """See LayerExecutor.attend."""
        self.write(layer_idx, key, value)
        num_query_heads, num_tokens, _ = query.shape
        out_THV = query.new_empty((num_tokens, num_query_heads, value.shape[-1]))
        num_decodes = self._metadata.num_decodes if options.choice is None else 0
        if num_decodes:
            self._attend_decodes(layer_idx, query, options, out_THV)
        for index, span in enumerate(self.spans()[num_decodes:], num_decodes):
            chunk = slice(span.start, span.end)
            out_THV[chunk] = self._attend_chunk(layer_idx, index, query[:, chunk], options)
        return out_THV

    def write(self, layer_idx: int, key: Tensor, value: Tensor) -> None:
        """Put the step's keys [Hk, T, D] and values [Hk, T, V] into a layer's pages."""
        cache = self._cache.layers[layer_idx]
        self._write(cache.keys, key, cache.stripe)
        if not self._cache.layout.layers[layer_idx].value_is_key_part:
            self._write(cache.values, value, cache.stripe)

    def spans(self) -> list[StepSpan]:
        starts = self._metadata.query_starts.tolist()
        return list(map(StepSpan, starts, starts[1:], self._metadata.seq_lens.tolist()))

    def write_index(self, layer_idx: int, keys_TD: Tensor) -> None:
        cache = self._cache.layers[layer_idx]
        self._write(cache.keys, keys_TD.unsqueeze(0), cache.stripe)

    def read_index(self, layer_idx: int, index: int) -> Tensor:
        cache, seq_len = self._cache.layers[layer_idx], int(self._metadata.seq_lens[index])
        num_blocks = -(-seq_len // self._cache.layout.block_size)
        table_B = self._metadata.tables.gathered(cache.stripe)[index]
        keys_1KD = self._gather(
            "keys", cache.keys, ("index", index, cache.stripe), table_B[None, :num_blocks]
        )
        keys_KD, scale = keys_1KD[0, :seq_len], cache.keys.scale
        return keys_KD.clone() if scale == 1 else keys_KD.float() * scale

    def _write(self, target: PagedTensor, values_HTD: Tensor, stripe: int) -> None:
        num_heads, _, dim = values_HTD.shape
        key = ("rows", target.pages_per_block, num_heads, stripe)
        rows = self._indices.get(key)
        if rows is None:
            pages_TH = _pages(self._metadata.token_blocks_ST[stripe], target.pages_per_block, num_heads)
            rows_TH = pages_TH * self._cache.layout.block_size + self._metadata.token_offsets[:, None]
            rows = self._indices[key] = self._device.tensor(rows_TH.reshape(-1))
        target.write(rows, values_HTD.transpose(0, 1).reshape(-1, dim))

    def _attend_decodes(
        self, layer_idx: int, query_HTD: Tensor, options: AttentionOptions, out_THV: Tensor
    ) -> None:
        key = (options.lifetime, self._cache.layers[layer_idx].stripe)
        groups = self._groups.get(key)
        if groups is None:
            groups = self._groups[key] = self._group_decodes(layer_idx, *key)
        queries_THD = query_HTD[:, : self._metadata.num_decodes].transpose(0, 1)
        decodes_out_THV = out_THV[: self._metadata.num_decodes]
        for group in groups:
            decodes_out_THV[group.decodes] = self._attend_group(
                layer_idx, group, queries_THD[group.decodes], options
            )

    def _attend_group(
        self, layer_idx: int, group: _DecodeGroup, queries_RHD: Tensor, options: AttentionOptions
    ) -> Tensor:
        num_seqs = queries_RHD.shape[0]
        cache = self._cache.layers[layer_idx]
        dtype = queries_RHD.dtype
        keys_HKD, values_HKV = self._gather_both(layer_idx, group.name, group.blocks_RB, dtype)
        self._forget_unwritten(values_HKV, group)
        num_heads = keys_HKD.shape[0] // num_seqs
        queries_HGD = queries_RHD.reshape(num_seqs * num_heads, -1, queries_RHD.shape[-1])
        scaling = options.scaling * cache.keys.scale
        scores_HGK = torch.bmm(queries_HGD * scaling, keys_HKD.transpose(1, 2))
        if options.softcap is not None:
            scores_HGK = torch.tanh(scores_HGK / options.softcap) * options.softcap
        scores_RHGK = scores_HGK.view(num_seqs, num_heads, -1, scores_HGK.shape[-1])
        scores_RHGK.masked_fill_(group.hidden_R11K, float("-inf"))
        sinks = None if options.sinks is None else options.sinks.view(1, num_heads, -1, 1)
        weights_RHGK = softmax_with_sinks(scores_RHGK, sinks)
        out_HGV = torch.bmm(weights_RHGK.view(scores_HGK.shape), values_HKV)
        return _scaled(out_HGV, cache.values).view(num_seqs, -1, out_HGV.shape[-1])

    def _attend_chunk(
        self, layer_idx: int, index: int, query_HND: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attend for one prefill chunk over all of its sequence that it sees; [N, Hq, V]."""
        block_size = self._cache.layout.block_size
        num_queries = query_HND.shape[1]
        seq_len = int(self._metadata.seq_lens[index])
        first_seen = options.lifetime.first_read(seq_len - num_queries)
        first = first_seen // block_size
        cache = self._cache.layers[layer_idx]
        name = ("chunk", index, first, cache.stripe)
        table_B = self._metadata.tables.gathered(cache.stripe)[index]
        blocks_1B = table_B[None, first : -(-seq_len // block_size)]
        seen = slice(first_seen - first * block_size, seq_len - first * block_size)
        dtype = query_HND.dtype
        seen_CNK = None if options.choice is None else options.choice.seen[index]
        if seen_CNK is not None and seen_CNK.shape[:2] == (1, 1):  # of one token the others are not read
            chosen_K, seen_CNK = seen_CNK[0, 0].nonzero()[:, 0], None
            keys_HKD, values_HKV = self._gather_rows(layer_idx, table_B, chosen_K, dtype)
        else:
            gathered = self._gather_both(layer_idx, name, blocks_1B, dtype)
            keys_HKD, values_HKV = (each[:, seen] for each in gathered)
        queries_HGND = query_HND.reshape(keys_HKD.shape[0], -1, num_queries, query_HND.shape[-1])
        options = options._replace(scaling=options.scaling * cache.keys.scale)
        ends_N = self._ends_seen(index, options.lifetime)
        ends_N = None if ends_N is None else ends_N - first_seen
        attended = attend_densely(queries_HGND, keys_HKD, values_HKV, options, seen_CNK, ends_N)
        return _scaled(attended, cache.values)

    def _ends_seen(self, index: int, lifetime: Lifetime) -> Tensor | None:
        """Return where each token of a sequence ends to see later ones; None where none sees any."""
        pictures = self._metadata.pictures
        if pictures is None or not pictures.are_seen(lifetime):
            return None
        start, end = self._metadata.query_starts[index : index + 2]
        return self._device.tensor(pictures.ends_T[start:end])

    def _gather_rows(
        self, layer_idx: int, table_B: NDArray[np.int32], places_K: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Gather keys [H, K, D] and values [H, K, V] at some places of a sequence, in `dtype`."""
        cache, shape = self._cache.layers[layer_idx], self._cache.layout.layers[layer_idx]
        block_size, num_heads = self._cache.layout.block_size, shape.num_heads
        blocks_K = self._device.tensor(table_B.astype(np.int64))[places_K // block_size]
        heads_H1 = torch.arange(num_heads, device=blocks_K.device).unsqueeze(1)

        def rows_of(source: PagedTensor) -> Tensor:
            pages_HK = blocks_K * source.pages_per_block + heads_H1
            rows = (pages_HK * block_size + places_K % block_size).reshape(-1)
            return source.rows_RD.index_select(0, rows).view(num_heads, len(places_K), -1).to(dtype)

        keys_HKD = rows_of(cache.keys)
        if shape.value_is_key_part:
            return keys_HKD, keys_HKD[..., : shape.value_dim]
        return keys_HKD, rows_of(cache.values)

    def _gather_both(
        self, layer_idx: int, name: Hashable, blocks_RB: NDArray[np.signedinteger], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Gather keys and values in `dtype`; see `_gather`."""
        cache, shape = self._cache.layers[layer_idx], self._cache.layout.layers[layer_idx]
        keys_HKD = self._gather("keys", cache.keys, name, blocks_RB).to(dtype)
        if shape.value_is_key_part:
            return keys_HKD, keys_HKD[..., : shape.value_dim]
        return keys_HKD, self._gather("values", cache.values, name, blocks_RB).to(dtype)

    def _gather(
        self, buffer: str, source: PagedTensor, name: Hashable, blocks_RB: NDArray[np.signedinteger]
    ) -> Tensor:
        """Bring pages together, per sequence and head; returns [R * H, K, D], valid until the next call."""
        num_heads, block_size, dim = source.blocks_NHSD.shape[1:]
        key = ("pages", name, source.pages_per_block, num_heads)
        pages = self._indices.get(key)
        if pages is None:
            pages_RBH = _pages(blocks_RB, source.pages_per_block, num_heads)
            pages = self._device.tensor(np.ascontiguousarray(pages_RBH.swapaxes(1, 2)).reshape(-1))
            self._indices[key] = pages
        num_pages = pages.shape[0]
        gathered = self._buffer(buffer, num_pages * block_size * dim).view(num_pages, block_size, dim)
        torch.index_select(source.pages_PSD, 0, pages, out=gathered)
        return gathered.view(-1, blocks_RB.shape[1] * block_size, dim)

    def _forget_unwritten(self, values_HKV: Tensor, group: _DecodeGroup) -> None:
        """Zero an earlier owner's numbers in last blocks: a NaN would pass through a weight of 0."""
        num_seqs, num_keys = group.hidden_R11K.shape[0], values_HKV.shape[1]
        num_heads = values_HKV.shape[0] // num_seqs
        key = ("unwritten", group.name, num_heads)
        rows = self._indices.get(key)
        if rows is None:
            seqs, places = np.divmod(group.unwritten, num_keys)
            rows_HX = (seqs * num_heads + np.arange(num_heads)[:, None]) * num_keys + places
            rows = self._indices[key] = self._device.tensor(rows_HX.reshape(-1))
        values_HKV.view(-1, values_HKV.shape[-1]).index_fill_(0, rows, 0)

    def _buffer(self, name: str, numel: int) -> Tensor:
        """Take a flat buffer that lives on: a fresh one of this size costs page faults in every layer."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < numel:
            dtype, device = self._cache.layout.dtype, self._device.torch_device
            buffer = self._buffers[name] = torch.empty(
                1 << (numel - 1).bit_length(), dtype=dtype, device=device
            )
        return buffer[:numel]

    def _group_decodes(self, layer_idx: int, lifetime: Lifetime, stripe: int) -> list[_DecodeGroup]:
        block_size = self._cache.layout.block_size
        seq_lens = self._metadata.seq_lens[: self._metadata.num_decodes]
        firsts = lifetime.first_read(seq_lens - 1) // block_size
        num_blocks = -(-seq_lens // block_size) - firsts
        shape = self._cache.layout.layers[layer_idx]
        block_numel = shape.num_heads * block_size * max(shape.key_dim, shape.value_dim)
        cuts = _cut_by_length(num_blocks, max_blocks=_MOST_IN_GROUP // block_numel)
        return [
            self._make_group((lifetime, stripe, number), chosen, firsts[chosen], num_blocks[chosen])
            for number, chosen in enumerate(cuts)
        ]

    def _make_group(
        self,
        name: tuple[Lifetime, int, int],
        chosen: NDArray[np.int64],
        firsts: NDArray[np.int64],
        num_blocks: NDArray[np.int64],
    ) -> _DecodeGroup:
        block_size = self._cache.layout.block_size
        tables = self._metadata.tables.gathered(name[1])
        longest = int(num_blocks.max())
        columns_RB = firsts[:, None] + np.arange(longest)
        blocks_RB = tables[chosen[:, None], np.minimum(columns_RB, tables.shape[1] - 1)].astype(np.int64)
        blocks_RB[np.arange(longest) >= num_blocks[:, None]] = 0
        seq_lens = self._metadata.seq_lens[chosen]
        keys_RK = (firsts * block_size)[:, None] + np.arange(longest * block_size)
        beyond_RK = keys_RK >= seq_lens[:, None]
        hidden_RK = beyond_RK | (keys_RK < name[0].first_read(seq_lens - 1)[:, None])
        in_own_block_RK = np.arange(longest * block_size) < (num_blocks * block_size)[:, None]
        is_everyone = len(chosen) == self._metadata.num_decodes
        return _DecodeGroup(
            name=name,
            decodes=slice(None) if is_everyone else self._device.tensor(chosen),
            blocks_RB=blocks_RB,
            hidden_R11K=self._device.tensor(hidden_RK[:, None, None, :]),
            unwritten=np.flatnonzero(beyond_RK & in_own_block_RK),
        )


def _scaled(attended: Tensor, values: PagedTensor) -> Tensor:
    return attended if values.scale == 1 else attended * values.scale


def _pages(blocks: NDArray[np.signedinteger], pages_per_block: int, num_heads: int) -> NDArray[np.int64]:
    """Append a dimension of heads: the page of each block and head."""
    return blocks.astype(np.int64)[..., None] * pages_per_block + np.arange(num_heads)


def _cut_by_length(num_blocks: NDArray[np.int64], max_blocks: int) -> list[NDArray[np.int64]]:
    """Cut decodes into groups of similar length, as few as that allows; each decode is in one."""
    everyone = np.arange(len(num_blocks))
    longest, shortest = int(num_blocks.max()), int(num_blocks.min())
    if longest < _LONGEST_OVER_SHORTEST * shortest and longest * len(num_blocks) <= max_blocks:
        return [everyone]
    order = np.argsort(-num_blocks, kind="stable")
    cuts, start = [], 0
    while start < len(order):
        longest = int(num_blocks[order[start]])
        ends = np.flatnonzero(num_blocks[order[start:]] * _LONGEST_OVER_SHORTEST <= longest)
        similar = int(ends[0]) if len(ends) else len(order) - start
        size = max(1, min(similar, max_blocks // longest))
        cuts.append(order[start : start + size])
        start += size
    return cuts
