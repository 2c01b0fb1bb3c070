"""Paged attention by our Triton kernels, for steps that are on the device.

Shapes: T tokens, R sequences, Hq and Hk query and KV heads, D key size, V value size.
"""

import numpy as np
import torch
from torch import Tensor

from worker.attention.interface import AttentionMetadata, AttentionOptions
from worker.attention.kv_cache import KVCache
from worker.devices.device import Device
from worker.gpu.device_batch import AttentionBatch
from worker.gpu.kernels.attention_decode import attend_decodes, most_programs
from worker.gpu.kernels.attention_prefill import attend_prefills
from worker.gpu.kernels.attention_work import AttentionWork
from worker.gpu.kernels.kv_write import write_kv
from worker.gpu.kernels.rotary import rotate_and_write
from worker.gpu.state_kernels.executor import GpuStatesInWaves
from worker.model.layer_call import HeadShape, Rotation
from worker.model.layer_parts import RmsNorm


class TritonAttention:
    """PagedAttention by Triton kernels (attention.py), for one step at a time."""

    index_keys = None

    def __init__(self, cache: KVCache, device: Device) -> None:
        self._cache = cache
        self._device = device
        self._num_processors = device.num_processors
        # Of the device's steps, one after the other: each launch leaves them zero.
        num_counters = AttentionWork.num_counters(most_programs(self._num_processors))
        self._counters = device.zeros(num_counters, torch.int32)
        self._work: AttentionWork
        layout = cache.layout.states
        self.states = None if layout is None else GpuStatesInWaves(cache.pool_NE, layout, device)

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Take a step from the host, with one copy for each of its arrays: too slow for serving."""
        self.begin_batch(batch_of(metadata, self._cache.layout.block_size, self._device))

    def begin_batch(self, batch: AttentionBatch) -> None:
        """See PagedAttention. The batch's tensors are read when layers attend, and not before."""
        self._begin_attention(batch)
        if self.states is not None:
            self.states.begin_batch(batch)

    def _begin_attention(self, batch: AttentionBatch) -> None:
        assert batch.num_decodes <= batch.num_sequences <= batch.num_tokens, "padding has tokens as well"
        self._work = AttentionWork(batch, self._counters, self._num_processors)

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """See LayerExecutor.attend."""
        self.write(layer_idx, key, value)
        return self.attend_written(layer_idx, query.transpose(0, 1), options)

    def write(self, layer_idx: int, key: Tensor, value: Tensor) -> None:
        """Put the step's keys [Hk, T, D] and values [Hk, T, V] into a layer's blocks."""
        cache = self._cache.layers[layer_idx]
        write_kv(key, value, cache, self._work.batch.slots_ST[cache.stripe])

    def rotate_and_write(
        self,
        layer_idx: int,
        merged_TM: Tensor,
        heads: HeadShape,
        norms: tuple[RmsNorm | None, RmsNorm | None],
        rotation: Rotation | None,
    ) -> Tensor:
        """See PagedAttention, and kernels/rotary.py."""
        cache = self._cache.layers[layer_idx]
        slots_T = self._work.batch.slots_ST[cache.stripe]
        return rotate_and_write(merged_TM, heads, norms, rotation, cache, slots_T)

    def attend_written(self, layer_idx: int, queries_THD: Tensor, options: AttentionOptions) -> Tensor:
        if queries_THD.stride(-1) != 1:
            queries_THD = queries_THD.contiguous()
        cache, work = self._cache.layers[layer_idx], self._work
        options = options._replace(scaling=options.scaling * cache.keys.scale)
        num_tokens, num_heads, _ = queries_THD.shape
        out_THV = queries_THD.new_empty((num_tokens, num_heads, cache.values.blocks_NHSD.shape[-1]))
        attend_decodes(queries_THD, cache, work, options, out_THV)
        if work.batch.num_tokens > work.batch.num_decodes:
            attend_prefills(queries_THD, cache, work, options, out_THV)
        return out_THV if cache.values.scale == 1 else out_THV.mul_(cache.values.scale)


def batch_of(metadata: AttentionMetadata, block_size: int, device: Device) -> AttentionBatch:
    """Bring the host's form of a step to the device."""
    query_lens, stripes = np.diff(metadata.query_starts), range(metadata.tables.num_stripes)
    tables_SRB = [metadata.tables.gathered(each) for each in stripes] or [np.empty((0, 0), np.int32)]
    return AttentionBatch(
        num_decodes=metadata.num_decodes,
        max_query_len=int(query_lens.max()),
        max_seq_len=int(metadata.seq_lens.max()),
        query_starts_R=device.tensor(metadata.query_starts.astype(np.int32)),
        seq_lens_R=device.tensor(metadata.seq_lens.astype(np.int32)),
        block_tables_SCB=device.tensor(np.stack(tables_SRB)),
        slots_ST=device.tensor(metadata.token_blocks_ST * block_size + metadata.token_offsets),
        state_blocks_RF=device.tensor(metadata.state_blocks.astype(np.int32)),
        cut_states=metadata.cut_states,
    ).with_pictures(metadata.pictures, device)
