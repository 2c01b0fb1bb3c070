"""One call, written as a JSON object: {"name": ..., "arguments": {...}}.

Owns: the end of the object, and its parts: the name and the arguments. The text of the
arguments is passed on as it comes; nothing but strings and brackets is understood of it.
Never: the text around the object (object_calls.py).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from server.reply.tool_calls.events import CallEvents

_ARGUMENTS_KEYS = ("arguments", "parameters")
_CALL_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS_KEYS})
_SCALAR_ENDS = frozenset(",}] \t\r\n")


class Progress(Enum):
    """Effect of a character."""

    INSIDE = auto()
    LAST = auto()
    """It was the last one."""
    BEYOND = auto()
    """The character is outside: the object ended before it."""


class ValueScanner:
    """Finds the end of a JSON value, fed with its characters from the first one on."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_empty = True
        self._is_in_string = False
        self._is_escaped = False

    def push(self, char: str) -> Progress:
        if self._is_in_string:
            return self._push_in_string(char)
        if not self._is_empty and not self._depth and char in _SCALAR_ENDS:
            return Progress.BEYOND
        if char == "<":  # never JSON outside of strings, and the beginning of most marks
            return Progress.BEYOND
        self._is_empty = False
        if char == '"':
            self._is_in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return Progress.INSIDE if self._depth else Progress.LAST
        return Progress.INSIDE

    def _push_in_string(self, char: str) -> Progress:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_in_string = False
            return Progress.INSIDE if self._depth else Progress.LAST
        return Progress.INSIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRule:
    """Conditions under which an object is a call."""

    names: frozenset[str] | None = None
    """Names that an object must have to be a call, with an object as arguments and no foreign key: else
    it may be an answer that only looks like a call. None if a mark before the object says that it is one."""


class CallReader:
    """Fed with the characters of an object from its brace on."""

    def __init__(self, log: CallEvents, rule: CallRule) -> None:
        self._log = log
        self._rule = rule
        self._state: Callable[[str], Progress] = self._open
        self._raw: list[str] = []
        """The whole object, until it is known to be a call."""
        self._value = ValueScanner()
        self._key = ""
        self._name: str | None = None
        self._text: list[str] = []
        """Text of the key or value under way, where it is not passed on at once."""
        self._arguments: str | None = None
        """Complete, but older than the name."""
        self._has_arguments = False
        self._streams = False
        self.has_started = False

    @property
    def raw(self) -> str:
        """Text of an object that is no call."""
        return "".join(self._raw)

    def push(self, char: str) -> Progress:
        """LAST ends the object; BEYOND says that it is broken, and that `char` is not part of it."""
        progress = self._state(char)
        if not self.has_started and progress is not Progress.BEYOND:
            self._raw.append(char)
        return progress

    def finish(self) -> None:
        """The text has ended inside the object: arguments stay as they are."""
        if self.has_started and not self._has_arguments:
            self._log.arguments("".join(self._text))

    def _open(self, char: str) -> Progress:
        assert char == "{"
        self._state = self._before_key
        return Progress.INSIDE

    def _before_key(self, char: str) -> Progress:
        if char == '"':
            self._begin_value(char)
            self._state = self._in_key
        elif char == "}":
            return self._close()
        elif not char.isspace() and char != ",":
            return Progress.BEYOND
        return Progress.INSIDE

    def _in_key(self, char: str) -> Progress:
        self._text.append(char)
        if self._value.push(char) is Progress.LAST:
            self._key = _string("".join(self._text)) or ""
            if self._rule.names is not None and self._key not in _CALL_KEYS:
                return Progress.BEYOND
            self._state = self._colon
        return Progress.INSIDE

    def _colon(self, char: str) -> Progress:
        if char == ":":
            self._state = self._before_value
        elif not char.isspace():
            return Progress.BEYOND
        return Progress.INSIDE

    def _before_value(self, char: str) -> Progress:
        if char.isspace():
            return Progress.INSIDE
        if char in ",:}]<":
            return Progress.BEYOND
        is_arguments = self._key in _ARGUMENTS_KEYS and not self._has_arguments
        if is_arguments and self._rule.names is not None and char not in '{"':
            return Progress.BEYOND
        self._begin_value(char)
        self._state = self._in_value
        is_known = is_arguments and self._name is not None
        if is_known:
            self._start()
        # A string holds the JSON text itself, and null is another word for {}: both only as a whole.
        self._streams = is_known and char in "{["
        if self._streams:
            self._text.clear()
            self._log.arguments(char)
        return Progress.INSIDE

    def _begin_value(self, char: str) -> None:
        self._value = ValueScanner()
        self._value.push(char)
        self._text = [char]

    def _in_value(self, char: str) -> Progress:
        progress = self._value.push(char)
        if progress is not Progress.BEYOND:
            if self._streams:
                self._log.arguments(char)
            else:
                self._text.append(char)
        elif char == "<":
            self.finish()
            return progress
        if progress is Progress.INSIDE:
            return progress
        if not self._end_value():
            return Progress.BEYOND
        self._state = self._after_value
        return Progress.INSIDE if progress is Progress.LAST else self._after_value(char)

    def _end_value(self) -> bool:
        """False if this cannot be a call."""
        text = "".join(self._text)
        self._text.clear()
        if self._key == "name" and self._name is None:
            self._name = _string(text)
            if not self._name or (self._rule.names is not None and self._name not in self._rule.names):
                return False
            if self._arguments is not None:
                self._start()
                self._log.arguments(self._arguments)
        elif self._key in _ARGUMENTS_KEYS and not self._has_arguments:
            self._has_arguments = True
            if self._name is None:
                self._arguments = _unpacked(text)
            elif text:
                self._log.arguments(_unpacked(text))
        return True

    def _after_value(self, char: str) -> Progress:
        if char == ",":
            self._state = self._before_key
        elif char == "}":
            return self._close()
        elif not char.isspace():
            return Progress.BEYOND
        return Progress.INSIDE

    def _close(self) -> Progress:
        if not self.has_started:
            if self._name is None or self._rule.names is not None:
                return Progress.BEYOND
            self._start()
            self._log.arguments("{}")
        return Progress.LAST

    def _start(self) -> None:
        assert self._name is not None
        self.has_started = True
        self._raw.clear()
        self._log.start(self._name)


def _unpacked(text: str) -> str:
    """The JSON text of the arguments, given the value under their key."""
    unpacked = _string(text)
    arguments = text if unpacked is None else unpacked
    return "{}" if arguments == "null" else arguments


def _string(text: str) -> str | None:
    """The content of a JSON string; None if it is not one, or has half a character, which JSON can escape."""
    try:
        value = json.loads(text, strict=False)
        if isinstance(value, str):
            value.encode()
            return value
    except (ValueError, RecursionError):
        pass
    return None
