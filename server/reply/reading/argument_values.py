"""A value that a model writes as plain text, as JSON by the schema of the tool.

Owns: the type of each argument.
Never: marks (tagged_calls.py), or an exception: a value that does not fit its type stays a string.
"""

import json
from collections.abc import Mapping
from typing import Any

PYTHON_WORDS: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}
_TYPES: Mapping[type, str] = {
    **{bool: "boolean", int: "integer", float: "number"},
    **{str: "string", list: "array", dict: "object"},
}
"""Names of JSON's types."""
MAX_DEPTH = 64
"""Brackets that arguments may have around a value."""
_MAX_UNIONS = 8


def as_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON text of a value: of one of the types if it fits, else of a string."""
    plain = text.strip()
    plain = PYTHON_WORDS.get(plain, plain)
    try:
        value = json.loads(plain)
        fits = not types or _type_of(value) in types or ("number" in types and _type_of(value) == "integer")
        if fits and not isinstance(value, str) and fits_in(value, MAX_DEPTH - 1):
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
            written.encode()  # a ValueError for half a character, which JSON can escape
            return written
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)


def types_of(schema: Any, depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows, as far as it says; empty if it does not."""
    if not isinstance(schema, dict) or depth > _MAX_UNIONS:
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(name for name in declared if isinstance(name, str))
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), list):
            return frozenset().union(*(types_of(choice, depth + 1) for choice in schema[union]))
    if isinstance(schema.get("enum"), list):
        return frozenset(_type_of(value) for value in schema["enum"])
    return frozenset()


def fits_in(value: Any, depth: int) -> bool:
    """Tell whether a value has at most this number of brackets within each other."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    return inner is None or (depth > 0 and all(fits_in(each, depth - 1) for each in inner))


def _type_of(value: Any) -> str:
    return _TYPES.get(type(value), "null")
