"""The kernel of ours that was launched last, and its arguments: the last words of a part that fails.

Owns: one note, written at each launch.
Never: waits. A device fails later than it was asked to: only with CUDA_LAUNCH_BLOCKING=1 is the last kernel
that was launched the one that failed. Kernels within a captured graph were launched when it was captured.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

_LONGEST = 400


class LastLaunch:
    """Notes launches from its making on, for the rest of the process."""

    def __init__(self) -> None:
        self._launch: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
        if importlib.util.find_spec("triton") is None:
            return
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        for kind in (JITFunction, InterpretedFunction):
            kind.run = self._noting(kind.run)

    def describe(self) -> str:
        """The kernel's name and its arguments, tensors by shape and dtype; empty if there was none."""
        if self._launch is None:
            return ""
        kernel, args, kwargs = self._launch
        names = getattr(kernel, "arg_names", [])
        named = dict(zip(names, args, strict=False)) | kwargs
        told = ", ".join(f"{name}={_told(value)}" for name, value in named.items() if name != "warmup")
        return f"{getattr(kernel, '__name__', kernel)}({told})"[:_LONGEST]

    def _noting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def run_and_note(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self._launch = (kernel, args, kwargs)
            return run(kernel, *args, **kwargs)

        return run_and_note


def _told(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is None:
        return str(value)
    return f"{'x'.join(map(str, shape))}:{str(value.dtype).removeprefix('torch.')}"
