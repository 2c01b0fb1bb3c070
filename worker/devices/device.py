"""The device behind one interface; only the choice of kernels (worker/startup) asks whether it is a GPU."""

import mmap
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from worker.devices.block_copies import PlainCopier, PoolCopier, Pools
from worker.devices.copy_streams import CopyStreams, open_streams
from worker.machine import available_memory_bytes, control_group_limit_bytes, usable_cores
from worker.memory_sizes import (
    WeightBytes,
    check_host_memory,
    check_weights_fit,
    cpu_budget_bytes,
    cuda_budget_bytes,
    format_size,
    graph_bytes,
)
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

HostArray = np.ndarray[Any, Any]

_CPU_NUMEL_PER_THREAD = 1 << 17
"""Half a MiB of float32: stays in each core's own cache from pass to pass."""
_GPU_NUMEL = 1 << 24
"""64 MiB of float32: enough to fill an accelerator, little next to its KV cache."""

_TIMED_REPLAYS = 10
"""The fastest counts: the others were held up."""


class Reserve(NamedTuple):
    """Memory that will be held in addition to the measured step and the KV cache."""

    num_graphs: int = 0
    buffer_bytes: int = 0
    """Buffers of a GPU."""
    weight_bytes: int = 0
    """Weights that are pages of their files yet; on a CPU also what pictures take."""


NO_RESERVE = Reserve()


class DeviceEvent(Protocol):
    """Point in the order of a device's work."""

    def wait(self) -> None:
        """Return when all work before it is done. The thread sleeps meanwhile."""


class Graph(Protocol):
    """Recorded work of the device, kernel by kernel, with the addresses that it read and wrote."""

    def replay(self) -> None:
        """Launch the work again, on the present content of these addresses."""


class _Done:
    """DeviceEvent of a device that is done when a call returns."""

    def wait(self) -> None:
        return


