"""Attention by FlashAttention 3, where it is installed, right and faster; otherwise by our Triton kernels.

Source: FlashAttention-3, arXiv:2407.08608; the interface is that of `flash_attn_interface` in its repository.
vLLM's wheel has the same kernels (vllm_flash_attention.py).

Shapes: T tokens, D key and value size, V as D.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ClassVar

from torch import Tensor

from worker.attention.interface import AttentionOptions
from worker.attention.kv_cache import KVCache, LayerCache
from worker.devices.device import Device
from worker.gpu.trials.attention_trial import LibraryAttention, LibraryFunction, PreparedStep, TrialKind

_PACKAGE = LibraryFunction(
    "flash_attn_interface",
    "flash_attn_with_kvcache",
    (
        *("q", "k_cache", "v_cache", "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q"),
        *("softmax_scale", "causal", "softcap"),
    ),
)
_OF_VLLM = LibraryFunction("worker.gpu.trials.vllm_flash_attention", "flash_attn_with_kvcache", ())
_LARGEST_HEAD = 256


def find_obstacle() -> str:
    """Say why the library cannot be called; empty if it can."""
    return _function().find_obstacle()


def load() -> Callable[..., Tensor]:
    """Return the library's function, where there is no obstacle."""
    return _function().load()


def _function() -> LibraryFunction:
    """Return that of the package, or of an installed vLLM where there is no package."""
    return _PACKAGE if find_spec(_PACKAGE.module) is not None else _OF_VLLM


class FlashAttention3(LibraryAttention):
    """LibraryAttention by FlashAttention 3."""

    name: ClassVar[str] = "FlashAttention 3"

    def __init__(self, cache: KVCache, device: Device) -> None:
        super().__init__(cache, device)
        self._call = load()

    def find_hindrance(self, kind: TrialKind) -> str:
        key_dim = kind.shape.key_dim
        return f"its heads have {key_dim} numbers" if key_dim > _LARGEST_HEAD or key_dim % 8 else ""

    def attend_prepared(
        self, prepared: PreparedStep, layer_idx: int, queries_THD: Tensor, options: AttentionOptions
    ) -> Tensor:
        batch = prepared.batch
        found_THD: Tensor = self._call(
            queries_THD,
            *as_pages(self._cache.layers[layer_idx]),
            cache_seqlens=batch.seq_lens_R,
            page_table=prepared.tables_RB,
            cu_seqlens_q=batch.query_starts_R,
            max_seqlen_q=batch.max_query_len,
            softmax_scale=options.scaling,
            causal=True,
            softcap=options.softcap or 0.0,
        )
        return found_THD


def as_pages(layer: LayerCache) -> tuple[Any, Any]:
    """Return views [N, tokens, heads, D], of which the library wants the last dimension without a stride."""
    return layer.keys.blocks_NHSD.transpose(1, 2), layer.values.blocks_NHSD.transpose(1, 2)
