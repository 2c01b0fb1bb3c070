"""Formats that a JSON schema names and JSON Schema does not know: taken out before a schema is compiled.

Owns: the list of known formats, and the places of a schema where `format` is a keyword.
Never: the formats that are known, supported or not: they restrict a text, and the compiler judges them.
Source: JSON Schema 2020-12, Validation, section 7: a format that is not defined there is an annotation.
Schemas are full of them: OpenAPI's int32, binary and password, and Pydantic's path.
"""

from typing import Any

_KNOWN = frozenset(
    {
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname"),
        *("ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    }
)
_OF_SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
"""Keywords whose keys are the caller's names, which may be `format`."""
_OF_VALUES = frozenset({"const", "enum", "default", "examples"})


def without_unknown_formats(schema: Any) -> Any:
    """A copy, keys in the same order."""
    if isinstance(schema, list):
        return [without_unknown_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _entry(key, value)
        for key, value in schema.items()
        if key != "format" or not isinstance(value, str) or value in _KNOWN
    }


def _entry(key: str, value: Any) -> Any:
    if key in _OF_VALUES:
        return value
    if key in _OF_SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: without_unknown_formats(schema) for name, schema in value.items()}
    return without_unknown_formats(value)
