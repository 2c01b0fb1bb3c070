"""A GPU without a GPU: its tensors are the CPU's, its kernels are interpreted, its graphs are tapes.

With TOKENYARD_TEST_DEVICE=cuda, `open_gpu` opens the real one.

A tape holds what a graph holds: the kernels in their order, the addresses that each reads and writes, and the
numbers that the host gave them. Played again, it runs none of the code that it was made by: what that code
would read on the host is as it was on the day of the capture.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from tests.worker.gpu.interpreter import mend_interpreter
from worker.devices.device import CpuDevice, Device, DeviceEvent, Graph, open_device
from worker.worker_config import WorkerConfig

mend_interpreter()
HAS_GPU = os.environ.get("TOKENYARD_TEST_DEVICE", "cpu") != "cpu"

_aten = torch.ops.aten
# On a GPU the host would wait for these, or could not know how large the result is.
_WAITING = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten.repeat_interleave.Tensor,
    _aten.bincount.default,
}
INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
WITHOUT_CONTENT = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


class WaitsForDevice(RuntimeError):
    """Refusal that a real GPU words so: operation not permitted when stream is capturing."""


class InterpretedGpu(CpuDevice):
    """See Device."""

    default_block_size = 16
    kind = "GPU"
    is_gpu = True

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.tapes: list[_Tape] = []
        self.num_events = 0

    def describe(self) -> str:
        return "interpreted GPU"

    def record(self) -> DeviceEvent:
        self.num_events += 1
        return super().record()

    def capture(self, work: Callable[[], None]) -> Graph:
        work()
        tape = _Tape()
        with tape.recording():
            work()
        self.tapes.append(tape)
        return tape


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self._is_in_kernel = False
        self.num_replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_in_kernel:
            _refuse_waiting(func, args)
        result = func(*args, **kwargs)
        if not self._is_in_kernel:
            self._calls.append((func, args, kwargs, result))
        return result

    @contextmanager
    def recording(self) -> Iterator[None]:
        launch = GridExecutor.__call__
        tape = self

        def launch_and_note(executor: Any, *args: Any, **kwargs: Any) -> None:
            tape._is_in_kernel = True
            try:
                launch(executor, *args, **kwargs)
            finally:
                tape._is_in_kernel = False
            tape._calls.append((executor, args, kwargs, None))

        with pytest.MonkeyPatch.context() as patch, self:
            patch.setattr(GridExecutor, "__call__", launch_and_note)
            yield

    @torch.inference_mode()
    def replay(self) -> None:
        self.num_replays += 1
        for func, args, kwargs, result in self._calls:
            again = func(*args, **kwargs)
            content_free = getattr(func, "overloadpacket", None)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if not isinstance(old, Tensor) or old.data_ptr() == new.data_ptr():
                    continue  # written in place, or another view of the same memory
                if content_free is not None and content_free.__name__ in WITHOUT_CONTENT:
                    if old.is_floating_point():
                        old.fill_(torch.nan)
                else:
                    old.copy_(new)


def open_gpu(config: WorkerConfig) -> Device:
    """For a Worker."""
    if HAS_GPU:
        return open_device(replace(config, device=os.environ["TOKENYARD_TEST_DEVICE"]))
    return InterpretedGpu(config)


def waits_for_device(func: Any, args: Any) -> bool:
    """Whether a GPU would have to tell the host something before this operation returns."""
    by_mask = func in INDEXING and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )
    return func in _WAITING or by_mask


def _refuse_waiting(func: Any, args: Any) -> None:
    if waits_for_device(func, args):
        raise WaitsForDevice(f"{func} waits for the device")
