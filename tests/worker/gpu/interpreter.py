"""Triton's interpreter beside a newer numpy than it was written for, and without its needless work.

Owns: what must be mended in it, as long as a release that we support needs it.
Never: changes what a kernel computes.
"""

import inspect
from dataclasses import replace
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import Any

import triton
from triton import language
from triton.runtime import interpreter

from tests.worker.gpu.interpreted_calls import repeated, truth_of
from worker.devices import dependent_launch


@cache
def mend_interpreter() -> None:
    """Once for a process."""
    if triton.__version__.startswith("3.6."):
        _make_numbers_of_scalars()
    else:
        _patch_once()
    _read_signatures_once()
    _leave_tensors_where_they_are()
    _leave_out_overflows()
    _look_up_types_once()
    _let_nothing_wait()
    _make_block_types_once()
    _leave_equal_shapes()


def _let_nothing_wait() -> None:
    """Leave out the wait for the kernel before: one ends here before the next begins."""
    if isinstance(dependent_launch.wait_first, interpreter.InterpretedFunction):
        nothing = SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)
        dependent_launch.cuda = nothing  # type: ignore[misc]


def _make_numbers_of_scalars() -> None:
    """Let a scalar of a kernel be the bound of a loop: numpy 2.5 makes no number of such an array."""
    patch = interpreter._patch_lang_tensor

    def patch_with_numbers(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_numbers


def _leave_out_overflows() -> None:
    """Compute no second time in 64 bits what whole numbers of 32 bits hold.

    The results only reach assertions of the device, which the interpreter's options leave out.
    """
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _look_up_types_once() -> None:
    """Keep the numpy type of each scalar and the shape of each block, both made anew for every value."""
    find = interpreter._get_np_dtype
    by_name: dict[str, Any] = {}

    def find_once(dtype: Any) -> Any:
        scalar = dtype.scalar
        name = "pointer" if isinstance(scalar, language.pointer_type) else scalar.name
        if name not in by_name:
            by_name[name] = find(scalar)
        return by_name[name]

    interpreter._get_np_dtype = find_once

    def hold(tensor: Any, handle: Any, type: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = _shape_of(type.shape if type.is_block() else ())

    language.tensor.__init__ = hold


@cache
def _shape_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
    sizes = language.core.tuple([language.constexpr(size) for size in shape])
    return sizes, language.constexpr(prod(shape))


def _make_block_types_once() -> None:
    """Keep what a block's type has computed of its shape: its number of elements and its name."""
    make = language.block_type.__init__
    made: dict[tuple[Any, ...], dict[str, Any]] = {}

    def make_once(block_type: Any, element_ty: Any, shape: Any) -> None:
        key = (type(element_ty), element_ty.name, *map(language.core._unwrap_if_constexpr, shape))
        if key not in made:
            make(block_type, element_ty, shape)
            made[key] = dict(block_type.__dict__)
        block_type.__dict__.update(made[key])

    language.block_type.__init__ = make_once


def _leave_equal_shapes() -> None:
    """Compare the shapes of two blocks as lists: most are equal, and nothing is to be broadcast."""
    broadcast = interpreter.TritonSemantic.broadcast_impl_value

    def broadcast_others(semantic: Any, left: Any, right: Any) -> Any:
        if (
            left.type.is_block()
            and right.type.is_block()
            and left.type.shape.values == right.type.shape.values
        ):
            return left, right
        return broadcast(semantic, left, right)

    interpreter.TritonSemantic.broadcast_impl_value = broadcast_others


def _read_signatures_once() -> None:
    """Keep the parameters of a kernel, which each launch looks up twice."""
    spec_of = cache(inspect.getfullargspec)

    def call_arguments(fn: Any, *args: Any, **named: Any) -> dict[str, Any]:
        spec = spec_of(fn)
        defaults = dict(zip(reversed(spec.args), reversed(spec.defaults or ()), strict=False))
        return defaults | (spec.kwonlydefaults or {}) | dict(zip(spec.args, args, strict=False)) | named

    known = {**vars(inspect), "getfullargspec": spec_of, "getcallargs": call_arguments}
    interpreter.inspect = SimpleNamespace(**known)  # type: ignore[assignment]


def _leave_tensors_where_they_are() -> None:
    """Copy no tensor to the host and back: all are there."""
    executor = interpreter.GridExecutor
    executor._init_args_hst = lambda self, args, named: (args, named)  # type: ignore[method-assign]
    executor._restore_args_dev = lambda *_: None  # type: ignore[method-assign]


def _patch_once() -> None:
    """Replace triton.language by the interpreter's functions once, for all that is interpreted.

    The interpreter does it again in every launch and every call of a device function, by a search through all
    members of the module: a third of the time of a small kernel. With Triton 3.6 results are wrong then.
    """
    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another release does it in another way
    patch, seen, patched = interpreter._patch_lang, set[Any](), set[int]()

    def patch_new_modules(fn: Any) -> Any:
        if fn not in seen:
            seen.add(fn)
            values = fn.__globals__.values()
            modules = {id(value) for value in values if value is language or value is language.core}
            if not modules <= patched:
                patch(fn)
                language.tensor.__bool__ = truth_of
                patched.update(modules)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_new_modules
    interpreter._patch_builtin = _patch_builtin


def _patch_builtin(module: Any, builder: Any, scope: Any) -> None:
    for name, member in _replacements_for(module, builder):
        scope.set_attr(module, name, member)


@cache
def _replacements_for(module: Any, builder: Any) -> list[tuple[str, Any]]:
    """Return the interpreter's functions by name. First asked for while nothing is replaced."""
    found: list[tuple[str, Any]] = []

    class Collector:
        def set_attr(self, _: Any, name: str, member: Any) -> None:
            found.append((name, member))

    for name, member in inspect.getmembers(module):
        if language.core.is_builtin(member):
            interpreter._patch_attr(module, name, member, builder, Collector())
    for name, member in found:
        member.__wrapped__ = getattr(module, name)  # a release of Triton is known by its signatures
    return [(name, repeated(name, member)) for name, member in found]
