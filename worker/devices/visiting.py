"""Weights of the host that are on a device for as long as they are used there.

Owns: their way there and back. A model that is divided among GPUs need not fit on one of them: before it is
divided, it is computed module by module.
Never: copies what is on the device already.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn


def staying_on(device: torch.device, module: nn.Module) -> AbstractContextManager[None]:
    """Keep the weights of a module, and of those within it, on the device meanwhile."""
    return _keeping(device, chain(module.parameters(), module.buffers()))


@contextmanager
def _keeping(device: torch.device, tensors: Iterable[Tensor]) -> Iterator[None]:
    visiting = [(tensor, tensor.data) for tensor in tensors if tensor.device.type != device.type]
    try:
        for tensor, on_host in visiting:
            tensor.data = on_host.to(device)
        yield
    finally:
        for tensor, on_host in visiting:
            tensor.data = on_host


def let_visit(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """Let each module bring its own weights to the device when it is called; returns the end of that.

    Modules whose weights are there are left alone.
    """
    stacks: dict[nn.Module, ExitStack] = {}

    def come(module: nn.Module, _arguments: Any) -> None:
        stack = stacks.setdefault(module, ExitStack())
        stack.enter_context(_keeping(device, _own_of(module)))

    def go(module: nn.Module, _arguments: Any, _output: Any) -> None:
        stacks.pop(module).close()

    hooks = []
    for module in model.modules():
        if any(tensor.device.type != device.type for tensor in _own_of(module)):
            hooks.append(module.register_forward_pre_hook(come))
            hooks.append(module.register_forward_hook(go, always_call=True))

    def end() -> None:
        for hook in hooks:
            hook.remove()

    return end


def _own_of(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(recurse=False), module.buffers(recurse=False))
