"""Calls that are read when they are complete: in braces, in Python, and in lines."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.reply.reading.row import ENDED, FAILED, MORE, BodyPlace, ToolSchemas

MAX_CALL_CHARS = 256 * 1024
"""Longer calls are content, unless their name has been sent."""
_BRACKET = re.compile(r"""\\.|["'()\[\]{}]""", re.DOTALL)

WrittenCalls = Sequence[tuple[str | None, str]]
"""Names and arguments of calls; without a name, text that is content."""
WholeReading = Callable[[str, ToolSchemas], WrittenCalls]
"""Reader of calls; it returns none for a text that is anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeCalls:
    """A text between two marks."""

    read: WholeReading
    quote: str = ""
    """Mark around strings, in which no other mark counts."""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.quote,) if self.quote else ()

    def begin(self, place: BodyPlace) -> "WholeReader":
        return WholeReader(self, place)


class WholeReader:
    """Collects the text of the calls. Where the head has the name, the text is the arguments."""

    def __init__(self, spec: WholeCalls, place: BodyPlace) -> None:
        self._spec = spec
        self._place = place
        self._pieces: list[str] = []
        self._num_chars = 0
        self._is_quoted = False
        self._brackets = _Brackets() if place.is_bare else None
        self.has_begun = bool(place.name)
        self.num_calls = int(self.has_begun)
        self.progress = MORE

    @property
    def raw(self) -> str:
        return "".join(self._pieces)

    def feed(self, text: str, at: int, *, is_last: bool) -> int:  # noqa: ARG002 (nothing here looks ahead)
        if self._brackets is not None:
            end = self._brackets.end_in(text, at)
            self._add(text[at : len(text) if end is None else end])
            if end is not None and self.progress is MORE:
                self._read()
            return len(text) if end is None else end
        call = self._place.row.call
        assert call is not None
        while self.progress is MORE:
            stop, mark = self._place.lexer.next(text, at)
            self._add(text[at:stop])
            at = stop
            if not mark or self.progress is not MORE:
                break
            self._is_quoted ^= mark == self._spec.quote
            if mark != self._spec.quote and (not self._is_quoted or mark in call.openings):
                self._read()
                break
            self._add(mark)
            at += len(mark)
        return at

    def finish(self, rest: str, *, is_cut: bool) -> None:
        self._add(rest)
        if self._brackets is None and not (is_cut and self._place.name):
            self._read()

    def _add(self, text: str) -> None:
        self._pieces.append(text)
        self._num_chars += len(text)
        if self._num_chars > MAX_CALL_CHARS and not self._place.name:
            self._fail()

    def _fail(self) -> None:
        self.has_begun = False
        self.progress = FAILED

    def _read(self) -> None:
        place = self._place
        of_name = {place.name: place.schemas.get(place.name, {})}
        calls = self._spec.read(self.raw, of_name if place.name else place.schemas)
        if not calls or (place.is_bare and not all(name in place.schemas for name, _ in calls)):
            self._fail()
            return
        for name, text in calls:
            if name is None:
                place.log.content_of_call(text)
                continue
            if not place.name:
                place.log.start(name)
            place.log.arguments(text)
        self.num_calls = len(calls)
        self.has_begun = False
        self.progress = ENDED


class _Brackets:
    """Depth of brackets in Python text, outside of its strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def end_in(self, text: str, at: int) -> int | None:
        """Return the place behind the last closing bracket; None if a bracket is open at the end."""
        if self._is_escaped and at < len(text):
            at += 1
            self._is_escaped = False
        for found in _BRACKET.finditer(text, at):
            char = found.group()
            if len(char) == 2:
                continue
            if self._quote:
                self._quote = "" if char == self._quote else self._quote
            elif char in "\"'":
                self._quote = char
            else:
                self._depth += 1 if char in "([{" else -1
                if self._depth == 0:
                    return found.end()
        rest = text[at:]
        self._is_escaped = (len(rest) - len(rest.rstrip("\\"))) % 2 == 1
        return None
