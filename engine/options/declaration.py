"""The declaration of an option: its group, its kind of value and its text of help."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from engine.options.values import ValueKind
from worker.worker_errors import StartupError


class OptionError(Exception):
    """An error in one line for the operator: the option at fault, the reason, and a remedy. Exit code 2."""

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(f"{what}: {why}; {fix}")
        self.what = what
        self.why = why
        self.fix = fix


class UnservableModel(OptionError):
    """An error of the named file itself, whatever the options are. Exit code 78."""


def refuse_given(values: Mapping[str, object], why: str, fix: str) -> None:
    """Raise OptionError for the first flag with a value: none of them has an effect here."""
    for flag, value in values.items():
        if value is not None:
            raise OptionError(flag, why, fix)


class Group(StrEnum):
    """A heading of --help."""

    MODEL = "Model"
    KV_CACHE = "KV cache"
    SCHEDULER = "Scheduler"
    ADDRESS = "Address and page"
    KEYS = "Keys and TLS"
    REQUESTS = "Requests and time limits"
    REPLIES = "Replies"
    LIFE = "Health and end"
    LOGS = "Logs, metrics and traces"


class Arity(Enum):
    """The number of values that an option takes."""

    ONE = 1
    MANY = 2  # repeated flags, a YAML list, commas in the environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    group: Group
    kind: ValueKind
    help: str
    open_default: str = ""
    """Text of --help for the default None; empty if the default is a value."""
    arity: Arity = Arity.ONE
    is_secret: bool = False
    """Whether the value is hidden everywhere, even in errors."""


def declared(group: Group, kind: ValueKind, text: str, *, default: Any = None, **rest: Any) -> Any:
    """Make a field of Options. Without a default it is None, or no values where there may be several."""
    declaration = Declaration(group=group, kind=kind, help=text, **rest)
    if declaration.arity is Arity.MANY:
        default = ()
    return field(default=default, metadata={"option": declaration})


def checked_values(read: Callable[[str | None], dict[str, Any]], text: str | None) -> dict[str, Any]:
    """Parse the JSON of an option by its reader. Raises OptionError."""
    try:
        return read(text)
    except StartupError as error:
        flag, _, why = error.what.partition(" ")
        raise OptionError(flag, why, error.fix) from error
