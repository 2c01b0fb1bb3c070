"""Schemas that the library takes, and that fail in the middle of some texts.

Owns: the check for them. Source: llguidance issue 265.
Never: runs in a process that serves others: a stranger's pattern may take for ever.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from scheduler.messages import Grammar, GrammarKind
from worker.sampling.grammar_library import GrammarRefused

_JSON = "%json "
"""The word before a schema in a Lark grammar."""


def check_patterns(grammar: Grammar) -> None:
    """Raise GrammarRefused for an object in which a pattern of `patternProperties` matches a property."""
    for schema in _schemas(grammar):
        for part in _objects(schema):
            _check_object(part.get("properties"), part.get("patternProperties"))


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


def _check_object(properties: Any, patterns: Any) -> None:
    if not isinstance(properties, dict) or not isinstance(patterns, dict):
        return
    for pattern in patterns:
        try:
            matches = re.compile(pattern).search
        except re.error:
            continue
        name = next((name for name in properties if isinstance(name, str) and matches(name)), None)
        if name is not None:
            raise GrammarRefused(
                f"the pattern {pattern[:60]!r} of patternProperties matches the property {name[:60]!r}"
                " as well; name it in one of them"
            )
