"""Attention by FlashAttention 3, where it is installed, right and faster; else by our Triton kernels.

Owns: the call of its `flash_attn_with_kvcache`, the reasons against it, and the trial at load: the steps of
the model's check are computed both ways, and a load of decodes and a prompt are timed both ways.
Never: writes keys or values; those are written as for our own kernels, in the blocks that it reads too.
Source: FlashAttention-3, arXiv:2407.08608; the interface is that of `flash_attn_interface` in its repository.

Shapes: T tokens, R sequences, B blocks of a table, D key and value size, V as D.
"""

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.attention.interface import AttentionMetadata, AttentionOptions
from worker.attention.kv_cache import KVCache, LayerCache, LayerShape
from worker.devices.device import Device
from worker.gpu.device_batch import AttentionBatch
from worker.gpu.triton_attention import TritonAttention

log = logging.getLogger(__name__)

_MODULE, _FUNCTION = "flash_attn_interface", "flash_attn_with_kvcache"
_NEEDED = (
    *("q", "k_cache", "v_cache", "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q"),
    *("softmax_scale", "causal", "softcap"),
)
_LARGEST_HEAD = 256
_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 2e-2}
_LEAST_GAIN = 1.05
_TIMED_SEQUENCES, _TIMED_CONTEXT, _TIMED_PROMPT = 32, 1024, 2048


def find_obstacle() -> str:
    """Say why the library cannot be called; empty if it can."""
    if importlib.util.find_spec(_MODULE) is None:
        return f"{_MODULE} is not installed"
    try:
        parameters = inspect.signature(_load()).parameters
    except (ImportError, OSError, AttributeError, TypeError, ValueError) as error:
        return f"{_MODULE} cannot be loaded ({error})"
    missing = [name for name in _NEEDED if name not in parameters]
    return f"{_FUNCTION} of this version has no {', '.join(missing)}" if missing else ""


def _load() -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(importlib.import_module(_MODULE), _FUNCTION)
    return function


class _Kind(NamedTuple):
    """Layers, and steps of them, that one trial speaks for."""

    shape: LayerShape
    options: AttentionOptions
    is_of_decodes: bool


@dataclass(slots=True)
class _Prepared:
    """One step, in the form that the library takes; made when its first layer asks."""

    batch: AttentionBatch
    num_blocks: int
    tables_RB: Tensor = field(init=False)
    is_padding_T11: Tensor = field(init=False)

    def __post_init__(self) -> None:
        batch = self.batch
        tables_CB = batch.block_tables_CB[:, : self.num_blocks]
        rows_R = batch.table_rows_R
        self.tables_RB = tables_CB if rows_R is None else tables_CB.index_select(0, rows_R)
        tokens_T = torch.arange(batch.num_tokens, device=batch.slots_T.device)
        self.is_padding_T11 = (tokens_T >= batch.query_starts_R[-1])[:, None, None]


