"""Kernels of tests on a real GPU: tensors that a test made on the CPU go there for each launch, and back.

Owns: that a test of a kernel runs on a GPU as it is written. Memory is taken over whole, so that views that
share it go on sharing it.
Never: fast.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class DeviceMirror:
    """The memory of one launch's arguments, on another device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def there(self, argument: Any) -> Any:
        """A CPU's tensor over the memory on the device; anything else as it is."""
        if not isinstance(argument, Tensor) or argument.device.type != "cpu":
            return argument
        storage = argument.untyped_storage()
        if storage.data_ptr() not in self._memory:
            memory = torch.UntypedStorage(storage.nbytes(), device=self._device)
            memory.copy_(storage)
            self._memory[storage.data_ptr()] = (storage, memory)
        _, memory = self._memory[storage.data_ptr()]
        view = torch.empty(0, dtype=argument.dtype, device=self._device)
        return view.set_(memory, argument.storage_offset(), argument.shape, argument.stride())

    def bring_back(self) -> None:
        """Copy back the values that the launch wrote."""
        for storage, memory in self._memory.values():
            storage.copy_(memory)


def mirrored(run: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`JITFunction.run` with its tensors on the device."""

    def run_there(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        mirror = DeviceMirror(device)
        there = [mirror.there(each) for each in args]
        result = run(kernel, *there, **{name: mirror.there(each) for name, each in kwargs.items()})
        mirror.bring_back()
        return result

    return run_there
