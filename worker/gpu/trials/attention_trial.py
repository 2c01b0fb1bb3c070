"""Attention by another library, kind of layer by kind, where a trial at load finds it right and faster.

Owns: the check of a library's functions, and the trial: the steps of the model's own check are computed both
ways, and a load of decodes and a prompt are timed both ways. Other layers stay with our Triton kernels.
Never: calls a library (flash_attention.py, flashinfer.py), or writes keys or values: those are written as
for our own kernels, in the blocks that a library reads too.

Shapes: T tokens, R sequences, B blocks of a table, D key and value size, V as D.
"""

import importlib
import importlib.util
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.attention.interface import AttentionMetadata, AttentionOptions
from worker.attention.kv_cache import KVCache, LayerShape
from worker.devices.device import Device
from worker.devices.trial import ROUNDING, TimedTrial, first_line, relative_error
from worker.gpu.device_batch import AttentionBatch
from worker.gpu.triton_attention import TritonAttention

log = logging.getLogger(__name__)

_DTYPES = {torch.float16, torch.bfloat16}
_LEAST_GAIN = 1.05
_TIMED_SEQUENCES, _TIMED_CONTEXT, _TIMED_PROMPT = 32, 1024, 2048


class LibraryFunction(NamedTuple):
    """A function of a library, and the parameters that we name."""

    module: str
    name: str
    needed: tuple[str, ...]

    def find_obstacle(self) -> str:
        """Say why it cannot be called; empty if it can."""
        package = self.module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
        try:
            parameters = inspect.signature(self.load()).parameters
        except Exception as error:  # noqa: BLE001 - a library may raise any error while it is loaded
            return f"{self.module} cannot be loaded ({error})"
        missing = [name for name in self.needed if name not in parameters]
        return f"{self.name} of this version has no {', '.join(missing)}" if missing else ""

    def load(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(importlib.import_module(self.module), self.name)
        return function


class TrialKind(NamedTuple):
    """Layers, and steps of them, that one trial speaks for."""

    shape: LayerShape
    num_groups: int
    """Query heads of a KV head."""
    options: AttentionOptions
    is_of_decodes: bool

    def __str__(self) -> str:
        named = "decodes" if self.is_of_decodes else "prompts"
        return f"{named} of {self.shape.num_heads} KV heads of {self.shape.key_dim}"


class PreparedStep:
    """One step, in the forms that libraries take; each is made once, when the first layer asks."""

    def __init__(self, batch: AttentionBatch, stripe: int, num_blocks: int) -> None:
        self.batch = batch
        self._stripe = stripe
        self._num_blocks = num_blocks
        self._tables_of_pages: dict[int, Tensor] = {}

    @cached_property
    def tables_RB(self) -> Tensor:
        """Return the blocks of each sequence, line by line."""
        tables_CB = self.batch.block_tables_SCB[self._stripe, :, : self._num_blocks]
        rows_R = self.batch.table_rows_R
        return tables_CB if rows_R is None else tables_CB.index_select(0, rows_R)

    def tables_in_pages(self, pages_per_block: int) -> Tensor:
        """Return the first page of each block, in a pool of `pages_per_block` pages for each."""
        if pages_per_block not in self._tables_of_pages:
            self._tables_of_pages[pages_per_block] = self.tables_RB * pages_per_block
        return self._tables_of_pages[pages_per_block]

    @cached_property
    def lens_of_one_or_more_R(self) -> Tensor:
        """Return the lengths of sequences; those of padding are 1."""
        return self.batch.seq_lens_R.clamp(min=1)

    @cached_property
    def key_starts_R(self) -> Tensor:
        """Return [R + 1]: the sums of the lengths before each sequence, and of all."""
        return torch.nn.functional.pad(self.batch.seq_lens_R.cumsum(0, dtype=torch.int32), (1, 0))

    @cached_property
    def is_padding_T11(self) -> Tensor:
        """Return the tokens of no sequence."""
        batch = self.batch
        tokens_T = torch.arange(batch.num_tokens, device=batch.slots_ST.device)
        return (tokens_T >= batch.query_starts_R[-1])[:, None, None]


class LibraryAttention(TritonAttention, ABC):
    """PagedAttention (gpu/attention.py) by a library; layers that it cannot take are left to our kernels."""

    name: ClassVar[str]
    """The library's, for a person."""

    def __init__(self, cache: KVCache, device: Device) -> None:
        super().__init__(cache, device)
        self._taken: dict[TrialKind, bool] = {}
        self._is_trial = False
        self._prepared: dict[int, PreparedStep] = {}  # by stripe

    @abstractmethod
    def find_hindrance(self, kind: TrialKind) -> str:
        """Say why it is not given these layers whatever a trial says; empty if it is.

        They have neither sinks nor a window, and their queries, keys and values are of one dtype and size.
        """

    @abstractmethod
    def attend_prepared(
        self, prepared: PreparedStep, layer_idx: int, queries_THD: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attend as `attend_written` does. Rows of no sequence may be left as they were in memory."""

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Take a step from the host: those of the checks at load, which are computed both ways."""
        super().begin_step(metadata)
        self._is_trial = True

    def _begin_attention(self, batch: AttentionBatch) -> None:
        super()._begin_attention(batch)
        self._is_trial, self._prepared = False, {}

    def attend_written(self, layer_idx: int, queries_THD: Tensor, options: AttentionOptions) -> Tensor:
        batch = self._work.batch
        if batch.ends_seen(options.lifetime) is not None:
            return super().attend_written(layer_idx, queries_THD, options)
        shape = self._cache.layout.layers[layer_idx]
        num_groups = queries_THD.shape[1] // shape.num_heads
        kind = TrialKind(shape, num_groups, options, batch.num_decodes == batch.num_tokens)
        hindrance = self._find_any_hindrance(kind, {queries_THD.dtype, self._cache.layout.dtype})
        if hindrance:
            if self._is_trial and kind not in self._taken and queries_THD.dtype in _DTYPES:
                log.info("%s is not given %s: %s", self.name, kind, hindrance)
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

    def _find_any_hindrance(self, kind: TrialKind, dtypes: set[torch.dtype]) -> str:
        """Say why layers stay with Triton's kernels; `dtypes` are those of queries and of the cache."""
        if len(dtypes) > 1 or not dtypes <= _DTYPES:
            return f"its numbers are {' and '.join(map(str, dtypes))}"
        if kind.options.sinks is not None:
            return "it has sinks"
        if kind.options.lifetime.is_limited:
            # Blocks before a window may be others' by now, and libraries read whole tiles of keys.
            return "it sees a window or a chunk"
        if kind.shape.key_dim != kind.shape.value_dim:
            return f"its heads have {kind.shape.key_dim} and {kind.shape.value_dim} numbers"
        return self.find_hindrance(kind)

    def _attend_by_library(self, layer_idx: int, queries_THD: Tensor, options: AttentionOptions) -> Tensor:
        stripe = self._cache.layers[layer_idx].stripe
        prepared = self._prepared.get(stripe)
        if prepared is None:
            batch, block_size = self._work.batch, self._cache.layout.block_size
            num_blocks = min(-(-batch.max_seq_len // block_size), batch.block_tables_SCB.shape[2])
            prepared = self._prepared[stripe] = PreparedStep(batch, stripe, num_blocks)
        found_THV = self.attend_prepared(prepared, layer_idx, queries_THD, options)
        return found_THV.masked_fill_(prepared.is_padding_T11, 0.0)

    def _try(self, kind: TrialKind, layer_idx: int, queries_THD: Tensor, expected_THV: Tensor) -> None:
        """Compare; time where that is right, once. Waits for the device, which is allowed at load."""
        named = f"{self.name} for {kind}"
        try:
            found_THV = self._attend_by_library(layer_idx, queries_THD, kind.options)
            error = relative_error(found_THV.float(), expected_THV.float())
            if not error <= ROUNDING[queries_THD.dtype]:
                log.warning("%s is wrong by %.1e: Triton's kernels stay", named, error)
                self._taken[kind] = False
            elif kind not in self._taken:
                self._taken[kind] = self._is_faster(kind, layer_idx, queries_THD, named)
        except Exception as error:  # noqa: BLE001 - a library raises any error, and its compiler too
            log.warning("%s fails: %s; Triton's kernels stay", named, first_line(error))
            self._taken[kind] = False

    def _is_faster(self, kind: TrialKind, layer_idx: int, queries_THD: Tensor, named: str) -> bool:
        """Time one layer of a load over blocks of the cache, whatever they hold, with no step of states."""
        batch = self._timed_batch(is_of_decodes=kind.is_of_decodes)
        queries_THD = queries_THD[:1].expand(batch.num_tokens, -1, -1).contiguous()
        step = self._work

        def attend_by(attend: Callable[[int, Tensor, AttentionOptions], Tensor]) -> Callable[[], None]:
            def attend_batch() -> None:
                self._begin_attention(batch)
                attend(layer_idx, queries_THD, kind.options)

            return attend_batch

        ours, library = attend_by(super().attend_written), attend_by(self._attend_by_library)
        try:
            outcome = TimedTrial([ours], [library], _LEAST_GAIN).run(self._device)
        finally:
            self._work, self._is_trial, self._prepared = step, True, {}
        if outcome is None:
            return False
        log.info("%s: %s: %s", named, outcome.times, "taken" if outcome.is_faster else "left")
        return outcome.is_faster

    def _timed_batch(self, *, is_of_decodes: bool) -> AttentionBatch:
        """Make sequences of as many tokens as the cache has room for, up to those of a usual step."""
        block_size, num_blocks = self._cache.layout.block_size, self._cache.num_blocks
        num_stripes = len(self._cache.layout.stripes)
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
            block_tables_SCB=self._device.tensor(np.repeat(tables_RB[None], num_stripes, axis=0)),
            slots_ST=self._device.tensor(np.full((num_stripes, num_tokens), -1, dtype=np.int64)),
        )
