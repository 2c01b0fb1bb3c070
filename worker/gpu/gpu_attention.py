"""The interface of attention on a GPU, as fused layers and steps on the device call it.

Owns: the table of backends. Another library's attention is one file that has these methods, and a row.
Never: computes (triton_attention.py).

A backend may take one step or one layer itself and leave the rest to TritonAttention, which takes all.

Shapes: T tokens, M numbers of a merged query, key and value row, Hq query heads, D key size, V value size.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from worker.attention.interface import AttentionBackend, AttentionOptions
from worker.attention.kv_cache import KVCache
from worker.devices.device import Device
from worker.gpu.device_batch import AttentionBatch
from worker.gpu.triton_attention import TritonAttention
from worker.model.layer_call import HeadShape, Rotation
from worker.model.layer_parts import RmsNorm


class PagedAttention(AttentionBackend, Protocol):
    """An attention backend whose steps are on the device.

    Nothing that it does may depend on the content of a batch's tensors, so that a graph can capture it.
    """

    def begin_batch(self, batch: AttentionBatch) -> None:
        """Prepare for all layers of a step, without waiting for the device."""

    def rotate_and_write(
        self,
        layer_idx: int,
        merged_TM: Tensor,
        heads: HeadShape,
        norms: tuple[RmsNorm | None, RmsNorm | None],
        rotation: Rotation | None,
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to the cache; return queries [T, Hq, D].

        `norms` are of queries and of keys. Rows of merged_TM are all queries, then all keys, then all values.
        """

    def attend_written(self, layer_idx: int, queries_THD: Tensor, options: AttentionOptions) -> Tensor:
        """Attend once the step's keys and values are in the cache; returns [T, Hq, V]. Padding gets zeros."""


ATTENTION_BACKENDS: dict[str, Callable[[KVCache, Device], PagedAttention]] = {
    "triton": TritonAttention,
}
"""The first serves unless another is named."""
DEFAULT_BACKEND = next(iter(ATTENTION_BACKENDS))
