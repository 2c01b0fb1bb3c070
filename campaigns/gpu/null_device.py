"""A GPU that does nothing: what is left is the host's part of a step, and it can be counted.

Owns: a device whose kernels and graphs are not carried out, and whose memory is the host's; the count of
what it was asked for.
Never: a result that means anything: every token is token 0.

Copies are made, since the host writes and reads what they bring. On a GPU a launch costs the host what the
driver takes besides.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from worker.devices.device import CpuDevice, Graph
from worker.worker_config import WorkerConfig

_WITHOUT_WORK = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach"}


@dataclass(slots=True)
class Asked:
    """Count of each operation that was asked for."""

    kernels: int = 0
    """Outside of graphs, of Triton and of torch."""
    graphs: int = 0
    copies_up: int = 0
    copies_down: int = 0
    events: int = 0
    pinned: int = 0
    """Pieces of pinned memory that were allocated."""


class NullGpu(CpuDevice):
    """See Device."""

    default_block_size = 16
    kind = "GPU"
    is_gpu = True

    def __init__(self) -> None:
        super().__init__(WorkerConfig(model_path="", device="cpu", num_threads=1))
        self.asked = Asked()
        # Kept, so that no address is given to something else.
        self._pinned: dict[int, Tensor] = {}

    def describe(self) -> str:
        return "no GPU"

    def tensor(self, host: np.ndarray[Any, Any]) -> Tensor:
        self.asked.pinned += 1
        self.asked.copies_up += 1
        return torch.from_numpy(host.copy().copy())  # to pinned memory, and from there

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.asked.pinned += 1
        memory = torch.empty(numel, dtype=dtype)
        self._pinned[memory.data_ptr()] = memory
        return memory

    def record(self) -> Any:
        self.asked.events += 1
        return super().record()

    def capture(self, work: Callable[[], None]) -> Graph:
        work()
        return NullGraph(self)

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned


class NullGraph:
    """Is replayed in no time."""

    def __init__(self, device: NullGpu) -> None:
        self._device = device

    def replay(self) -> None:
        self._device.asked.graphs += 1


@contextmanager
def no_kernels(device: NullGpu) -> Iterator[None]:
    """Count Triton's launches instead of carrying them out."""

    def launch(_kernel: Any, *_: Any, **__: Any) -> None:
        device.asked.kernels += 1

    with ExitStack() as stack:
        for kind in (JITFunction, InterpretedFunction):
            stack.enter_context(mock.patch.object(kind, "run", launch))
        yield


class CountedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's own operations as a GPU would be asked for them. Slow: not for what is timed."""

    def __init__(self, device: NullGpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _WITHOUT_WORK:
            self._count(name, [each for each in tree_leaves(args) if isinstance(each, Tensor)])
        return result

    def _count(self, name: str, tensors: list[Tensor]) -> None:
        asked, places = self._device.asked, [self._device.is_pinned(each) for each in tensors]
        if name != "copy_" or places[0] == places[1]:
            asked.kernels += not any(places)
        elif places[0]:
            asked.copies_down += 1
        else:
            asked.copies_up += 1
