"""Lazy imports of modules that a CPU worker hardly uses: each is loaded at the first use of a name in it.

torch's compiler, exporter and distributed tensors are half of the time that `import transformers` takes: its
model classes import them for the sake of a decorator or a type. A third of the rest is transformers' search
through the files of all its models, three times, for names that are not used here. Another are torch's
second rules for the shapes of results, in Python, which bring an algebra system when a model is built.
A lazy module has a stand-in, and becomes the real one at the first use of a name that this lacks.

Owns: the list of these modules, and the order of the imports.
Never: changes a model's results, or runs where there is a GPU.
Source: docs/decisions/imports-at-start.md.
"""

import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module, metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

from worker.machine import visible_gpus

_COMPILER = "torch._dynamo"
_SHAPES = "torch._meta_registrations"
_SHAPES_ARE_LAZY_IN = frozenset({"2.13"})
"""Releases of torch that were seen to build every family without these rules; others import them as ever."""
_TRANSFORMERS = "transformers"
_COMPILERS = (_COMPILER, "torch.export")
_GATHERERS = (_TRANSFORMERS, "transformers.models")
"""Packages whose own code only gathers the names of their modules: the modules do without it."""
_MARKS = frozenset({"allow_in_graph", "assume_constant_result", "disable"})
"""Decorators that only say what to do if the function is compiled one day: no reason to load the compiler."""
_PATH = "__path__"
_loading = threading.RLock()


class _LazyModule(ModuleType):
    """Module that is loaded at the first use of a name in it, or of a submodule once it has no path."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != _PATH:
            raise AttributeError(name)
        if self.__name__ == _COMPILER and name in _MARKS:
            return _unmarked
        with _loading:
            if sys.modules[self.__name__] is self and isinstance(self, _LazyModule):
                module = f"{self.__name__}.{name}"
                if self.__name__ in _GATHERERS and PathFinder.find_spec(module, self.__path__):
                    return import_module(module)
                _load(self)
        return getattr(sys.modules[self.__name__], name)


def _load(module: _LazyModule) -> None:
    """Make a module the real one, or let it speak for the module that its own code has put in its place."""
    spec = module.__spec__
    assert spec is not None
    assert spec.loader is not None
    if module.__name__ in _COMPILERS:
        load_shapes()
    # First: the module's own code asks for names of it, which are not there yet.
    object.__setattr__(module, "__class__", ModuleType)
    module.__path__ = spec.submodule_search_locations or []
    try:
        spec.loader.exec_module(module)
    except BaseException:  # the next use tries again and says the same
        object.__setattr__(module, "__class__", _LazyModule)
        raise
    if sys.modules[module.__name__] is not module:
        object.__setattr__(module, "__class__", _LazyModule)


def load_shapes() -> bool:
    """Load torch's rules for shapes in Python, for an operator without others. False: they are there."""
    shapes = sys.modules.get(_SHAPES)
    with _loading:
        if not isinstance(shapes, _LazyModule):
            return False
        _load(shapes)
    return True


def import_torch(device: str) -> None:
    """Import torch and transformers' model classes, on a CPU without the parts that no step uses."""
    is_cpu = device == "cpu" or (device == "auto" and not visible_gpus())
    if not is_cpu or "torch" in sys.modules:  # there already, as in tests: nothing is left to put off
        return
    stand_ins = {name: _stand_in(name) for name in (*_COMPILERS, *_GATHERERS)}
    if ".".join(metadata.version("torch").split(".")[:2]) in _SHAPES_ARE_LAZY_IN:
        stand_ins[_SHAPES] = _stand_in(_SHAPES)
    sys.modules.update(stand_ins)
    # For each operator that torch defines in Python it searches all modules for the one that this is in. The
    # rules for shapes want the answer.
    with _replaced(inspect, "getmodule", _no_module) if _SHAPES in stand_ins else nullcontext():
        import torch
        import torch.distributed

    if _SHAPES in stand_ins:
        _make_generators_usable()
    for name, module in stand_ins.items():
        package, _, own_name = name.rpartition(".")
        if package:
            setattr(sys.modules[package], own_name, module)
    gathered = stand_ins[_TRANSFORMERS]
    gathered.__version__ = metadata.version(_TRANSFORMERS)  # type: ignore[attr-defined]
    # transformers knows builds of torch without it, and asks. Ranks have shared memory of their own.
    torch.distributed.is_available = _never
    # It would load the compiler, in order to be left out by it.
    with _replaced(torch.compiler, "disable", _unmarked):
        import transformers.utils

        # It spreads models over devices and disks, which our loader does not ask for. Few have it.
        with _replaced(transformers.utils, "is_accelerate_available", _never):
            import transformers.generation.utils
            import transformers.modeling_utils

        # What prepares pictures and sounds would load the package itself, for names that it may need one day.
        with _replaced(transformers.utils, "direct_transformers_import", lambda *_: gathered):
            import transformers.modeling_layers
    _compile_patterns_late()
    for name in _COMPILERS:
        # From now on a submodule brings the whole module: alone it may need what that has not defined yet.
        if isinstance(stand_ins[name], _LazyModule):
            del stand_ins[name].__path__


def _make_generators_usable() -> None:
    """Set the metaclass that torch sets in the module of these rules, with operators of its compiler."""
    import torch._C
    from torch._opaque_base import OpaqueBaseMeta

    torch._C._set_generator_metaclass(OpaqueBaseMeta)


def _compile_patterns_late() -> None:
    """Let transformers build its table of renamings for all families without compiling their 900 patterns."""
    from transformers import conversion_mapping, core_model_loading

    name = "_build_checkpoint_conversion_mapping"
    build = getattr(conversion_mapping, name, None)
    if build is None:  # another release: they are compiled as ever
        return
    later = SimpleNamespace(**{**vars(re), "compile": _Pattern})

    def build_uncompiled() -> Any:
        with _replaced(core_model_loading, "re", later):
            return build()

    setattr(conversion_mapping, name, build_uncompiled)


class _Pattern:
    """Regular expression that is compiled at its first use."""

    def __init__(self, *asked: Any) -> None:
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(re.compile(*self._asked), name)


def _stand_in(name: str) -> ModuleType:
    module = _LazyModule(name)
    spec = _spec_of(name)
    assert spec is not None
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    module.__package__ = spec.parent
    module.__path__ = spec.submodule_search_locations or []
    return module


def _spec_of(name: str) -> ModuleSpec | None:
    """Find a module without importing the package that it is in."""
    package = name.rpartition(".")[0]
    if not package:
        return find_spec(name)
    spec = _spec_of(package)
    return PathFinder.find_spec(name, spec.submodule_search_locations if spec else None)


@contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Set a function of a module for a while, if it has one of this name."""
    before = getattr(module, name, None)
    if before is None:
        yield
        return
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _never() -> bool:
    return False


def _no_module(*_: Any) -> None:
    """Answer as for code that stands in no module, whose file is known nonetheless."""


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **_options: Any) -> Any:
    """Decorate with nothing, with or without arguments."""
    return _unmarked if function is None else function
