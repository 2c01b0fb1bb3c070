"""Arguments that a model writes as plain text, as JSON by the schema of the tool.

Owns: the type of each argument, and the JSON text of the whole.
Never: marks (tagged_calls.py), or an exception: a value that does not fit its type stays a string.
"""

import json
from collections.abc import Mapping
from typing import Any

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""The schema of the parameters, by the name of the tool."""

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_MAX_DEPTH = 8


class ArgumentWriter:
    """Writes one object, argument by argument. Each call returns the JSON text that is certain by now."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._is_first = True
        self._types: frozenset[str] = frozenset()
        self._pieces: list[str] = []
        self._held = ""
        self._is_at_start = True

    def begin(self, key: str) -> str:
        """Begin the argument `key`."""
        opening = "{" if self._is_first else ", "
        self._is_first = False
        self._types = types_of(self._properties.get(key))
        self._pieces.clear()
        self._held = ""
        self._is_at_start = True
        quote = '"' if self._is_text else ""
        return f"{opening}{json.dumps(key, ensure_ascii=False)}: {quote}"

    def add(self, char: str) -> str:
        """Add a character of the value. Texts are passed on as they come, but for one newline at each end."""
        if self._is_at_start:
            self._is_at_start = False
            if char == "\n":
                return ""
        if not self._is_text:
            self._pieces.append(char)
            return ""
        released, self._held = (self._held, char) if char == "\n" else (self._held + char, "")
        return _escaped(released)

    def end(self) -> str:
        """End the argument."""
        if self._is_text:
            return '"'
        text = "".join(self._pieces)
        return as_json(text.removesuffix("\n"), self._types)

    def close(self) -> str:
        """End the object."""
        return "{}" if self._is_first else "}"

    @property
    def _is_text(self) -> bool:
        return self._types == {"string"}


def as_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON text of a value: of one of the types if it fits, else of a string."""
    plain = text.strip()
    plain = _PYTHON_WORDS.get(plain, plain)
    try:
        value = json.loads(plain)
        fits = not types or _type_of(value) in types or ("number" in types and _type_of(value) == "integer")
        if fits and not isinstance(value, str):
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
            written.encode()  # a ValueError for half a character, which JSON can escape
            return written
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)


def types_of(schema: Any, depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows, as far as it says; empty if it does not."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
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


def _type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
        case _:
            return "null"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
