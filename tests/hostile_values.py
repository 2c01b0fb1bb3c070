"""Values that no reader expects, put in the place of each number and text of a JSON file in turn."""

import copy
import json
from collections.abc import Iterator
from typing import Any

HOSTILE = {
    "400 digits": "1" * 400,
    "infinite": "1e400",
    "no number": "NaN",
    "negative": "-1",
    "zero": "0",
    "beyond 64 bits": str(2**63),
    "empty": '""',
    "long": f'"{"x" * 100_000}"',
    "null": "null",
    "true": "true",
    "deep": "[" * 5000 + "]" * 5000,
    "object": '{"a": {"b": 1}}',
}
"""JSON texts by name."""
_MARK = "a place for a hostile value"
_MOST_OF_A_LIST = 2
"""Entries of a long list or mapping that are replaced; the others are like them."""


def hostile_texts(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a name and the JSON text for each leaf and each hostile value."""
    for path in _leaves(content):
        changed = copy.deepcopy(content)
        inner: Any = changed
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = _MARK
        text = json.dumps(changed)
        for name, value in HOSTILE.items():
            yield f"{'.'.join(map(str, path))}: {name}", text.replace(f'"{_MARK}"', value)


def assert_one_line(error: Exception) -> None:
    """Fail unless a person can read it at a glance."""
    assert "\n" not in str(error)
    assert len(str(error)) < 3000


def _leaves(content: Any) -> Iterator[tuple[Any, ...]]:
    if not isinstance(content, dict | list):
        yield ()
        return
    entries = list(content.items() if isinstance(content, dict) else enumerate(content))
    if len(entries) > 40 or isinstance(content, list):  # a vocabulary, say
        entries = entries[:_MOST_OF_A_LIST]
    for key, value in entries:
        yield from ((key, *path) for path in _leaves(value))
