"""Attention by FlashInfer, where it is installed, right and faster; otherwise by our Triton kernels.

Owns: the calls of its `xqa_batch_decode_with_kv_cache` and `trtllm_fmha_v2_prefill`, the memory that they
work in, and the layers that they are not given.
Never: decides for it (attention_trial.py), or uses its wrappers: those plan a step on the host, in memory
that the copy of the step before may still be read from.
Source: FlashInfer, arXiv:2501.01005; the interface is that of release 0.6.18.

Both functions read lengths and tables where our steps have them, on the device, and nothing on the host but
bounds: a graph can capture them, and any number of steps may be in flight.

Shapes: T tokens, R sequences, N blocks, P pages of a layer, H KV heads, S tokens of a block, D key and value
size.
"""

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from worker.attention.interface import AttentionOptions
from worker.attention.kv_cache import KVCache, LayerCache
from worker.devices.device import Device
from worker.gpu.trials.attention_trial import LibraryAttention, LibraryFunction, PreparedStep, TrialKind

_DECODES = LibraryFunction(
    "flashinfer.decode",
    "xqa_batch_decode_with_kv_cache",
    (
        *("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len", "bmm1_scale"),
        *("kv_layout", "enable_pdl"),
    ),
)
_PROMPTS = LibraryFunction(
    "flashinfer.prefill",
    "trtllm_fmha_v2_prefill",
    (
        *("qkv", "input_layout", "workspace_buffer", "seq_lens", "max_q_len", "max_kv_len", "bmm1_scale"),
        *("bmm2_scale", "batch_size", "cum_seq_lens_q", "cum_seq_lens_kv", "block_tables", "mask_mode"),
        "logits_soft_cap_scale",
    ),
)
_CAPABILITY = LibraryFunction("flashinfer.utils", "get_compute_capability", ("device",))

_BLOCK_SIZES = (16, 32, 64, 128)
_MOST_GROUPS = 32
_DECODE_HEAD_SIZES = tuple(range(16, 257, 16))
_PROMPT_HEAD_SIZES = (64, 128, 256)
"""Sizes that it generates for both kinds of cards."""
_DECODE_CARDS, _PROMPT_CARDS = (9, 10, 12), (9, 12)
"""Compute capabilities: Hopper is 9, Blackwell 10 and 12."""
WORKSPACE_BYTES = 128 << 20
"""Memory of each function: one leaves counters there that have to be zero again, the other does not."""


def find_obstacle() -> str:
    """Say why the library cannot be called; empty if it can."""
    obstacles = (function.find_obstacle() for function in (_DECODES, _PROMPTS, _CAPABILITY))
    return next(filter(None, obstacles), "")


