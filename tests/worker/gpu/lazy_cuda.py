"""CUDA without CUDA, as lazy as it may be: to run the real CudaDevice where its mistakes show.

    with LazyCuda() as cuda:                    # as late as possible; LazyCuda(seed=3): in some legal order
        worker = Worker(WorkerConfig(..., device="cuda:1"))

Owns: which tensors are on the device, and for each operation on them whether it is done, asked or refused.
Never: the order of what was asked (lazy_queues.py), torch.cuda's own functions (lazy_driver.py).

Tensors of the device are tensors of the CPU in memory of their own, which say that they are on cuda:1. An
operation on them, or a launch of an interpreted kernel, is queued on the current stream; its result holds no
numbers until somebody waits for it. Views are made at once. Host memory is memory: a queued copy brings what
stands there when it is carried out, and what it is to bring is not there before.

Seen with it: results read before their event, pinned memory that is written again before it was copied,
streams that do not wait for one another, memory that is given back while another stream still uses it,
what waits for the device where it must not, threads that launch on another GPU, a graph whose memory is gone,
kernels that touch memory of tensors that they were not given.
Not seen: time; two halves of one operation; what compiled kernels do that interpreted ones do not; operations
whose numbers differ on a GPU; how torch cuts its memory into segments; peers, and more than one device.
"""

import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import GridExecutor

from tests.worker.gpu.interpreted_gpu import INDEXING, WITHOUT_CONTENT, waits_for_device
from tests.worker.gpu.lazy_driver import DEVICE_INDEX, LazyDriver, base_classes, c_functions, runtime
from tests.worker.gpu.lazy_kernels import Reach
from tests.worker.gpu.lazy_queues import Queues
from worker.devices import device
from worker.gpu.trials import launch_trial

DEVICE = torch.device("cuda", DEVICE_INDEX)
_BYTES = 2 << 30

_aten = torch.ops.aten
_LIKE = {
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
}

# What a CPU has no kernel for.
_ON_CPU: dict[Any, Callable[..., Tensor]] = {
    _aten.histc.default: lambda tensor, *options: torch.histc(tensor.double(), *options)
}


