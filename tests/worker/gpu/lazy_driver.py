"""Stand-in for what torch.cuda finds below it: functions and base classes of torch's C layer.

Owns: which stream and device a thread is on, streams, events, captures, the memory of tensors, its figures.
Never: what an operation computes (lazy_cuda.py).

The Python of torch.cuda is the real one: its names and signatures are those that a GPU would meet.
"""

import threading
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from tests.worker.gpu.lazy_memory import POISON, Arena, Bytes, Piece
from tests.worker.gpu.lazy_queues import Mark, Queues, Work

DEVICE_INDEX = 1
"""Not the one that a thread begins with: a thread that forgets to say so is told."""
_CUDA = 1  # as torch numbers types of devices
_ERROR_MODE = 2


class LazyDriver:
    """One device, and the pinned memory of its host."""

    def __init__(self, seed: int | None, num_bytes: int) -> None:
        self.queues = Queues(seed)
        self.memory = Arena(num_bytes)
        self.pinned = Arena(num_bytes)
        self.registered: dict[int, int] = {}
        """Host memory that was pinned in place: bytes by address."""
        self.sync_mode = 0
        self.num_streams = 1
        self.num_pools = 0
        self.captures: dict[int, Capture] = {}
        """Captures by the stream that is captured."""
        self._graphs: dict[Hashable, WeakSet[_GraphBase]] = {}
        """Graphs by their pool, as long as somebody holds them."""
        self._thread = threading.local()

    @property
    def device_index(self) -> int:
        return getattr(self._thread, "device_index", 0)

    @property
    def stream_id(self) -> int:
        """The calling thread's stream on the device."""
        return getattr(self._thread, "stream_id", 0)

    def set_device(self, index: int) -> None:
        self._thread.device_index = index

    def exchange_device(self, index: int) -> int:
        before = self.device_index
        if index >= 0:
            self.set_device(index)
        return before

    def set_stream(self, stream_id: int, device_index: int, device_type: int) -> None:
        assert device_type == _CUDA
        self.set_device(device_index)
        if device_index == DEVICE_INDEX:
            self._thread.stream_id = stream_id

    def current_stream(self, device_index: int) -> tuple[int, int, int]:
        return (self.stream_id if device_index == DEVICE_INDEX else 0, device_index, _CUDA)

    def new_stream(self) -> int:
        self.num_streams += 1
        return self.num_streams - 1

    def ask(self, work: Work) -> None:
        """Let the current stream do it after what it was asked before."""
        self._clear_abandoned()
        self._ask(self.stream_id, work)

    def take(self, num_bytes: int) -> Tensor:
        """Memory for a tensor of the current stream, which finds no numbers in it."""
        self._clear_abandoned()
        capture = self.captures.get(self.stream_id)
        home: Hashable = capture.pool if capture else self.stream_id
        try:
            owned, piece = self.memory.take(num_bytes, home)
        except torch.OutOfMemoryError:
            if capture:
                raise
            # As torch does: wait for everything, and give back what streams keep for later.
            self.wait_for_all("an allocation that finds no memory")
            self.empty_cache()
            owned, piece = self.memory.take(num_bytes, home)
        self._ask(self.stream_id, _poisoning(piece.content))
        return owned

    def take_pinned(self, num_bytes: int) -> Tensor:
        """Memory of the host. Work that reads or writes it must hold it."""
        self.refuse_in_capture("an allocation of pinned memory")
        while self.pinned.abandoned:
            self.pinned.give_back(self.pinned.abandoned.popleft())
        owned, piece = self.pinned.take(num_bytes, "host")
        piece.content.fill(POISON)
        return owned

    def is_pinned(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        return self.pinned.holds(tensor) or any(
            start <= address < start + size for start, size in self.registered.items()
        )

    def wait_for_stream(self, what: str) -> None:
        """Wait as an operation does that needs its result on the host."""
        self.refuse_in_capture(what)
        if self.sync_mode == _ERROR_MODE:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        self.queues.reach(self.queues.mark(self.stream_id))

    def wait_for_all(self, what: str) -> None:
        self.refuse_in_capture(what)
        self._clear_abandoned()
        self.queues.drain()

    def refuse_in_capture(self, what: str) -> None:
        """For what the driver does not permit while this thread captures."""
        for capture in self.captures.values():
            if capture.thread_id == threading.get_ident():
                capture.is_spoilt = True
                raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")

    def mark(self, stream_id: int) -> Mark:
        assert stream_id not in self.captures, "events within a capture are not modelled"
        return self.queues.mark(stream_id)

    def let_wait(self, stream_id: int, mark: Mark) -> None:
        assert stream_id not in self.captures, "a capture that waits for another stream is not modelled"
        self.queues.let_wait(stream_id, mark)

    def new_pool(self) -> tuple[int, int]:
        self.num_pools += 1
        return (0, self.num_pools)

    def begin_capture(self, pool: Hashable, graph: "_GraphBase") -> "Capture":
        """On the current stream."""
        self._clear_abandoned()
        graphs = self._graphs.setdefault(pool, WeakSet([graph]))
        if not graphs:
            # So says torch, where something in the pool is still held. Here nobody asks what is.
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED: all graphs have left this pool")
        graphs.add(graph)
        capture = self.captures[self.stream_id] = Capture(self.memory.free_in(pool), pool)
        return capture

    def end_capture(self, stream_id: int) -> "Capture":
        self._clear_abandoned()
        return self.captures.pop(stream_id)

    def empty_cache(self) -> None:
        self.refuse_in_capture("giving memory back")
        self._clear_abandoned()
        self.queues.drain()  # what is given back to the driver, it takes when nothing is under way
        self.memory.release([home for home in self.memory.homes() if isinstance(home, int)])

    def memory_stats(self, _device_index: int) -> dict[str, Any]:
        self._clear_abandoned()
        figures = {"current": self.memory.held_bytes, "peak": self.memory.peak_bytes}
        return {"allocated_bytes": {"all": figures}}

    def reset_peak(self, _device_index: int) -> None:
        self._clear_abandoned()
        self.memory.peak_bytes = self.memory.held_bytes

    def free_and_total_bytes(self, device_index: int) -> tuple[int, int]:
        assert device_index == DEVICE_INDEX
        self._clear_abandoned()
        return self.memory.free_bytes, self.memory.limit_bytes

    def _ask(self, stream_id: int, work: Work) -> None:
        capture = self.captures.get(stream_id)
        if capture is not None:
            capture.items.append(work)
        else:
            self.queues.ask(stream_id, work)

    def _clear_abandoned(self) -> None:
        """Overwrite, on its own stream, memory that is not held any more."""
        while self.memory.abandoned:
            piece = self.memory.abandoned.popleft()
            if isinstance(piece.home, int):
                for user in piece.users:
                    self.queues.let_wait(piece.home, self.queues.mark(user))
                self.queues.ask(piece.home, _poisoning(piece.content))
            else:
                self._poison_in_capture(piece)
            self.memory.give_back(piece)

    def _poison_in_capture(self, piece: Piece) -> None:
        for capture in self.captures.values():
            if capture.pool == piece.home:
                capture.items.append(_poisoning(piece.content))


def _poisoning(content: Bytes) -> Work:
    return lambda: content.fill(POISON)


class Capture:
    """Capture of a thread's calls on one stream while it is recorded."""

    def __init__(self, free: list[Bytes], pool: Hashable) -> None:
        self.pool = pool
        self.thread_id = threading.get_ident()
        self.is_spoilt = False
        # What the pool has free belongs to each of its graphs, whenever one is replayed.
        self.items: list[Work] = [_poisoning(content) for content in free]


class _StreamBase:
    driver: LazyDriver
    device_type = _CUDA

    def __new__(
        cls,
        priority: int = 0,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int = _CUDA,
    ) -> Any:
        stream = super().__new__(cls)
        stream.stream_id = cls.driver.new_stream() if stream_id is None else stream_id
        stream.device_index = cls.driver.device_index if device_index is None else device_index
        return stream

    def __init__(self, *_: Any, **__: Any) -> None: ...

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def query(self) -> bool:
        return self.driver.queues.approach(self.driver.mark(self.stream_id))

    def synchronize(self) -> None:
        self.driver.refuse_in_capture("waiting for a stream")
        self.driver.queues.reach(self.driver.mark(self.stream_id))

    def __eq__(self, other: object) -> bool:
        return (self.stream_id, self.device_index) == (other.stream_id, other.device_index)

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device_index))


