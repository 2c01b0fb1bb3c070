"""The interface of attention on a GPU, as fused layers and steps on the device call it.

Owns: the table of backends. Another library's attention is one file that has these methods, and a row.

A backend may take one step or one layer itself and leave the rest to TritonAttention, which takes all.

Shapes: T tokens, M numbers of a merged query, key and value row, Hq query heads, D key size, V value size.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from worker.attention.interface import AttentionBackend, AttentionOptions
from worker.attention.kv_cache import KVCache
from worker.devices.device import Device
from worker.gpu.device_batch import AttentionBatch
from worker.gpu.trials import flash_attention, flashinfer
from worker.gpu.triton_attention import TritonAttention
from worker.model.layer_call import HeadShape, Rotation
from worker.model.layer_parts import RmsNorm

log = logging.getLogger(__name__)


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


OpenAttention = Callable[[KVCache, Device], PagedAttention]


class Backend(NamedTuple):
    """One row of the table of backends."""

    open: OpenAttention
    find_obstacle: Callable[[], str]
    """Say why it cannot serve here; empty if it can."""
    num_bytes: int = 0
    """Memory that it keeps in addition to the cache."""


ATTENTION_BACKENDS = {
    "triton": Backend(TritonAttention, lambda: ""),
    "fa3": Backend(flash_attention.FlashAttention3, flash_attention.find_obstacle),
    "flashinfer": Backend(
        flashinfer.FlashInfer, flashinfer.find_obstacle, num_bytes=2 * flashinfer.WORKSPACE_BYTES
    ),
}
"""The first serves unless another is named, and in the place of one that cannot."""
DEFAULT_BACKEND = next(iter(ATTENTION_BACKENDS))


def choose_attention(name: str) -> OpenAttention:
    """Return the backend of that name, or the first, with a line of the log that says why."""
    obstacle = ATTENTION_BACKENDS[name].find_obstacle()
    if not obstacle:
        return ATTENTION_BACKENDS[name].open
    log.warning("--attention-backend %s: %s; Triton's kernels attend", name, obstacle)
    return ATTENTION_BACKENDS[DEFAULT_BACKEND].open