class FlashInfer(LibraryAttention):
    """LibraryAttention by FlashInfer. Its kernels are compiled by nvcc in their trial, if none are ready."""

    name: ClassVar[str] = "FlashInfer"

    def __init__(self, cache: KVCache, device: Device) -> None:
        super().__init__(cache, device)
        self._decode, self._prefill = _DECODES.load(), _PROMPTS.load()
        self._card = int(_CAPABILITY.load()(device.torch_device)[0])

    # At their first use, which is a trial: backends over the caches of a layer's check are tried in nothing.
    @cached_property
    def _decode_memory(self) -> Tensor:
        return self._device.zeros(WORKSPACE_BYTES, torch.uint8)

    @cached_property
    def _prefill_memory(self) -> Tensor:
        return self._device.zeros(WORKSPACE_BYTES, torch.uint8)

    def find_hindrance(self, kind: TrialKind) -> str:
        cards = _DECODE_CARDS if kind.is_of_decodes else _PROMPT_CARDS
        head_sizes = _DECODE_HEAD_SIZES if kind.is_of_decodes else _PROMPT_HEAD_SIZES
        block_size = self._cache.layout.block_size
        if self._card not in cards:
            return f"the compute capability is {self._card}, not {' or '.join(map(str, cards))}"
        if kind.shape.key_dim not in head_sizes:
            return f"its heads have {kind.shape.key_dim} numbers"
        if kind.num_groups > _MOST_GROUPS:
            return f"a KV head has {kind.num_groups} query heads"
        if block_size not in _BLOCK_SIZES:
            return f"blocks have {block_size} tokens"
        if kind.is_of_decodes:
            return "" if kind.options.softcap is None else "its scores have a soft cap"
        page_numel = 2 * kind.shape.num_heads * block_size * kind.shape.key_dim
        return "layers differ in size" if self._cache.pool_NE.shape[1] % page_numel else ""

    def attend_prepared(
        self, prepared: PreparedStep, layer_idx: int, queries_THD: Tensor, options: AttentionOptions
    ) -> Tensor:
        batch, layer = prepared.batch, self._cache.layers[layer_idx]
        if batch.num_decodes == batch.num_tokens:
            return self._attend_decodes(prepared, layer, queries_THD, options)
        return self._attend_prompts(prepared, layer, queries_THD, options)

    def _attend_decodes(
        self, prepared: PreparedStep, layer: LayerCache, queries_THD: Tensor, options: AttentionOptions
    ) -> Tensor:
        batch = prepared.batch
        found_THD: Tensor = self._decode(
            query=queries_THD.contiguous(),
            kv_cache=(layer.keys.blocks_NHSD, layer.values.blocks_NHSD),
            workspace_buffer=self._decode_memory,
            block_tables=prepared.tables_RB.contiguous(),
            # Padding has a length of 0, from which the library would take its one token off.
            seq_lens=prepared.lens_of_one_or_more_R,
            max_seq_len=batch.max_seq_len,
            bmm1_scale=options.scaling,
            kv_layout="HND",
            # Its launches wait for ours, and ours for them, as a whole.
            enable_pdl=False,
        )
        return found_THD

    def _attend_prompts(
        self, prepared: PreparedStep, layer: LayerCache, queries_THD: Tensor, options: AttentionOptions
    ) -> Tensor:
        batch = prepared.batch
        pages_P2HSD, pages_per_block = _as_pages(layer)
        found_THD: Tensor = self._prefill(
            qkv=(queries_THD.contiguous(), pages_P2HSD),
            input_layout="Q_PAGED_KV_HND",
            workspace_buffer=self._prefill_memory,
            seq_lens=batch.seq_lens_R,
            # A graph's bound of queries may be above that of keys, which the library forbids.
            max_q_len=min(batch.max_query_len, batch.max_seq_len),
            max_kv_len=batch.max_seq_len,
            bmm1_scale=options.scaling,
            bmm2_scale=1.0,
            batch_size=batch.num_sequences,
            cum_seq_lens_q=batch.query_starts_R,
            cum_seq_lens_kv=prepared.key_starts_R,
            block_tables=prepared.tables_in_pages(pages_per_block),
            mask_mode="causal",
            logits_soft_cap_scale=options.softcap,
        )
        return found_THD


def _as_pages(layer: LayerCache) -> tuple[Tensor, int]:
    """Return [P, 2, H, S, D] without gaps, as the library takes keys and values, and its pages of a block.

    A layer's values lie behind its keys, and layers alike behind one another: block n is page n * pages of a
    block, and the pages between are other layers'.
    """
    blocks_NHSD = layer.keys.blocks_NHSD
    num_blocks, *sizes = blocks_NHSD.shape
    page_numel = 2 * blocks_NHSD[0].numel()
    pages_per_block = blocks_NHSD.stride(0) // page_numel
    num_pages = (num_blocks - 1) * pages_per_block + 1
    strides = (page_numel, page_numel // 2, *blocks_NHSD.stride()[1:])
    pages = blocks_NHSD.as_strided((num_pages, 2, *sizes), strides, blocks_NHSD.storage_offset())
    return pages, pages_per_block