class _EventBase:
    driver: LazyDriver

    def __new__(
        cls, *, enable_timing: bool, blocking: bool, interprocess: bool, external: bool = False
    ) -> Any:
        assert not interprocess
        assert not external
        event = super().__new__(cls)
        event._mark = None
        return event

    def __init__(self, *_: Any, **__: Any) -> None: ...

    @property
    def cuda_event(self) -> int:
        return id(self._mark) if self._mark else 0

    def record(self, stream: Any) -> None:
        self._mark = self.driver.mark(stream.stream_id)

    def wait(self, stream: Any) -> None:
        if self._mark is not None:
            self.driver.let_wait(stream.stream_id, self._mark)

    def query(self) -> bool:
        self.driver.refuse_in_capture("asking for an event")
        return self._mark is None or self.driver.queues.approach(self._mark)

    def synchronize(self) -> None:
        self.driver.refuse_in_capture("waiting for an event")
        if self._mark is not None:
            self.driver.queues.reach(self._mark)


class _GraphBase:
    driver: LazyDriver

    def __new__(cls, keep_graph: bool = False) -> Any:
        graph = super().__new__(cls)
        graph._capture = None
        return graph

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def capture_begin(self, pool: Hashable = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode in ("global", "thread_local", "relaxed")
        if self.driver.stream_id == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self._stream_id = self.driver.stream_id
        self._capture = self.driver.begin_capture(pool or self.driver.new_pool(), self)

    def capture_end(self) -> None:
        capture = self.driver.end_capture(self._stream_id)
        if capture.is_spoilt:
            self._capture = None
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None:
        assert self._capture is not None, "replay without a capture that succeeded"
        for work in self._capture.items:
            self.driver.ask(work)

    def reset(self) -> None:
        self._capture = None

    def pool(self) -> Hashable:
        return self._capture.pool


def base_classes(driver: LazyDriver) -> dict[str, Any]:
    """Base classes of torch.cuda.Stream, Event and CUDAGraph, and the source of a graph's pool."""
    bases = {"_CudaStreamBase": _StreamBase, "_CudaEventBase": _EventBase, "_CUDAGraph": _GraphBase}
    found: dict[str, Any] = {name: type(name, (base,), {"driver": driver}) for name, base in bases.items()}
    return {**found, "_graph_pool_handle": driver.new_pool}


def c_functions(driver: LazyDriver) -> dict[str, Callable[..., Any]]:
    """The functions of torch._C that the Python of torch.cuda calls."""
    return {
        "_cuda_getDevice": lambda: driver.device_index,
        "_cuda_setDevice": driver.set_device,
        "_cuda_getCurrentStream": driver.current_stream,
        "_cuda_getDefaultStream": lambda index: (0, index, _CUDA),
        "_cuda_setStream": driver.set_stream,
        "_cuda_synchronize": lambda: driver.wait_for_all("synchronize"),
        "_cuda_emptyCache": driver.empty_cache,
        "_host_emptyCache": lambda: None,
        "_cuda_memoryStats": driver.memory_stats,
        "_cuda_resetPeakMemoryStats": driver.reset_peak,
        "_cuda_set_sync_debug_mode": lambda mode: setattr(driver, "sync_mode", mode),
        "_cuda_get_sync_debug_mode": lambda: driver.sync_mode,
    }


def runtime(driver: LazyDriver) -> SimpleNamespace:
    """Result of torch.cuda.cudart()."""

    def register(address: int, num_bytes: int, _flags: int) -> int:
        driver.registered[address] = num_bytes
        return 0

    def unregister(address: int) -> int:
        del driver.registered[address]
        return 0

    return SimpleNamespace(
        cudaError=SimpleNamespace(success=0),
        cudaGetErrorString=lambda code: f"error {code}",
        cudaHostRegister=register,
        cudaHostUnregister=unregister,
        cudaMemGetInfo=driver.free_and_total_bytes,
    )
