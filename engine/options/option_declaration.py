"""What is said about one option beside its type and default.

Owns: the words in which an option is declared.
Never: an option (options.py, edge_options.py).
"""

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from engine.options.option_values import Kind


class OptionError(Exception):
    """One line for the operator: what is wrong, why, and what to do. Ends the command with code 2."""

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(f"{what}: {why}; {fix}")
        self.what = what
        self.why = why
        self.fix = fix


class Group(StrEnum):
    """A heading of --help."""

    MODEL = "Model"
    KV_CACHE = "KV cache"
    SCHEDULER = "Scheduler"
    SERVER = "Server"
    EDGE = "Keys, TLS and limits"


class Arity(Enum):
    """How many values an option takes."""

    ONE = 1
    MANY = 2  # repeated flags, a YAML list, commas in the environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What Options says about one field, beside its type and default."""

    group: Group
    kind: Kind
    help: str
    open_default: str = ""
    """What None comes to, for --help; empty where the default is a value."""
    arity: Arity = Arity.ONE
    is_secret: bool = False
    """Its value is never shown, not even in an error."""


def declared(group: Group, kind: Kind, text: str, *, default: Any, **rest: Any) -> Any:
    """Make a field of Options."""
    return field(default=default, metadata={"option": Declaration(group=group, kind=kind, help=text, **rest)})
