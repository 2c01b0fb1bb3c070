"""The device behind one interface, so that nothing else asks whether it is a GPU.

Owns: moving host arrays to the device, allocating the KV pool, measuring memory, naming the device.
Never: what the memory is for (memory.py) or what is computed on it.
"""

import mmap
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from worker.config import WorkerConfig
from worker.errors import StartupError
from worker.host import available_memory_bytes, usable_cores
from worker.memory import cpu_budget_bytes, cuda_budget_bytes

HostArray = np.ndarray[Any, Any]


class Device(Protocol):
    """What the worker needs of a device."""

    torch_device: torch.device
    default_block_size: int

    def describe(self) -> str:
        """Name it for a person."""

    def tensor(self, host: HostArray) -> Tensor:
        """Bring a host array to the device. On CPU they share memory: do not write to `host` afterwards."""

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate flat zeroed memory for the life of the process."""

    def kv_cache_budget_bytes(self, run_largest_step: Callable[[], None]) -> int:
        """Bytes to give to the KV cache, now that the weights are loaded."""


class CpuDevice:
    """This machine's processors. Sets the number of compute threads of the whole process."""

    torch_device = torch.device("cpu")
    default_block_size = 32

    def __init__(self, config: WorkerConfig) -> None:
        self._kv_cache_bytes = config.kv_cache_bytes
        torch.set_num_threads(config.num_threads or usable_cores())

    def describe(self) -> str:
        num_threads = torch.get_num_threads()
        return f"cpu ({num_threads} thread{'s' if num_threads > 1 else ''})"

    def tensor(self, host: HostArray) -> Tensor:
        return torch.from_numpy(host)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        # Anonymous pages are zero when first touched: a pool that is never filled costs nothing, and
        # torch.zeros would touch all of it at start.
        memory = mmap.mmap(-1, max(numel * dtype.itemsize, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=dtype, count=numel)

    def kv_cache_budget_bytes(self, run_largest_step: Callable[[], None]) -> int:  # noqa: ARG002 - measured on GPUs
        return cpu_budget_bytes(available_memory_bytes(), self._kv_cache_bytes)


class CudaDevice:
    """One GPU."""

    default_block_size = 16

    def __init__(self, config: WorkerConfig, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._utilization = config.gpu_memory_utilization
        torch.cuda.set_device(torch_device)

    def describe(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def tensor(self, host: HostArray) -> Tensor:
        return torch.from_numpy(host).to(self.torch_device)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.torch_device)

    def kv_cache_budget_bytes(self, run_largest_step: Callable[[], None]) -> int:
        weights_bytes = torch.cuda.memory_allocated(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        run_largest_step()
        torch.cuda.synchronize(self.torch_device)
        peak_bytes = torch.cuda.max_memory_allocated(self.torch_device)
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
        return cuda_budget_bytes(
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            activation_bytes=peak_bytes - weights_bytes,
            utilization=self._utilization,
        )


def open_device(config: WorkerConfig) -> Device:
    """Take the device that was asked for. Raises StartupError where there is none such."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch_device = torch.device(name)
    except RuntimeError as error:
        raise StartupError(f"unknown device {name!r}", fix="ask for auto, cpu, cuda or cuda:1") from error
    if torch_device.type == "cpu":
        return CpuDevice(config)
    if torch_device.type != "cuda":
        raise StartupError(f"device {name!r} is not supported", fix="ask for auto, cpu, cuda or cuda:1")
    if not torch.cuda.is_available() or (torch_device.index or 0) >= torch.cuda.device_count():
        raise StartupError(
            f"device {name!r} is not there: torch sees {torch.cuda.device_count()} GPUs",
            fix="ask for --device cpu, or install a driver and a torch build with CUDA",
        )
    return CudaDevice(config, torch_device)
