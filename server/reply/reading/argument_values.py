"""A value that a model writes as plain text, as JSON by the schema of the tool.

Never: marks (tagged_calls.py), or an exception: a value that does not fit its type stays a string.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import Any

PYTHON_WORDS: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}
_TYPES: Mapping[type, str] = {
    **{bool: "boolean", int: "integer", float: "number"},
    **{str: "string", list: "array", dict: "object"},
}
"""Names of JSON's types."""
MAX_DEPTH = 64
"""Brackets that arguments may have around a value."""
_MAX_PARTS = 64
"""Parts of a schema that are looked at: a reference may lead to thousands."""


def as_json(text: str, types: frozenset[str], *, depth: int = MAX_DEPTH - 1) -> str:
    """Return the JSON text of a value: of one of the types if it fits, else of a string.

    `depth`: brackets that it may have within each other.
    """
    plain = text.strip()
    plain = PYTHON_WORDS.get(plain, plain)
    try:
        value = json.loads(plain)
        fits = not types or _type_of(value) in types or ("number" in types and _type_of(value) == "integer")
        if fits and not isinstance(value, str) and fits_in(value, depth):
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
            written.encode()  # a ValueError for half a character, which JSON can escape
            return written
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)


class ArgumentTypes:
    """JSON types of the arguments of a tool, as far as its schema says.

    Also by the parts of the schema: those of unions and of references within it.
    """

    def __init__(self, schema: object, root: object = None) -> None:
        """`root`: the schema that references of this one are of, if it is not the whole."""
        self._root = schema if root is None else root
        parts = list(_parts(schema, self._root))
        found = (part.get("properties") for part in parts)
        self._properties: list[dict[str, object]] = [each for each in found if isinstance(each, dict)]
        self._of_others = [part["additionalProperties"] for part in parts if "additionalProperties" in part]
        self._known: dict[str, frozenset[str]] = {}
        self._within: dict[str, ArgumentTypes] = {}

    @property
    def names(self) -> Collection[str]:
        """Names of the arguments, in the order of the schema."""
        return dict.fromkeys(chain.from_iterable(self._properties))

    def of(self, name: str) -> frozenset[str]:
        """Return the types that an argument may have; empty if the schema does not say."""
        if name not in self._known:
            types = (_own_types(part) for each in self._schemas(name) for part in self._typed(each))
            self._known[name] = frozenset().union(*types)
        return self._known[name]

    def within(self, name: str) -> "ArgumentTypes":
        """Return the types of the members of an argument; those of a list's items are under `item`."""
        if name not in self._within:
            schemas = [part for each in self._schemas(name) for part in _parts(each, self._root)]
            items = {"anyOf": [part["items"] for part in schemas if "items" in part]}
            of_list = {"properties": {"item": items}}
            self._within[name] = ArgumentTypes({"anyOf": [of_list, *schemas]}, self._root)
        return self._within[name]

    def _schemas(self, name: str) -> list[object]:
        return [each[name] for each in self._properties if name in each] or self._of_others

    def _typed(self, schema: object) -> Iterator[dict[str, Any]]:
        return _parts(schema, self._root, ends=lambda part: bool(_own_types(part)))


def _parts(
    schema: object, root: object, ends: Callable[[dict[str, Any]], bool] = lambda _: False
) -> Iterator[dict[str, Any]]:
    """Yield a schema and the parts of it, each once. `ends`: whether to look for none within a part."""
    seen, left = set[int](), [schema]
    for part in left:  # which grows
        if len(seen) == _MAX_PARTS:
            break
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            yield part
            if not ends(part):
                unions = (part.get(name) for name in ("anyOf", "oneOf", "allOf"))
                left += [each for union in unions if isinstance(union, list) for each in union[:_MAX_PARTS]]
                left.append(_referred(root, part.get("$ref")))


def _referred(root: object, pointer: object) -> object:
    """Return the part of a schema to which a JSON pointer leads; None if it leads out of it, or far in."""
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return None
    found = root
    for step in pointer.split("/", _MAX_PARTS)[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _own_types(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that a schema itself says; empty if it leaves them to its parts."""
    declared, values = schema.get("type"), schema.get("enum")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(name for name in declared if isinstance(name, str))
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    return frozenset(map(_type_of, values)) if isinstance(values, list) else frozenset()


def fits_in(value: Any, depth: int) -> bool:
    """Tell whether a value has at most this number of brackets within each other."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    return inner is None or (depth > 0 and all(fits_in(each, depth - 1) for each in inner))


def _type_of(value: Any) -> str:
    return _TYPES.get(type(value), "null")
