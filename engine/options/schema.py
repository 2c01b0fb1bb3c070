"""The file of --config as a JSON schema, for editors and for checks before a roll-out.

Owns: the translation of each kind of option into JSON schema, draft 2020-12.
Never: accepts a file that the server refuses, except for two rules that a schema cannot state: the bounds of
values with a unit (`8K`, `2m`), and options that exclude each other.
"""

from typing import Any

from engine.options.options import BY_KEY, DECLARATIONS, FIELDS, Arity
from engine.options.values import Bytes, Choice, Count, Duration, Fraction, Pattern, Switch, Text, ValueKind

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_HUMAN_COUNT = r"^\s*[0-9][0-9_]{0,30}(\.[0-9]{1,15})?\s*[kKmMgGtT]?[iI]?\s*$"
_HUMAN_BYTES = r"^\s*[0-9][0-9_]{0,30}(\.[0-9]{1,15})?\s*[kKmMgGtT]?[iI]?[bB]?\s*$"
_HUMAN_DURATION = r"^\s*[0-9]+(\.[0-9]+)?\s*(ms|s|m|h)?\s*$"
_HUMAN_SHARE = r"^\s*[0-9]+(\.[0-9]+)?%?\s*$"


def file_schema() -> dict[str, Any]:
    """Make the schema. The file may write `_` for `-` in keys; the schema has one spelling."""
    return {
        "$schema": _DRAFT,
        "title": "Tokenyard configuration file",
        "type": "object",
        "additionalProperties": False,
        "properties": {key: _of_option(name) for key, name in BY_KEY.items()},
    }


def _of_option(name: str) -> dict[str, Any]:
    declaration = DECLARATIONS[name]
    forms = _of_kind(declaration.kind)
    if declaration.arity is Arity.MANY:
        forms = [*forms, {"type": "array", "items": {"anyOf": forms}}]
    schema: dict[str, Any] = {
        "description": declaration.help,
        "anyOf": [*forms, {"type": "null"}],  # null is the same as no line
    }
    default = FIELDS[name].default
    if default is not None and not declaration.open_default:
        schema["default"] = default
    return schema


def _of_kind(kind: ValueKind) -> list[dict[str, Any]]:
    """List the forms in which YAML may hold a value of this kind."""
    match kind:
        case Text(metavar="JSON"):
            return [{"type": "string", "pattern": r"\S"}, {"type": "object"}]
        case Text():
            return [{"type": "string", "pattern": r"\S"}, {"type": "number"}]
        case Pattern(pattern=pattern):
            return [{"type": "string", "pattern": rf"^\s*({pattern})\s*$"}]
        case Choice(words=words, synonyms=synonyms):
            return [{"enum": [*words, *dict(synonyms)]}]
        case Switch():
            return [{"type": "boolean"}, {"enum": ["on", "off", "yes", "no", "true", "false"]}]
        case Count(low=low, high=high):
            return [_number("integer", low, high), {"type": "string", "pattern": _HUMAN_COUNT}]
        case Bytes(low=low, high=high):
            return [_number("integer", low, high), {"type": "string", "pattern": _HUMAN_BYTES}]
        case Fraction(low=low, high=high):
            return [_number("number", low, high), {"type": "string", "pattern": _HUMAN_SHARE}]
        case Duration(low=low, high=high):
            return [_number("number", low, high), {"type": "string", "pattern": _HUMAN_DURATION}]
    raise TypeError(f"no JSON schema for options of kind {type(kind).__name__}")


def _number(kind: str, low: float, high: float) -> dict[str, Any]:
    return {"type": kind, "minimum": low, "maximum": high}
