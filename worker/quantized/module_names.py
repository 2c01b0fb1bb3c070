"""Groups of a compressed-tensors config, and the modules that belong to each.

Owns: the rules of `targets` and `ignore`: a module's name, `re:` and a regular expression that begins at the
start of its name, or the name of its class.
Never: knows what a group's weights look like (compressed_tensors.py).
"""

import re
from collections.abc import Iterable

_REGULAR = "re:"


def matches(target: str, module: str, class_name: str) -> bool:
    return _matches_name(target, module) or target == class_name


def best_match(targets: Iterable[str], module: str, class_name: str) -> str | None:
    """The most specific target: a name, then a regular expression, then a class; else by alphabet."""
    found = [each for each in sorted(targets) if matches(each, module, class_name)]
    return min(found, key=lambda each: _rank(each, module), default=None)


def _matches_name(target: str, module: str) -> bool:
    if target.startswith(_REGULAR):
        return re.match(target.removeprefix(_REGULAR), module) is not None
    return target == module


def _rank(target: str, module: str) -> int:
    if target.startswith(_REGULAR):
        return 1
    return 0 if target == module else 2


def find_fault(target: object) -> str | None:
    """Describe the fault of a target, if it has one."""
    if not isinstance(target, str):
        return f"{target!r} is no text"
    try:
        re.compile(target.removeprefix(_REGULAR) if target.startswith(_REGULAR) else "")
    except re.error as error:
        return f"{target!r} is no regular expression: {error}"
    return None
