"""The largest step, by the memory of the GPU where the operator leaves it open.

Owns: the defaults of --max-num-seqs and --max-num-batched-tokens.
Never: asks torch: the API process has none.
"""

from importlib import metadata
from typing import NamedTuple

from worker.machine import least_gpu_memory_bytes

# The cards from H100 up, as vLLM draws the line: a model and KV of a thousand sequences fit.
_LARGE_GPU_BYTES = 70 << 30


class EngineStepLimits(NamedTuple):
    """The most that one step computes."""

    num_sequences: int
    num_tokens: int


_ON_LARGE_GPUS = EngineStepLimits(1024, 8192)
_ELSEWHERE = EngineStepLimits(256, 2048)


def step_limits(
    device: str, asked_sequences: int | None, asked_tokens: int | None, gpu_bytes: int | None = None
) -> EngineStepLimits:
    """Take what the operator asks for, and for the rest the device's default, as far as the two agree.

    `gpu_bytes` is the memory of the smallest GPU; without it the driver is asked.
    """
    default = _ELSEWHERE
    if (asked_sequences is None or asked_tokens is None) and device != "cpu" and _torch_has_cuda():
        found_bytes = least_gpu_memory_bytes() if gpu_bytes is None else gpu_bytes
        default = _ON_LARGE_GPUS if found_bytes >= _LARGE_GPU_BYTES else _ELSEWHERE
    num_tokens = max(default.num_tokens, asked_sequences or 0) if asked_tokens is None else asked_tokens
    num_sequences = min(default.num_sequences, num_tokens) if asked_sequences is None else asked_sequences
    return EngineStepLimits(num_sequences, num_tokens)


def _torch_has_cuda() -> bool:
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False
