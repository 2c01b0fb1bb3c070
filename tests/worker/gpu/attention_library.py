"""Stand-ins for libraries of attention: what they have in common.

Owns: attention of one sequence in torch, a device that says how long each way took, the check at load.
Never: a library's own interface (test_flash_attention.py, test_flashinfer.py).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.worker.gpu.test_attention_kernels import LAYER, Step, assert_close
from worker.devices.device import CpuDevice
from worker.gpu.device_batch import AttentionBatch
from worker.gpu.trials.attention_trial import LibraryAttention
from worker.worker_config import WorkerConfig


def attend_causally(
    queries_THD: Tensor, keys_SHD: Tensor, values_SHD: Tensor, scale: float, softcap: float
) -> Tensor:
    """Attend in float32; the last token sees all keys, the others one less each."""
    num_tokens, num_heads, _ = queries_THD.shape
    num_keys, num_kv_heads, _ = keys_SHD.shape
    groups = num_heads // num_kv_heads
    keys, values = (each.float().repeat_interleave(groups, dim=1) for each in (keys_SHD, values_SHD))
    scores = torch.einsum("thd,khd->htk", queries_THD.float(), keys) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    seen = torch.arange(num_keys) <= torch.arange(num_keys - num_tokens, num_keys)[:, None]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("htk,khd->thd", weights, values).to(queries_THD.dtype)


class Stopwatch(CpuDevice):
    """Runs what is timed, and tells first the time of our kernels, then that of the library."""

    def __init__(self, ours: float, theirs: float) -> None:
        super().__init__(WorkerConfig(model_path="", num_threads=1))
        self._told = [ours, theirs] * 4

    def seconds_of(self, work: Any) -> float | None:
        work()
        return self._told.pop(0)


class Changed:
    """A backend that is given other batches."""

    def __init__(self, backend: LibraryAttention, change: Callable[[AttentionBatch], AttentionBatch]) -> None:
        self._change, self._begin, self.attend = change, backend.begin_batch, backend.attend

    def begin_batch(self, batch: AttentionBatch) -> None:
        self._begin(self._change(batch))


def tried(step: Step, library: type[LibraryAttention], device: CpuDevice) -> LibraryAttention:
    """Attend once as the check at load does."""
    step.cache.pool_NE[0] = 0  # of the blocks that are timed, one is padding's
    backend = library(step.cache, device)
    backend.begin_step(step.metadata)
    for _ in ("a layer that is tried", "another of that step"):
        assert_close(backend.attend(LAYER, step.query, step.key, step.value, step.options), step.expected())
    return backend
