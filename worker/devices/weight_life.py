"""Weights of a model on their way from its files to the memory that steps compute from.

Owns: the state that they are in, and each way to another one. Kernels take weights over layer by layer; what
they leave is copied after them. A model that is divided among GPUs need not fit on one of them: until it is
divided, each module's weights are lent to the device for a call.

    STORED ──> OFFERED ──> MOVED ──> OFFERED_AGAIN ──> MOVED
      └──────────────────────^
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from worker.devices.device import Device
from worker.machine import find_mapped, free_behind, once_grown
from worker.memory_sizes import WeightBytes
from worker.progress import LoadPhase, LoadStage
from worker.worker_errors import StartupError

_CPU_ALLOCATOR = "DefaultCPUAllocator"


class WeightState(Enum):
    """Places of a model's weights: of the plain ones, and of the codes of its linear layers."""

    STORED = "plain ones are pages of their files, or the host's; codes are where they compute"
    OFFERED = "as stored, but codes are in the files alone: each is read when it is asked for"
    MOVED = "all are where they compute"
    OFFERED_AGAIN = "plain ones are where they compute, codes in the files alone"


_WHEN_OFFERED = {
    WeightState.STORED: WeightState.OFFERED,
    WeightState.MOVED: WeightState.OFFERED_AGAIN,
}


class StoredCodes(Protocol):
    """Codes of a model's linear layers, which stay in its files."""

    def free(self, model: nn.Module) -> None:
        """Free them: each is read again when it is asked for."""

    def keep(self, model: nn.Module) -> None:
        """Read those that nothing has replaced meanwhile, once and for all."""


class WeightLife:
    """The weights of one model."""

    def __init__(
        self,
        model: nn.Module,
        device: Device,
        files: Collection[Path] = (),
        codes: StoredCodes | None = None,
        loaded_bytes: int = 0,
    ) -> None:
        """Take in the files that weights may be pages of, and the memory that weights take once loaded."""
        self.state = WeightState.STORED
        self._model, self._device, self._files, self._codes = model, device, files, codes
        self._loaded_bytes = loaded_bytes
        self._end_loans = lend_by_call(model, device.torch_device)
        self.free_taken = once_grown(lambda: free_behind(files))
        """Give back memory, and pages of files, of layers that were taken over, once there is much of it."""

    @property
    def bytes_to_come(self) -> int:
        """Memory that weights are yet to take which are pages of their files."""
        return min(self._loaded_bytes, self._mapped_bytes()) if self.state is WeightState.STORED else 0

    def offer(self) -> None:
        """Let kernels take the weights over by layers. On a CPU, codes wait for their turn in the files."""
        if self._codes is not None and self._device.torch_device.type == "cpu":
            self._codes.free(self._model)
        self.state = _WHEN_OFFERED[self.state]

    def settle(self, stage: LoadStage) -> None:
        """Copy the weights that no kernel has taken over.

        Raises StartupError if they are more than fit: fewer layers may have been rounded than were to be.
        """
        if self._codes is not None:
            self._codes.keep(self._model)
        if self.state in (WeightState.STORED, WeightState.OFFERED):
            if self._device.torch_device.type == "cpu":
                self._device.check_weights(WeightBytes(total=self._mapped_bytes(), converted=0))
            with refusing_out_of_memory(self._device, "weights were copied"):
                self.move(stage)
        self.state = WeightState.MOVED

    def move(self, stage: LoadStage) -> None:
        """Copy all weights to the device one after another; on CPU too, into memory of this process.

        Before the copy they are pages of the mapped files. Such pages count as free memory, a machine short
        of memory reads them from disk again at each step, and they change, or are lost, when the file is
        written to. The copy takes about 0.4 s per GB and never more memory than the weights.
        """
        tensors = list(chain(self._model.parameters(), self._model.buffers()))
        stage.enter(LoadPhase.COPYING, total_bytes=sum(tensor.nbytes for tensor in tensors))
        for tensor in tensors:
            # Through .data, which keeps tied weights one and the same.
            tensor.data = tensor.data.to(self._device.torch_device, copy=True)
            stage.count(tensor.nbytes)
        self._end_loans()
        self.state = WeightState.MOVED

    def _mapped_bytes(self) -> int:
        places = find_mapped(self._files)
        parameters = self._model.parameters()
        return sum(each.nbytes for each in parameters if any(each.data_ptr() in place for place in places))


def lent_to(device: torch.device, module: nn.Module) -> AbstractContextManager[None]:
    """Lend the weights of a module, and of those within it, to the device, if they are not there already."""
    return _lent(device, chain(module.parameters(), module.buffers()))


@contextmanager
def _lent(device: torch.device, tensors: Iterable[Tensor]) -> Iterator[None]:
    lent = [(tensor, tensor.data) for tensor in tensors if tensor.device.type != device.type]
    try:
        for tensor, on_host in lent:
            tensor.data = on_host.to(device)
        yield
    finally:
        for tensor, on_host in lent:
            tensor.data = on_host


def lend_by_call(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """Lend each module's own weights to the device for each call of it; returns the end of that.

    Modules whose weights are there are left alone.
    """
    stacks: dict[nn.Module, ExitStack] = {}

    def lend(module: nn.Module, _arguments: Any) -> None:
        stack = stacks.setdefault(module, ExitStack())
        stack.enter_context(_lent(device, _own_of(module)))

    def take_back(module: nn.Module, _arguments: Any, _output: Any) -> None:
        stacks.pop(module).close()

    hooks = []
    for module in model.modules():
        if any(tensor.device.type != device.type for tensor in _own_of(module)):
            hooks.append(module.register_forward_pre_hook(lend))
            hooks.append(module.register_forward_hook(take_back, always_call=True))

    def end() -> None:
        for hook in hooks:
            hook.remove()

    return end


def _own_of(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(recurse=False), module.buffers(recurse=False))


@contextmanager
def refusing_out_of_memory(device: Device, moment: str) -> Iterator[None]:
    """Turn a failed allocation into a StartupError that names the moment."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise StartupError(
            f"memory of {device.describe()} ran out while {moment}",
            fix="free some, ask for --dtype bfloat16 if they are loaded as float32, or take a smaller model",
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an allocation failed, on any device."""
    # On CPU torch raises a plain RuntimeError, known by the name of its allocator only.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_ALLOCATOR in str(error)
