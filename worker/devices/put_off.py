"""Imports that a CPU worker never uses, put off until something of them is asked for.

torch's compiler, exporter and distributed tensors are half of the time that `import transformers` takes: its
model classes import them for the sake of a decorator or a type. A module that is put off stands in its place,
and becomes the real one at the first use of any other name of it.

Owns: which modules those are, and the order of the imports.
Never: changes what a model computes, or runs where there is a GPU.
Source: docs/decisions/0075-imports-at-start.md.
"""

import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from worker.machine import visible_gpus

_COMPILER = "torch._dynamo"
_PUT_OFF = (_COMPILER, "torch.export")
_MARKS = frozenset({"allow_in_graph", "assume_constant_result", "disable"})
"""Decorators that only say what to do if the function is compiled one day: no reason to load the compiler."""
_PATH = "__path__"
_loading = threading.RLock()


class _PutOff(ModuleType):
    """Module that is loaded at the first use of a name in it, or of a submodule once it has no path."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != _PATH:
            raise AttributeError(name)
        if self.__name__ == _COMPILER and name in _MARKS:
            return _unmarked
        with _loading:
            if isinstance(self, _PutOff):
                spec = self.__spec__
                assert spec is not None
                assert spec.loader is not None
                # First: the module's own code asks for names of it, which are not there yet.
                object.__setattr__(self, "__class__", ModuleType)
                self.__path__ = spec.submodule_search_locations or []
                try:
                    spec.loader.exec_module(self)
                except BaseException:  # the next use tries again and says the same
                    object.__setattr__(self, "__class__", _PutOff)
                    raise
        return getattr(self, name)


def import_torch(device: str) -> None:
    """Import torch and transformers' model classes, on a CPU without what its worker does not use."""
    is_cpu = device == "cpu" or (device == "auto" and not visible_gpus())
    if not is_cpu or "torch" in sys.modules:  # there already, as in tests: nothing is left to put off
        return
    stand_ins = {name: _stand_in(name) for name in _PUT_OFF}
    sys.modules.update(stand_ins)
    import torch
    import torch.distributed

    for name, module in stand_ins.items():
        setattr(torch, name.removeprefix("torch."), module)
    # transformers knows builds of torch without it, and asks. Ranks have shared memory of their own.
    _replace(torch.distributed, "is_available", _never)
    # It would load the compiler, in order to be left out by it.
    disable = _replace(torch.compiler, "disable", _unmarked)
    try:
        import transformers.generation.utils
        import transformers.modeling_utils  # noqa: F401 - loaded for those that follow
    finally:
        _replace(torch.compiler, "disable", disable)
    for module in stand_ins.values():
        # From now on a submodule brings the whole module: alone it may need what that has not defined yet.
        if isinstance(module, _PutOff):
            del module.__path__


def _stand_in(name: str) -> ModuleType:
    module = _PutOff(name)
    spec = _spec_of(name)
    assert spec is not None
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    module.__package__ = name
    module.__path__ = spec.submodule_search_locations or []
    return module


def _spec_of(name: str) -> ModuleSpec | None:
    """Find a submodule without importing the package that it is in."""
    package = find_spec(name.partition(".")[0])
    return PathFinder.find_spec(name, package.submodule_search_locations if package else None)


def _replace(module: ModuleType, name: str, value: Any) -> Any:
    """Set a function of a module; return the one that it had."""
    before = getattr(module, name)
    setattr(module, name, value)
    return before


def _never() -> bool:
    return False


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **_options: Any) -> Any:
    """Decorate with nothing, with or without arguments."""
    return _unmarked if function is None else function
