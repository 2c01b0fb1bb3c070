"""Schemas that the library takes, and that fail in the middle of some texts.

Owns: the check for them. Source: llguidance issue 265.
Never: runs in a process that serves others: a stranger's pattern may take for ever.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from scheduler.messages import Grammar, GrammarKind

_JSON = "%json "
"""The word before a schema in a Lark grammar."""


def doubled_property(grammar: Grammar) -> str:
    """Return why a schema is refused: a pattern of `patternProperties` matches a property; else nothing."""
    parts = (part for schema in _schemas(grammar) for part in _objects(schema))
    reasons = (_reason(part.get("properties"), part.get("patternProperties")) for part in parts)
    return next(filter(None, reasons), "")


def _schemas(grammar: Grammar) -> Iterator[Any]:
    """Schemas of a grammar; what is no JSON is left to the library."""
    text, decoder = grammar.text, json.JSONDecoder()
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        places = [0]
    elif grammar.kind is GrammarKind.LARK:
        places = [found.end() for found in re.finditer(_JSON, text)]
    else:
        places = []
    for place in places:
        try:
            yield decoder.raw_decode(text, place)[0]
        except (ValueError, RecursionError):
            continue


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def _reason(properties: Any, patterns: Any) -> str:
    if not isinstance(properties, dict) or not isinstance(patterns, dict):
        return ""
    for pattern in patterns:
        try:
            matches = re.compile(pattern).search
        except re.error:
            continue
        name = next((name for name in properties if isinstance(name, str) and matches(name)), None)
        if name is not None:
            return (
                f"the pattern {pattern[:60]!r} of patternProperties matches the property {name[:60]!r}"
                " as well; name it in one of them"
            )
    return ""
