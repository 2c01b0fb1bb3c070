"""A stand-in for Helm that knows the few forms which our templates use, and refuses all others.

Owns: `.Values` and `.Release`, `if`/`end`, `quote`, `toYaml`, `nindent`, `sha256sum`, and trimming by `-`.
Never: stands for a test with Helm itself; docs/deploy.md says how far each was tried.
Source: Helm's documentation of template functions.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

_ACTION = re.compile(r"(?P<before>\s*)\{\{(?P<left>-?)\s*(?P<code>[^{}]*?)\s*(?P<right>-?)\}\}(?P<after>\s*)")


def render(path: Path, values: dict[str, Any], release: dict[str, str]) -> str:
    """Raises ValueError for a form that is not known, KeyError for a value that is not there."""
    text, place = path.read_text(encoding="utf-8"), 0
    known = {"Values": values, "Release": release}
    written: list[str] = []
    is_shown = [True]
    for match in _ACTION.finditer(text):
        before = text[place : match.start()] + ("" if match["left"] else match["before"])
        if all(is_shown):
            written.append(before)
        place = match.end() if match["right"] else match.start("after")
        code = match["code"]
        if code == "end":
            is_shown.pop()
        elif code.startswith("if "):
            # Whatever is false to Go's templates is false to Python: 0, "", nil, empty lists and maps.
            is_shown.append(all(is_shown) and bool(_value(code.removeprefix("if "), known)))
        elif all(is_shown):
            written.append(_text(_pipe(code, known)))
    if len(is_shown) != 1:
        raise ValueError(f"{path.name}: an `if` without its `end`")
    return "".join(written) + text[place:]


def _pipe(code: str, known: dict[str, Any]) -> object:
    first, *stages = [part.strip() for part in code.split("|")]
    words = first.split()
    value = _value(words[-1], known)
    for stage in [*words[:-1], *stages]:
        name, *arguments = stage.split()
        if name not in _STAGES:
            raise ValueError(f"this stand-in for Helm does not know {name!r}")
        value = _STAGES[name](value, *arguments)
    return value


def _value(name: str, known: dict[str, Any]) -> Any:
    if not re.fullmatch(r"(\.[A-Za-z]\w*)+", name):
        raise ValueError(f"this stand-in for Helm does not know {name!r}")
    value: Any = known
    for part in name[1:].split("."):
        value = value[part]
    return value


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _nindent(value: object, width: str) -> str:
    return "".join(f"\n{' ' * int(width)}{line}" for line in str(value).splitlines())


_STAGES: dict[str, Callable[..., object]] = {
    "quote": lambda value: f'"{_text(value)}"',
    "toYaml": lambda value: yaml.safe_dump(value, default_flow_style=False).rstrip("\n"),
    "nindent": _nindent,
    "sha256sum": lambda value: hashlib.sha256(str(value).encode()).hexdigest(),
}