class FlashAttention3(TritonAttention):
    """See PagedAttention (gpu_attention.py). Layers that it cannot take are left to Triton's kernels."""

    def __init__(self, cache: KVCache, device: Device) -> None:
        super().__init__(cache, device)
        self._call = _load()
        self._taken: dict[_Kind, bool] = {}
        self._is_trial = False
        self._prepared: _Prepared | None = None

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Take a step from the host: those of the checks at load, which are computed both ways."""
        super().begin_step(metadata)
        self._is_trial = True

    def begin_batch(self, batch: AttentionBatch) -> None:
        """See PagedAttention."""
        super().begin_batch(batch)
        self._is_trial, self._prepared = False, None

    def attend_written(self, layer_idx: int, queries_THD: Tensor, options: AttentionOptions) -> Tensor:
        """See PagedAttention."""
        batch = self._work.batch
        shape = self._cache.layout.layers[layer_idx]
        kind = _Kind(shape, options, batch.num_decodes == batch.num_tokens)
        hindrance = find_hindrance(kind, {queries_THD.dtype, self._cache.layout.dtype})
        if hindrance:
            if self._is_trial and kind not in self._taken and queries_THD.dtype in _TOLERANCE:
                log.info("FlashAttention 3 is not given %s: %s", _describe(kind), hindrance)
            self._taken[kind] = False
            return super().attend_written(layer_idx, queries_THD, options)
        if not self._is_trial:
            if not self._taken.get(kind, False):
                return super().attend_written(layer_idx, queries_THD, options)
            return self._attend_by_library(layer_idx, queries_THD, options)
        expected_THV = super().attend_written(layer_idx, queries_THD, options)
        if self._taken.get(kind, True):
            self._try(kind, layer_idx, queries_THD, expected_THV)
        return expected_THV

    def _attend_by_library(self, layer_idx: int, queries_THD: Tensor, options: AttentionOptions) -> Tensor:
        if self._prepared is None:
            batch, block_size = self._work.batch, self._cache.layout.block_size
            num_blocks = min(-(-batch.max_seq_len // block_size), batch.block_tables_CB.shape[1])
            self._prepared = _Prepared(batch, num_blocks)
        prepared, layer = self._prepared, self._cache.layers[layer_idx]
        found_THV = self._call(
            queries_THD,
            *_as_pages(layer),
            cache_seqlens=prepared.batch.seq_lens_R,
            page_table=prepared.tables_RB,
            cu_seqlens_q=prepared.batch.query_starts_R,
            max_seqlen_q=prepared.batch.max_query_len,
            softmax_scale=options.scaling,
            causal=True,
            softcap=options.softcap or 0.0,
        )
        # It leaves rows of no sequence as they were in memory.
        return found_THV.masked_fill_(prepared.is_padding_T11, 0.0)

    def _try(self, kind: _Kind, layer_idx: int, queries_THD: Tensor, expected_THV: Tensor) -> None:
        """Compare; time where that is right, once. Waits for the device, which is allowed at load."""
        named = f"FlashAttention 3 for {_describe(kind)}"
        try:
            found_THV = self._attend_by_library(layer_idx, queries_THD, kind.options)
            error = float((found_THV.float() - expected_THV.float()).norm() / expected_THV.float().norm())
            if not error <= _TOLERANCE[queries_THD.dtype]:
                log.warning("%s is wrong by %.1e: Triton's kernels stay", named, error)
                self._taken[kind] = False
            elif kind not in self._taken:
                self._taken[kind] = self._is_faster(kind, layer_idx, queries_THD, named)
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            log.warning("%s fails: %s; Triton's kernels stay", named, reason)
            self._taken[kind] = False

    def _is_faster(self, kind: _Kind, layer_idx: int, queries_THD: Tensor, named: str) -> bool:
        """Time one layer of a load over blocks of the cache, whatever they hold."""
        batch = self._timed_batch(is_of_decodes=kind.is_of_decodes)
        queries_THD = queries_THD[:1].expand(batch.num_tokens, -1, -1).contiguous()
        theirs = FlashAttention3(self._cache, self._device)
        theirs._taken = {kind: True}
        ours = TritonAttention(self._cache, self._device)

        def work(backend: TritonAttention) -> Callable[[], None]:
            def attend() -> None:
                backend.begin_batch(batch)
                backend.attend_written(layer_idx, queries_THD, kind.options)

            return attend

        seconds_ours = self._device.seconds_of(work(ours))
        seconds = self._device.seconds_of(work(theirs))
        if seconds is None or seconds_ours is None:
            return False
        is_faster = seconds * _LEAST_GAIN < seconds_ours
        kept = "taken" if is_faster else "left"
        log.info("%s: %.1f us for %.1f us: %s", named, seconds * 1e6, seconds_ours * 1e6, kept)
        return is_faster

    def _timed_batch(self, *, is_of_decodes: bool) -> AttentionBatch:
        """Make sequences of as many tokens as the cache has room for, up to those of a usual step."""
        block_size, num_blocks = self._cache.layout.block_size, self._cache.num_blocks
        num_sequences = min(_TIMED_SEQUENCES, num_blocks) if is_of_decodes else 1
        longest = _TIMED_CONTEXT if is_of_decodes else _TIMED_PROMPT
        seq_len = min(longest, num_blocks // num_sequences * block_size)
        num_tokens = num_sequences if is_of_decodes else seq_len
        blocks_each = -(-seq_len // block_size)
        tables_RB = 1 + np.arange(num_sequences * blocks_each, dtype=np.int32).reshape(num_sequences, -1)
        query_starts = np.arange(num_sequences + 1, dtype=np.int32) * (1 if is_of_decodes else seq_len)
        return AttentionBatch(
            num_decodes=num_sequences if is_of_decodes else 0,
            max_query_len=1 if is_of_decodes else seq_len,
            max_seq_len=seq_len,
            query_starts_R=self._device.tensor(query_starts),
            seq_lens_R=self._device.tensor(np.full(num_sequences, seq_len, dtype=np.int32)),
            block_tables_CB=self._device.tensor(tables_RB),
            slots_T=self._device.tensor(np.full(num_tokens, -1, dtype=np.int64)),
        )


def find_hindrance(kind: _Kind, dtypes: set[torch.dtype]) -> str:
    """Say why layers stay with Triton's kernels whatever the trial says; empty if they need not.

    `dtypes` are those of queries and of the cache.
    """
    if len(dtypes) > 1 or not dtypes <= _TOLERANCE.keys():
        return f"its numbers are {' and '.join(map(str, dtypes))}"
    if kind.options.sinks is not None:
        return "it has sinks"
    if kind.options.reach.most_tokens is not None:
        # Blocks before a window may be others' by now, and the library reads whole tiles of keys.
        return "it sees a window or a chunk"
    shape = kind.shape
    if shape.key_dim != shape.value_dim or shape.key_dim > _LARGEST_HEAD or shape.key_dim % 8:
        return f"its heads have {shape.key_dim} and {shape.value_dim} numbers"
    return ""


def _describe(kind: _Kind) -> str:
    named = "decodes" if kind.is_of_decodes else "prompts"
    return f"{named} of {kind.shape.num_heads} KV heads of {kind.shape.key_dim}"


def _as_pages(layer: LayerCache) -> tuple[Any, Any]:
    """Return views [N, tokens, heads, D], of which the library wants the last dimension without a stride."""
    return layer.keys.blocks_NHSD.transpose(1, 2), layer.values.blocks_NHSD.transpose(1, 2)
