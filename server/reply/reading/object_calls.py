"""Calls written as JSON objects: {"name": ..., "arguments": {...}}, alone, in a list or one after the other.

Owns: the parts of an object, of which the arguments are passed on as they come.
"""

import json
from dataclasses import dataclass

from server.reply.reading.json_text import JsonText
from server.reply.reading.python_calls import read_object
from server.reply.reading.row import ENDED, FAILED, MORE, NO_MARKS, BodyPlace

_OTHER_KEYS = frozenset({"name", "type", "id", "tool_call_id"})
_SEPARATORS = frozenset(",;]}")
_ITEM, _KEY, _COLON, _VALUE, _END = range(5)
"""Parts that may come next."""
_SIGNS = {(_KEY, ","): _KEY, (_END, ","): _KEY, (_COLON, ":"): _VALUE}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectCalls:
    """Names of the keys."""

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    ids: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()

    def begin(self, place: BodyPlace) -> "ObjectReader":
        return ObjectReader(self, place)


class ObjectReader:
    """Reads objects from the first bracket on.

    An object without a mark before it may be an answer that only looks like a call: it is one only if it
    names one of the tools, with an object as arguments and no foreign key. In any other object that has no
    arguments, the foreign keys are the arguments.
    """

    def __init__(self, spec: ObjectCalls, place: BodyPlace) -> None:
        self._spec = spec
        self._log, self._lexer = place.log, place.lexer
        self._names = frozenset(place.schemas) if place.is_bare else None
        self._keys = {*_OTHER_KEYS, *spec.names, *spec.arguments, *spec.ids}
        self._value: JsonText | None = None
        """The key or value under way."""
        self._text: list[str] = []
        """Its text, where it is not passed on at once."""
        self._raw: list[str] = []
        self.num_calls = 0
        self.progress = MORE
        self._reset()

    def _reset(self) -> None:
        self._expects = _ITEM
        self._key = ""
        self._name: str | None = None
        self._id: str | None = None
        self._arguments: str | None = None
        """Complete; an empty text if they were passed on as they came."""
        self._members: list[str] = []
        """JSON of what stands under foreign keys."""
        self._streams = False
        self.has_begun = False
        self._raw.clear()

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def feed(self, text: str, at: int, *, is_last: bool) -> int:  # noqa: ARG002 (nothing here looks ahead)
        if self._streams and self._value is not None:  # as in most steps
            at = self._value.feed(text, at)
            if self._value.progress is MORE:
                return at
        end, begin = len(text), at
        while at < end and self.progress is MORE:
            before, value, num_calls = at, self._value, self.num_calls
            at = self._step(text, at) if value is None else self._read_value(value, text, at)
            if self.num_calls != num_calls:
                begin = at
            if at == before and self._value is value:
                break
        if not self.has_begun:
            self._raw.append(text[begin:at])
        return at

    def finish(self, rest: str, *, is_cut: bool) -> None:
        if not self.has_begun:
            self._raw.append(rest)
        elif self._value is None or self._arguments is not None:
            self.has_begun = is_cut
        else:
            self._value.finish(rest, is_cut=is_cut)
            if self._streams:
                self.has_begun = is_cut or self._value.is_inside_value
            else:
                text = "".join(self._text)
                self._log.arguments(text if is_cut else _unpacked(text))

    def _step(self, text: str, at: int) -> int:
        char, expects = text[at], self._expects
        if char in self._lexer.first_chars and (is_mark := self._lexer.begins(text, at)) is not False:
            return self._break(at) if is_mark else at
        if char.isspace():
            return at + 1
        if expects == _ITEM:
            if char == "{":
                self._expects = _KEY
            elif char not in (_SEPARATORS if self.num_calls else "["):
                return self._break(at)
            return at + 1
        if (expects, char) in _SIGNS:
            self._expects = _SIGNS[expects, char]
            return at + 1
        if char == "}" and expects in (_KEY, _END):
            return self._close_object(at)
        if expects == _KEY and char in "\"'":
            self._value = JsonText(self._lexer, self._text)
            return at
        if expects == _VALUE and char not in ",:}]<":
            return self._begin_value(char, at)
        return self._break(at)

    def _break(self, at: int) -> int:
        """End the object: a call that has begun is over, anything else is none."""
        if self.has_begun:
            if self._streams and self._value is not None:
                self._value.close()
            elif self._arguments is None:
                self._log.arguments("{}")
            self.has_begun = False
            self.num_calls += 1
            self._expects = _ITEM
        is_over = self._expects == _ITEM and self.num_calls > 0
        self.progress = ENDED if is_over else FAILED
        return at

    def _begin_value(self, char: str, at: int) -> int:
        if self._key in self._spec.arguments and self._arguments is None:
            if self._names is not None and char not in "{\"'":
                return self._break(at)
            if self._name is not None:
                self._start(self._name)
                # A string holds the JSON text itself, and null is another word for {}: both only as a whole.
                self._streams = char in "{["
        self._value = JsonText(self._lexer, self._log.pieces if self._streams else self._text)
        return at

    def _read_value(self, value: JsonText, text: str, at: int) -> int:
        at = value.feed(text, at)
        if value.progress is FAILED:
            return self._break(at)
        if value.progress is ENDED:
            self._value = None
            if not self._end_value("".join(self._text)):
                self.progress = FAILED
            self._text.clear()
        return at

    def _end_value(self, text: str) -> bool:
        """False if this cannot be a call."""
        if self._expects == _KEY:
            self._key = _string(text) or ""
            self._expects = _COLON
            return self._names is None or self._key in self._keys
        self._expects = _END
        if self._key in self._spec.names and self._name is None:
            self._name = (_string(text) or "").strip()
            if not self._name or (self._names is not None and self._name not in self._names):
                return False
            if self._arguments is not None:
                self._start(self._name)
                self._log.arguments(self._arguments)
        elif self._key in self._spec.ids:
            self._id = _string(text)
        elif self._key in self._spec.arguments and self._arguments is None:
            self._arguments = "" if self._streams else _unpacked(text)
            if self._name is not None and not self._streams:
                self._log.arguments(self._arguments)
            self._streams = False
        elif self._key not in self._keys:
            self._members.append(f"{json.dumps(self._key, ensure_ascii=False)}: {text}")
        return True

    def _close_object(self, at: int) -> int:
        if not self.has_begun:
            if self._name is None or self._names is not None:
                return self._break(at)
            self._start(self._name)
            self._log.arguments("{" + ", ".join(self._members) + "}")
        self.num_calls += 1
        self._reset()
        return at + 1

    def _start(self, name: str) -> None:
        self.has_begun = True
        self._raw.clear()
        self._log.start(name, self._id or None)


def _unpacked(text: str) -> str:
    """The JSON text of the arguments, given the value under their key: a string holds it, if it can."""
    unpacked = _string(text)
    if unpacked is not None:
        pieces: list[str] = []
        inner = JsonText(NO_MARKS, pieces)
        unpacked = unpacked.lstrip()
        at = inner.feed(unpacked, 0)
        if inner.progress is MORE:
            inner.finish(unpacked[at:], is_cut=False)
            at = len(unpacked)
        mended = "".join(pieces)
        python = None if mended == unpacked.rstrip() else read_object(unpacked)
        text = python or (text if unpacked[at:].strip("} \t\r\n") else mended)
    return "{}" if text.strip() in ("", "null") else text


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