class LazyCuda:
    """A device, from __enter__ to __exit__. `driver` has its queues and its memory."""

    def __init__(self, *, seed: int | None = None) -> None:
        """Without a seed, work is done as late as possible; with one, in an order that it stands for."""
        self.driver = LazyDriver(seed, _BYTES)
        self._patch = pytest.MonkeyPatch()
        self._thread = threading.local()
        self._reach = Reach()
        self._calls, self._operations = _Calls(self), _Operations(self)

    def __enter__(self) -> "LazyCuda":
        self._replace_c_layer()
        self._patch.setattr(device, "_TIMED_REPLAYS", 1)  # time tells nothing here, and takes some
        self._patch.setattr(launch_trial, "_NUM_REPLAYS", 2)
        self._reach.install(self._patch)
        launch = GridExecutor.__call__
        self._patch.setattr(
            GridExecutor,
            "__call__",
            lambda executor, *args, **kwargs: self._launch(launch, executor, args, kwargs),
        )
        self.watch_thread()
        return self

    def __exit__(self, *_: object) -> None:
        self._operations.__exit__(None, None, None)
        self._calls.__exit__(None, None, None)
        self._thread = threading.local()
        self._patch.undo()

    def watch_thread(self) -> None:
        """Let this thread's operations come here; they do, once it has said which device it uses."""
        if not getattr(self._thread, "is_watched", False):
            self._thread.is_watched = True
            self._calls.__enter__()
            self._operations.__enter__()

    def start_order(self, seed: int | None) -> None:
        """Do all that was asked; what comes is done in another order."""
        self.driver.queues.drain()
        self.driver.queues = Queues(seed)

    @property
    def is_busy(self) -> bool:
        """Whether this thread does the device's work, or ours."""
        return getattr(self._thread, "is_busy", False)

    @contextmanager
    def busy(self) -> Iterator[None]:
        before, self._thread.is_busy = self.is_busy, True
        try:
            with torch.inference_mode():
                yield
        finally:
            self._thread.is_busy = before

    @property
    def target(self) -> torch.device | None:
        """Device on which the function that this thread is in makes its result."""
        return getattr(self._thread, "target", None)

    @contextmanager
    def making_on(self, target: torch.device) -> Iterator[None]:
        before, self._thread.target = self.target, target
        try:
            yield
        finally:
            self._thread.target = before

    def holds(self, tensor: Tensor) -> bool:
        return self.driver.memory.holds(tensor)

    def ask(self, name: str, work: Callable[[], object]) -> None:
        """Queue it on the current stream."""

        def do() -> None:
            with self.busy():
                try:
                    work()
                except Exception as error:
                    raise RuntimeError(f"CUDA error: {name} failed on the device: {error}") from error

        with self.busy():
            self.driver.ask(do)

    def new(self, like: Tensor) -> Tensor:
        """A tensor of the device of this shape, these strides and this type, without numbers."""
        extent = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True)) + 1
        num_bytes = extent * like.dtype.itemsize if like.numel() else 0
        with self.busy():
            memory = self.driver.take(num_bytes)
        return memory.view(like.dtype).as_strided(like.shape, like.stride())

    def new_pinned(self, like: Tensor) -> Tensor:
        """A contiguous tensor of pinned memory of this shape and type."""
        with self.busy():
            memory = self.driver.take_pinned(like.numel() * like.dtype.itemsize)
        return memory.view(like.dtype).view(like.shape)

    def shadow(self, value: Any) -> Any:
        """Shadow of a tensor for the device's work: the same memory, without keeping the tensor alive."""
        if not isinstance(value, Tensor):
            return value
        if self.holds(value):
            content = self.driver.memory.piece_of(value).seen_as(value.dtype)
            return content.as_strided(value.shape, value.stride(), value.storage_offset())
        # A number goes along with the launch.
        return value.clone() if value.dim() == 0 else value

    def copy(self, target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        """A copy of which one end at least is on the device."""
        host = source if self.holds(target) else target
        taken = self.shadow(target), self.shadow(source)
        self.ask("copy_", lambda: taken[0].copy_(taken[1]))
        if self.holds(target) and self.holds(source):
            return
        is_one_piece = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
        if not (non_blocking and is_one_piece and self.driver.is_pinned(host)):
            self.driver.wait_for_stream("a copy that the host waits for")

    def operate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation of torch."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_on_device = [self.holds(tensor) for tensor in tensors]
        is_factory = not tensors or _name(func) in _LIKE
        wants_host = is_factory and self.target is not None and self.target != DEVICE
        wants_device = is_factory and self.target == DEVICE
        if wants_host or not (wants_device or any(is_on_device)):
            return func(*args, **kwargs)
        if func is _aten.copy_.default:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self.copy(args[0], args[1], non_blocking=non_blocking)
            return args[0]
        if func.is_view or func is _aten._unsafe_view.default:
            return func(*args, **kwargs)
        strangers = [
            each for each, is_on in zip(tensors, is_on_device, strict=True) if not is_on and each.dim()
        ]
        if strangers and not is_factory and func not in INDEXING:
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} has some on the host")
        if waits_for_device(func, args) or (strangers and not is_factory):
            return self._wait_and_do(func, args, kwargs)
        return self._ask_operation(func, args, kwargs)

    def _ask_operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        taken = tree_map(self.shadow, (args, kwargs))
        if func._schema.is_mutable:
            self.ask(str(func), lambda: func(*taken[0], **taken[1]))
            return _written(func, args, kwargs)
        result = _shapes_of(func, taken)
        made = tree_map(lambda leaf: self.new(leaf) if isinstance(leaf, Tensor) else leaf, result)
        if _name(func) in WITHOUT_CONTENT:
            return made
        targets = [self.shadow(leaf) for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]

        def compute() -> None:
            results = _ON_CPU.get(func, func)(*taken[0], **taken[1])
            found = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
            for target, tensor in zip(targets, found, strict=True):
                target.copy_(tensor)

        self.ask(str(func), compute)
        return made

    def _wait_and_do(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.driver.wait_for_stream(str(func))
        taken = tree_map(self.shadow, (args, kwargs))
        with self.busy():
            result = func(*taken[0], **taken[1])
        if func._schema.is_mutable:
            return _written(func, args, kwargs)
        return tree_map(lambda leaf: self._uploaded(leaf) if isinstance(leaf, Tensor) else leaf, result)

    def _uploaded(self, host: Tensor) -> Tensor:
        made = self.new(host)
        target = self.shadow(made)
        self.ask("the result of what was waited for", lambda: target.copy_(host))
        return made

    def _launch(self, launch: Callable[..., None], executor: GridExecutor, args: Any, kwargs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self.is_busy or not any(self.holds(tensor) for tensor in tensors):
            launch(executor, *args, **kwargs)
            return
        if self.driver.device_index != DEVICE_INDEX:
            raise RuntimeError("CUDA error: an illegal memory access: the kernel runs on this thread's GPU 0")
        if not all(self.holds(tensor) for tensor in tensors):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        with self.busy():
            taken = tree_map(self.shadow, (args, kwargs))
            pieces = [self.driver.memory.piece_of(tensor) for tensor in tensors]

        def run() -> None:
            with self._reach.limited_to(pieces):
                launch(executor, *taken[0], **taken[1])

        self.ask(executor.fn.__name__, run)

    def _replace_c_layer(self) -> None:
        patch, classes = self._patch, base_classes(self.driver)
        for name, function in c_functions(self.driver).items():
            patch.setattr(torch._C, name, function, raising=False)
        for name, base in classes.items():
            patch.setattr(torch._C, name, base, raising=False)
        patch.setattr(torch._C, "_cuda_setDevice", self._set_device)
        patch.setattr(torch.backends.cuda, "is_built", lambda: True)
        streams, graphs = _read_again(torch.cuda.streams), _read_again(torch.cuda.graphs)
        replaced: dict[str, Any] = {
            "Stream": streams.Stream,
            "Event": streams.Event,
            "CUDAGraph": graphs.CUDAGraph,
            "graph": graphs.graph,
            "graph_pool_handle": graphs.graph_pool_handle,
            "is_available": lambda: True,
            "is_current_stream_capturing": lambda: self.driver.stream_id in self.driver.captures,
            "device_count": lambda: DEVICE_INDEX + 1,
            "_lazy_init": lambda: None,
            "is_initialized": lambda: True,
            "_cudart": runtime(self.driver),
            "_exchange_device": self.driver.exchange_device,
            "_maybe_exchange_device": self.driver.exchange_device,
            "_get_device_properties": lambda _: SimpleNamespace(
                name="lazy CUDA", major=9, minor=0, multi_processor_count=2
            ),
        }
        for name, replacement in replaced.items():
            patch.setattr(torch.cuda, name, replacement, raising=False)
        # Its own would take no stream but those of torch._C.
        piece_of = self.driver.memory.piece_of
        patch.setattr(torch.Tensor, "record_stream", lambda at, by: piece_of(at).users.add(by.stream_id))
        # It asks the module that it was defined in.
        patch.setattr(torch.cuda.memory, "is_initialized", lambda: True)

    def _set_device(self, index: int) -> None:
        self.driver.set_device(index)
        self.watch_thread()


class _Operations(TorchDispatchMode):
    def __init__(self, cuda: LazyCuda) -> None:
        super().__init__()
        self._cuda = cuda
        self._is_composite: dict[Any, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._cuda.is_busy:
            return func(*args, **kwargs)
        if func not in self._is_composite:
            self._is_composite[func] = func._can_decompose()
        if self._is_composite[func]:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._cuda.operate(func, args, kwargs)


class _Calls(TorchFunctionMode):
    """Calls of a tensor that are no operation: where it is, where it goes, what the host reads of it."""

    def __init__(self, cuda: LazyCuda) -> None:
        super().__init__()
        self._cuda = cuda
        self._known: dict[Any, Callable[..., Any]] = {
            Tensor.device.__get__: self._device,
            Tensor.is_cuda.__get__: lambda tensor: self._cuda.holds(tensor),
            Tensor.is_cpu.__get__: lambda tensor: not self._cuda.holds(tensor),
            Tensor.to: self._to,
            Tensor.cpu: lambda tensor: self._to(tensor, "cpu"),
            Tensor.cuda: lambda tensor, **options: self._to(tensor, DEVICE, **options),
            Tensor.pin_memory: self._pin,
            Tensor.is_pinned: self._cuda.driver.is_pinned,
            Tensor.numpy: self._numpy,
            Tensor.__array__: self._numpy,
            Tensor.tolist: self._tolist,
            Tensor.__deepcopy__: self._deepcopy,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._cuda.is_busy:
            return func(*args, **kwargs)
        if func in self._known:
            return self._known[func](*args, **kwargs)
        if kwargs.get("pin_memory"):
            assert kwargs.get("device") is None
            if func is torch.empty:
                return self._cuda.new_pinned(torch.empty(*args, dtype=kwargs.get("dtype"), device="meta"))
            return self._pin(func(*args, **{**kwargs, "pin_memory": False}))
        if kwargs.get("device") is None:
            return func(*args, **kwargs)
        target = torch.device(kwargs["device"])
        if target.type != "cuda":
            with self._cuda.making_on(target):
                return func(*args, **kwargs)
        assert target.index in (DEVICE_INDEX, None), f"{target} has no memory here"
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            # torch reads what it is given on the host, and waits for the copy.
            return self._to(func(*args, **{**kwargs, "device": "cpu"}), DEVICE)
        with self._cuda.making_on(DEVICE):
            return func(*args, **{**kwargs, "device": "cpu"})

    def _device(self, tensor: Tensor) -> torch.device:
        return DEVICE if self._cuda.holds(tensor) else Tensor.device.__get__(tensor)

    def _to(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            args = (self._device(args[0]), args[0].dtype, *args[1:])
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        here = self._device(tensor)
        dtype = dtype or tensor.dtype
        if device is None or device.type == here.type:
            return tensor.to(dtype=dtype, copy=copy, memory_format=memory_format or torch.preserve_format)
        if DEVICE.type not in (device.type, here.type):
            return tensor.to(device, dtype=dtype, copy=copy)
        like = _to_meta(tensor).to(dtype)
        if device.type == DEVICE.type:
            made = self._cuda.new(torch.empty_like(like))
        elif non_blocking:
            made = self._cuda.new_pinned(like)  # as torch does
        else:
            made = torch.empty(like.shape, dtype=dtype)
        self._cuda.copy(made, tensor.detach(), non_blocking=non_blocking)
        return made

    def _pin(self, tensor: Tensor) -> Tensor:
        assert not self._cuda.holds(tensor), "cannot pin a tensor of the device"
        pinned = self._cuda.new_pinned(tensor)
        pinned.copy_(tensor)
        return pinned

    def _numpy(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._cuda.holds(tensor):
            raise TypeError("can't convert cuda:1 device type tensor to numpy")
        return Tensor.numpy(tensor, *args, **kwargs)

    def _tolist(self, tensor: Tensor) -> Any:
        if self._cuda.holds(tensor):
            tensor = self._to(tensor, "cpu")
        return Tensor.tolist(tensor)

    def _deepcopy(self, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if not self._cuda.holds(tensor):
            return Tensor.__deepcopy__(tensor, memo)
        return memo.setdefault(id(tensor), tensor.detach().clone())


def _read_again(module: ModuleType) -> ModuleType:
    """A module of torch, on the base classes that torch._C has now."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_again", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again


def _name(func: Any) -> str:
    return func.overloadpacket.__name__


def _shapes_of(func: Any, taken: Any) -> Any:
    """Tensors like those that an operation gives, without computing it."""
    try:
        args, kwargs = tree_map(_to_meta, taken)
        return func(*args, **kwargs)
    except RuntimeError:  # torch's own rule for it is narrower than its kernels
        args, kwargs = tree_map(_to_zeros, taken)
        return func(*args, **kwargs)


def _to_zeros(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, Tensor) else value


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """Result of an operation that writes into its arguments."""
    arguments = {
        next(iter(argument.alias_info.before_set)): kwargs.get(
            argument.name, args[place] if place < len(args) else None
        )
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None
    }
    results = [arguments[next(iter(each.alias_info.before_set))] for each in func._schema.returns]
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)
