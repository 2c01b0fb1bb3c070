"""Calls of triton.language by interpreted kernels: worked out once for arguments of a kind, then repeated.

Owns: what the interpreter's builder is asked for by each function for each kind of arguments.
Never: changes what a kernel computes: all numbers are still computed by the interpreter's builder.

The rules by which a function casts and broadcasts its arguments read their types alone, and take ten times as
long as the few operations that they end in.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from triton import language
from triton.runtime import interpreter

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"),
    *("gt", "ge", "lt", "le", "eq", "ne"),
)
_REPEATED = frozenset(
    {
        *(f"__{side}{name}__" for name in _OPERATORS for side in ("", "r")),
        *("__neg__", "__invert__", "__getitem__", "to", "cast", "load", "store", "where", "expand_dims"),
        *("exp", "exp2", "log2", "full", "zeros", "arange", "minimum", "maximum", "broadcast_to", "reshape"),
        *("program_id", "add", "sub", "mul", "dot"),
    }
)
"""Functions that read of their arguments nothing but types and Python's numbers."""
_PLAIN = frozenset({int, bool, str, type(None)})
_CONSTANT = frozenset({"create_splat"})
"""Calls of the builder that bring a number of Python into shape: the same each time."""


class _Step(NamedTuple):
    """A call of the builder, with the places of its arguments among the values so far."""

    name: str
    places: tuple[int, ...]


class _Recipe(NamedTuple):
    constants: tuple[Any, ...]
    """Values before those of the arguments, which stand before those of the steps."""
    steps: tuple[_Step, ...]
    result: int
    fields: dict[str, Any] | None
    """Fields of the tensor that is returned, beside its handle; None without one."""


class _NotTheSame(Exception):
    """Refusal: another call with arguments of this kind may ask for something else."""


class _Recorder:
    """The builder, which notes what it is asked for."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []
        self.has_looked = False
        """Whether a number in a tensor decided what came next."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._builder, name)
        if not name.startswith("create_"):
            return found

        def call(*args: Any, **named: Any) -> Any:
            result = found(*args, **named)
            self.calls.append((name, args, named, result))
            return result

        return call


def truth_of(tensor: Any) -> bool:
    """Truth of a scalar, as the interpreter has it; of a block, that it is there."""
    data = tensor.handle.data
    if data.size > 1:
        return True
    builder = interpreter.interpreter_semantic.builder
    if isinstance(builder, _Recorder):
        builder.has_looked = True
    return bool(data)


def repeated(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; by recipe, where one is known for its arguments."""
    if name not in _REPEATED:
        return function
    recipes: dict[Any, _Recipe | None] = {}
    semantic = interpreter.interpreter_semantic
    builder = semantic.builder

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        handles: list[Any] = []
        try:
            key = _kind_of(args, handles)
            if named:
                key = key, _kind_of(named.items(), handles)
        except _NotTheSame:
            return function(*args, **named)
        recipe = recipes.get(key)
        if recipe is not None:
            return _follow(recipe, builder, handles)
        is_distinct = len({id(each) for each in handles}) == len(handles)
        if key in recipes or semantic.builder is not builder or not is_distinct:
            return function(*args, **named)
        recorder = semantic.builder = _Recorder(builder)
        try:
            result = function(*args, **named)
        finally:
            semantic.builder = builder
        recipes[key] = _recipe_of(recorder, handles, result)
        return result

    return call


def _follow(recipe: _Recipe, builder: Any, handles: list[Any]) -> Any:
    values = [*recipe.constants, *handles]
    for name, places in recipe.steps:
        values.append(getattr(builder, name)(*[values[place] for place in places]))
    if recipe.fields is None:
        return None
    tensor = object.__new__(language.tensor)
    tensor.__dict__.update(recipe.fields)
    tensor.handle = values[recipe.result]
    return tensor


def _kind_of(values: Any, handles: list[Any]) -> tuple[Any, ...]:
    """Kind of these arguments: all but the numbers in tensors, whose handles are added to the list."""
    kinds: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is language.tensor:
            handles.append(value.handle)
            kinds.append(value.type.name)
        elif kind in _PLAIN:
            kinds.append((kind, value))
        elif kind is language.constexpr:
            kinds.extend(_kind_of((value.value,), handles))
        elif kind is float:
            kinds.append((kind, repr(value)))  # 0.0 == -0.0
        elif isinstance(value, language.dtype):
            kinds.append((kind, value.name))
        elif kind is slice:
            kinds.append((kind, _kind_of((value.start, value.stop, value.step), handles)))
        elif kind in (tuple, list, language.tuple):
            kinds.append((kind, _kind_of(value, handles)))
        else:
            raise _NotTheSame
    return tuple(kinds)


def _recipe_of(recorder: _Recorder, handles: list[Any], result: Any) -> _Recipe | None:
    """Recipe for all calls like the one that was recorded; None if there is none."""
    constants: list[Any] = []
    made: dict[int, int] = {id(handle): number for number, handle in enumerate(handles)}
    steps: list[tuple[str, list[tuple[bool, int]]]] = []
    if recorder.has_looked or not (result is None or isinstance(result, language.tensor)):
        return None

    def place_of(value: Any) -> tuple[bool, int]:
        """Whether it is computed, and its number among those that are, or among the others."""
        if id(value) in made:
            return True, made[id(value)]
        constants.append(value)
        return False, len(constants) - 1

    for name, args, named, value in recorder.calls:
        lists = [each for each in args if isinstance(each, list | tuple)]
        if named or any(id(one) in made for each in lists for one in each):
            return None
        if name in _CONSTANT and not any(id(each) in made for each in args):
            continue
        steps.append((name, [place_of(each) for each in args]))
        made[id(value)] = len(handles) + len(steps) - 1
    is_made, number = (False, 0) if result is None else place_of(result.handle)
    first = len(constants)
    return _Recipe(
        tuple(constants),
        tuple(
            _Step(name, tuple(place + first * is_computed for is_computed, place in places))
            for name, places in steps
        ),
        number + first * is_made,
        None if result is None else {name: each for name, each in vars(result).items() if name != "handle"},
    )
