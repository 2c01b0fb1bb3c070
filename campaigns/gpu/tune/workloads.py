"""Inputs of the tuned kernels: those of one layer, several times over, in shapes of models.

Owns: tensors on the device. There are as many layers as no cache of the device holds, since in a model each
layer finds its own keys and values in memory.

Shapes: T tokens, R sequences, Hq query heads, D head size, H numbers of a hidden state, M merged numbers.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from campaigns.gpu.shapes import Shape
from worker.attention.interface import AttentionOptions
from worker.attention.kv_cache import BlockLayout, KVCache, LayerCache, LayerShape
from worker.gpu.device_batch import AttentionBatch
from worker.gpu.kernels.attention_work import AttentionWork

_BLOCK_SIZE = 16
_LONGEST = 8192
"""Facts that the host gives of all sequences, as a captured step does."""
_BEYOND_CACHES_BYTES = 256 << 20
_MOST_LAYERS = 32
_MOST_PROGRAMS_EACH = 4
"""Programs of a processor, of all candidates."""
_SCALE = 0.1


class Load(NamedTuple):
    """Sequences that are all alike."""

    num_sequences: int
    context: int
    """Tokens of each after the step."""
    query_len: int
    """Tokens of each in the step."""

    def __str__(self) -> str:
        what = "decodes" if self.query_len == 1 else f"x {self.query_len} tokens"
        return f"{self.num_sequences} {what} of {self.context}"


class AttentionInputs:
    """One step, and the caches of some layers."""

    def __init__(
        self,
        shape: Shape,
        load: Load,
        device: torch.device,
        dtype: torch.dtype,
        pool_bytes: int = 0,
        num_layers: int = 0,
    ) -> None:
        """Take a larger pool than the load needs, and the number of layers; by itself as many as count."""
        num_kv_heads, head_dim = shape.num_key_value_heads, shape.head_dim
        num_tokens = load.num_sequences * load.query_len
        blocks_each = -(-load.context // _BLOCK_SIZE)
        num_blocks = blocks_each * load.num_sequences
        kv_bytes = 2 * num_blocks * _BLOCK_SIZE * num_kv_heads * head_dim * dtype.itemsize
        num_layers = num_layers or (
            min(_MOST_LAYERS, math.ceil(_BEYOND_CACHES_BYTES / kv_bytes)) if device.type == "cuda" else 1
        )
        layout = BlockLayout(
            layers=dict.fromkeys(range(num_layers), LayerShape(num_kv_heads, head_dim, head_dim)),
            block_size=_BLOCK_SIZE,
            dtype=dtype,
        )
        num_pool_blocks = max(num_blocks, pool_bytes // layout.block_bytes)
        memory = torch.empty((num_pool_blocks + 1) * layout.block_numel, dtype=dtype, device=device).normal_()
        self.layers: list[LayerCache] = list(KVCache(layout, num_pool_blocks, memory).layers.values())
        self.queries_THD = torch.randn(
            num_tokens, shape.num_attention_heads, head_dim, dtype=dtype, device=device
        )
        self.out_THD = torch.empty_like(self.queries_THD)
        self.options = AttentionOptions(scaling=1 / math.sqrt(head_dim))
        integers = {"dtype": torch.int32, "device": device}
        batch = AttentionBatch(
            num_decodes=load.num_sequences if load.query_len == 1 else 0,
            max_query_len=load.query_len,
            max_seq_len=_LONGEST if device.type == "cuda" else load.context,
            query_starts_R=torch.arange(load.num_sequences + 1, **integers) * load.query_len,  # type: ignore[call-overload]
            seq_lens_R=torch.full((load.num_sequences,), load.context, **integers),  # type: ignore[call-overload]
            block_tables_SCB=(torch.randperm(num_pool_blocks, device=device)[:num_blocks] + 1)
            .int()
            .view(1, load.num_sequences, -1),
            slots_ST=torch.full((1, num_tokens), -1, dtype=torch.int64, device=device),
        )
        self.work = work_of(batch)


def work_of(batch: AttentionBatch) -> AttentionWork:
    """A step's work, with counters of its own."""
    device = batch.seq_lens_R.device
    is_gpu = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1
    counters = batch.seq_lens_R.new_zeros(AttentionWork.num_counters(_MOST_PROGRAMS_EACH * processors))
    return AttentionWork(batch, counters, processors)


def rows(num_rows: int, width: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Several of [num_rows, width], more than caches hold."""
    num_bytes = num_rows * width * dtype.itemsize
    count = min(_MOST_LAYERS, math.ceil(_BEYOND_CACHES_BYTES / num_bytes)) if device.type == "cuda" else 1
    return [torch.randn(num_rows, width, dtype=dtype, device=device) * _SCALE for _ in range(count)]