class Device(Protocol):
    """Operations that the worker needs of a device."""

    torch_device: torch.device
    default_block_size: int
    kind: str
    """CPU or GPU: for a person, and in the names of its options."""
    is_gpu: bool
    """Triton compiles for the device, and work is done later, in order, while the host goes on.

    Read by worker/startup alone, to choose kernels.
    """

    scale_of_parts: int
    """Work that the device should have at once, where it could be divided further, in those of a CPU."""

    @property
    def num_processors(self) -> int:
        """Count the parts of the device that run programs of a kernel at the same time."""

    def describe(self) -> str:
        """Name the device for a person."""

    def describe_memory(self) -> str:
        """Say for a person how much memory is free."""

    def rows_at_once(self, row_numel: int) -> int:
        """Count the rows of float32 numbers to work on at once: a busy device and little scratch memory."""

    def make_current(self) -> None:
        """Direct launches of this thread to the device; each thread begins with GPU 0."""

    def check_weights(self, weights: WeightBytes) -> int:
        """Raise StartupError if the weights do not fit; returns the host's memory that loading leaves."""

    def tensor(self, host: HostArray) -> Tensor:
        """Bring a host array to the device. On CPU they share memory: do not write to `host` afterwards."""

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate flat host memory that is copied from and to while the host goes on (non_blocking=True).

        The host may not write to it, or read what arrives in it, before an event recorded after the copy.
        """

    def record(self) -> DeviceEvent:
        """Mark the present end of the device's work."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record the work that `work` launches. Only for GPUs.

        Runs `work` once before, so that nothing is compiled or set up while recording, and the graph once
        after, so that the driver takes the memory that it needs. Memory that `work` takes and gives back is
        shared among all graphs: results in it are valid until the next replay. Raises RuntimeError if `work`
        waits for the device, and torch.OutOfMemoryError.
        """

    def seconds_of(self, work: Callable[[], None]) -> float | None:
        """Measure the work that `work` launches, captured as a graph; None where time tells nothing.

        Raises as `capture` does.
        """

    def release_cached_memory(self) -> None:
        """Give back the memory that the allocator keeps for later."""

    def free_bytes(self) -> int:
        """Measure the free memory of a GPU; of the machine for a CPU."""

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate flat zeroed memory for the life of the process."""

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate flat zeroed memory for the host's end of `open_copier`.

        Raises MemoryError, OSError or RuntimeError where the system refuses.
        """

    def kv_cache_budget_bytes(
        self, run_largest_step: Callable[[], None], *, reserve: Reserve = NO_RESERVE
    ) -> int:
        """Measure the bytes for the KV cache once the weights are loaded; `reserve` is allocated after it."""

    def foreseen_budget_bytes(self, num_weight_bytes: int) -> int:
        """Estimate the bytes for the KV cache before the weights of engines are loaded.

        `num_weight_bytes` is of one engine. On a GPU it is an upper bound.
        """

    def check_swap_space(self, *, swap_bytes: int, cache_bytes: int) -> None:
        """Raise StartupError if the host cannot hold the swap space after the cache was allocated."""

    def open_copier(self, pools: Pools) -> PoolCopier:
        """Open the copier between these two pools. Earlier work of the device must be done."""

    def wait(self) -> None:
        """Return when all work of the device is done."""


class CpuDevice:
    """Processors of this machine. Sets the number of compute threads of the whole process."""

    torch_device = torch.device("cpu")
    # Attention gathers block by block: longer runs use caches and prefetching better. Prefixes are shared in
    # units of 32 tokens in return.
    default_block_size = 32
    kind = "CPU"
    is_gpu = False
    scale_of_parts = 1
    num_processors = 1  # Triton's interpreter runs one program after the other

    def __init__(self, config: WorkerConfig) -> None:
        self._kv_cache_bytes = config.kv_cache_bytes
        self._swap_space_bytes = config.swap_space_bytes
        self._num_engines = config.num_engines
        self._num_loading = 1 if config.is_replacement else config.num_engines
        num_shares = config.num_ranks * config.num_stages * config.num_engines // config.num_nodes
        torch.set_num_threads(config.num_threads or max(1, usable_cores() // num_shares))

    def describe(self) -> str:
        num_threads = torch.get_num_threads()
        return f"cpu ({num_threads} thread{'s' if num_threads > 1 else ''})"

    def describe_memory(self) -> str:
        limit_bytes = control_group_limit_bytes()
        limit = f", in a control group with {format_size(limit_bytes)}" if limit_bytes else ""
        return f"{format_size(available_memory_bytes())} of memory available{limit}"

    def rows_at_once(self, row_numel: int) -> int:
        # A row for each thread at least: the sampler selects candidates on one thread a row.
        num_threads = torch.get_num_threads()
        return max(num_threads, num_threads * _CPU_NUMEL_PER_THREAD // row_numel)

    def make_current(self) -> None:
        """Do nothing: there is one CPU device."""

    def check_weights(self, weights: WeightBytes) -> int:
        return check_weights_fit(
            weights.total, available_bytes=available_memory_bytes(), where="this machine"
        )

    def tensor(self, host: HostArray) -> Tensor:
        return torch.from_numpy(host)

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def record(self) -> DeviceEvent:
        return _Done()

    def capture(self, work: Callable[[], None]) -> Graph:
        raise NotImplementedError("a CPU records nothing")

    def seconds_of(self, work: Callable[[], None]) -> float | None:  # noqa: ARG002 - never run
        return None

    def release_cached_memory(self) -> None:
        """Do nothing: no memory is kept."""

    def free_bytes(self) -> int:
        return available_memory_bytes()

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return _map_zeros(numel, dtype)

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return _map_zeros(numel, dtype)

    def kv_cache_budget_bytes(
        self,
        run_largest_step: Callable[[], None],  # noqa: ARG002 - measured on GPUs
        *,
        reserve: Reserve = NO_RESERVE,
    ) -> int:
        # Other buffers of a CPU are no part of the cache's share.
        return self.foreseen_budget_bytes(reserve.weight_bytes)

    def foreseen_budget_bytes(self, num_weight_bytes: int) -> int:
        budget_bytes = cpu_budget_bytes(
            max(0, available_memory_bytes() - self._num_loading * num_weight_bytes),
            asked_bytes=self._kv_cache_bytes,
            swap_bytes=self._swap_space_bytes,
        )
        return budget_bytes // self._num_engines if self._kv_cache_bytes is None else budget_bytes

    def check_swap_space(self, *, swap_bytes: int, cache_bytes: int) -> None:
        check_host_memory(available_memory_bytes(), cache_bytes=cache_bytes, swap_bytes=swap_bytes)

    def open_copier(self, pools: Pools) -> PoolCopier:
        return PlainCopier(pools)

    def wait(self) -> None:
        """Return at once: each call returns when it is done."""


class CudaDevice:
    """One GPU."""

    # 1.75 to 2 MiB at 112 to 128 KiB a token (Qwen3-0.6B, Llama-3-8B, bfloat16), all layers together: copied
    # at the full speed of the link already. Smaller blocks waste less at a sequence's end and share finer.
    default_block_size = 16
    kind = "GPU"
    is_gpu = True
    scale_of_parts = 16  # thousands of rows of a product; an estimate

    def __init__(self, config: WorkerConfig, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._pool_keeper: torch.cuda.CUDAGraph | None = None
        self._utilization = config.gpu_memory_utilization
        self._kv_cache_bytes = config.kv_cache_bytes
        self.make_current()

    @property
    def num_processors(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch_device).multi_processor_count)

    def describe(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def describe_memory(self) -> str:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
        return f"{format_size(free_bytes)} of {format_size(total_bytes)} free"

    def rows_at_once(self, row_numel: int) -> int:
        return max(1, _GPU_NUMEL // row_numel)

    def make_current(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def check_weights(self, weights: WeightBytes) -> int:
        free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
        check_weights_fit(weights.total, available_bytes=free_bytes, where="the GPU")
        return check_weights_fit(
            weights.converted, available_bytes=available_memory_bytes(), where="this machine"
        )

    def tensor(self, host: HostArray) -> Tensor:
        # From pageable memory the host would wait until the copy is done, and with it for the step before.
        # torch does not reuse the pinned memory before.
        return torch.from_numpy(host).pin_memory().to(self.torch_device, non_blocking=True)

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def record(self) -> DeviceEvent:
        return _CudaEvent(torch.cuda.current_stream(self.torch_device))

    def capture(self, work: Callable[[], None]) -> Graph:
        if self._pool_keeper is None:
            # torch takes no pool again that all graphs have left, if something in it is still held, as the
            # memory that cuBLAS works in is. So one graph stays for ever.
            number = self.zeros(1, torch.int32)
            self._pool_keeper = self._capture(lambda: number.fill_(0), pool=None)
        return self._capture(work, pool=self._pool_keeper.pool())

    def _capture(self, work: Callable[[], object], *, pool: Any) -> torch.cuda.CUDAGraph:
        with _refusing_to_wait():
            work()
        torch.cuda.synchronize(self.torch_device)
        graph = torch.cuda.CUDAGraph()
        try:
            # torch leaves this thread on the stream of a capture that fails: the outer block brings it back.
            # What another thread asks of the device meanwhile is neither recorded nor refused.
            with (
                torch.cuda.stream(torch.cuda.current_stream(self.torch_device)),
                torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
            ):
                work()
            graph.replay()
            torch.cuda.synchronize(self.torch_device)
        except RuntimeError as error:
            # The driver's own, where it is not torch's allocator that asks.
            if "out of memory" in str(error) and not isinstance(error, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        return graph

    def seconds_of(self, work: Callable[[], None]) -> float | None:
        graph, least_s = self.capture(work), float("inf")
        for _ in range(_TIMED_REPLAYS):
            started_s = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize(self.torch_device)
            least_s = min(least_s, time.perf_counter() - started_s)
        return least_s

    def release_cached_memory(self) -> None:
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
        return free_bytes

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.torch_device)

    def host_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        memory = _map_zeros(numel, dtype)
        # Pinned in place, since torch's own pinned allocator rounds up to a power of two.
        load_cuda_runtime: Any = torch.cuda.cudart  # untyped, too
        cuda_runtime = load_cuda_runtime()
        address = memory.data_ptr()
        # The thread that loads has GPU 0 as its current one, and would leave a context there.
        with torch.cuda.device(self.torch_device):
            torch.cuda.check_error(cuda_runtime.cudaHostRegister(address, numel * dtype.itemsize, 0))
        # Before the pages go; not at exit, when the driver may be gone before them.
        weakref.finalize(memory, cuda_runtime.cudaHostUnregister, address).atexit = False
        return memory

    def kv_cache_budget_bytes(
        self, run_largest_step: Callable[[], None], *, reserve: Reserve = NO_RESERVE
    ) -> int:
        weights_bytes = torch.cuda.memory_allocated(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        run_largest_step()
        torch.cuda.synchronize(self.torch_device)
        peak_bytes = torch.cuda.max_memory_allocated(self.torch_device)
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
        measured_bytes = cuda_budget_bytes(
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            activation_bytes=peak_bytes - weights_bytes,
            reserved_bytes=reserve.buffer_bytes
            + graph_bytes(reserve.num_graphs, activation_bytes=peak_bytes - weights_bytes),
            utilization=self._utilization,
        )
        return measured_bytes if self._kv_cache_bytes is None else min(self._kv_cache_bytes, measured_bytes)

    def foreseen_budget_bytes(self, num_weight_bytes: int) -> int:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
        return cuda_budget_bytes(
            total_bytes=total_bytes,
            free_bytes=free_bytes - num_weight_bytes,
            activation_bytes=0,
            utilization=self._utilization,
        )

    def check_swap_space(self, *, swap_bytes: int, cache_bytes: int) -> None:  # noqa: ARG002 - the cache is not on the host
        check_host_memory(available_memory_bytes(), cache_bytes=0, swap_bytes=swap_bytes)

    def open_copier(self, pools: Pools) -> PoolCopier:
        return CopyStreams(pools, open_streams(self.torch_device))

    def wait(self) -> None:
        torch.cuda.synchronize(self.torch_device)


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Let torch raise a RuntimeError where the host would wait for the device.

    A wait during the capture of a graph is refused too, but torch's allocator would then take the capture for
    one that goes on.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this experimental
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        new_event: Any = torch.cuda.Event  # its constructor is untyped, too
        # Blocking: a thread that spins would take a core from the API process.
        self._event = new_event(blocking=True)
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


def _map_zeros(numel: int, dtype: torch.dtype) -> Tensor:
    # Anonymous pages are zero when first touched: a pool that is never filled costs nothing, and
    # torch.zeros would touch all of it at start.
    if not numel:
        return torch.empty(0, dtype=dtype)
    memory = mmap.mmap(-1, numel * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=numel)


def open_device(config: WorkerConfig) -> Device:
    """Open the device that was asked for. Raises StartupError if there is none."""
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
    # With its number, without which torch would not make it the current one.
    return CudaDevice(config, torch.device("cuda", torch_device.index or 0))
