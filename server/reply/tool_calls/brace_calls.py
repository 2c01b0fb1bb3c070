"""Calls with unquoted keys, and strings between marks of their own.

    functiongemma   <start_function_call>call:f{a:<escape>x<escape>,n:1}<end_function_call>
    gemma4          <|tool_call>call:f{a:<|"|>x<|"|>,n:1}<tool_call|>

Owns: the text between the marks, and its values as JSON.
Never: pieces of the arguments: a call is read when it is complete.
Source: the chat templates of FunctionGemma and Gemma 4.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from server.reply.tool_calls.events import ToolCallParser
from server.reply.tool_calls.marks import MarkFinder

_MAX_DEPTH = 64
_PREFIX = "call:"


@dataclass(frozen=True, slots=True, kw_only=True)
class BraceSyntax:
    """Marks of one dialect."""

    opening: str
    closing: str
    quote: str

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.opening, self.closing, self.quote)


class BraceCallParser(ToolCallParser):
    """Text between the marks that cannot be read is content, marks included."""

    def __init__(self, syntax: BraceSyntax) -> None:
        super().__init__()
        self._syntax = syntax
        self._finder = MarkFinder(syntax.opening)
        self._body: list[str] = []
        self._state: Callable[[str], None] = self._in_text

    def _push(self, char: str) -> None:
        self._state(char)

    def _end(self) -> None:
        if self._state == self._in_text:
            self._log.content(self._finder.flush())
        else:
            self._body.append(self._finder.flush())
            self._close("")

    def _in_text(self, char: str) -> None:
        text, mark = self._finder.push(char)
        if text:
            self._log.content(text)
        if mark:
            self._body.clear()
            self._finder = MarkFinder(self._syntax.closing)
            self._state = self._in_body

    def _in_body(self, char: str) -> None:
        text, mark = self._finder.push(char)
        self._body.append(text)
        if mark:
            self._close(mark)

    def _close(self, mark: str) -> None:
        text = "".join(self._body)
        name, brace, rest = text.strip().removeprefix(_PREFIX).partition("{")
        try:
            if not brace or not name.strip():
                raise ValueError
            arguments = read_braces("{" + rest, ((self._syntax.quote, self._syntax.quote),))
        except ValueError:
            self._log.content(self._syntax.opening + text + mark)
        else:
            self._log.start(name.strip())
            self._log.arguments(arguments)
        self._finder = MarkFinder(self._syntax.opening)
        self._state = self._in_text


def read_braces(text: str, quotes: tuple[tuple[str, str], ...]) -> str:
    """Return the JSON text of a value with unquoted keys, and strings between these quotes or JSON's.

    Raises ValueError if the text is none.
    """
    return _Reader(text, (*quotes, ('"', '"'))).read_all()


class _Reader:
    """Reads a value from a text, by places in it. Every method raises ValueError if there is none."""

    def __init__(self, text: str, quotes: tuple[tuple[str, str], ...]) -> None:
        self._text = text
        self._quotes = quotes
        self._at = 0

    def read_all(self) -> str:
        """Return the JSON text of the value that the whole text is."""
        value = self._value(0)
        self._skip_spaces()
        if self._at != len(self._text):
            raise ValueError
        return value

    def _value(self, depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise ValueError
        self._skip_spaces()
        if self._takes("{"):
            return "{" + ", ".join(self._items("}", depth, has_keys=True)) + "}"
        if self._takes("["):
            return "[" + ", ".join(self._items("]", depth, has_keys=False)) + "]"
        for opening, closing in self._quotes:
            if self._takes(opening):
                return json.dumps(self._until(closing), ensure_ascii=False)
        return _scalar(self._bare(",}]"))

    def _items(self, closing: str, depth: int, *, has_keys: bool) -> list[str]:
        items: list[str] = []
        self._skip_spaces()
        while not self._takes(closing):
            if items and not self._takes(","):
                raise ValueError
            item = self._value(depth + 1) if not has_keys else self._pair(depth)
            items.append(item)
            self._skip_spaces()
        return items

    def _pair(self, depth: int) -> str:
        self._skip_spaces()
        for opening, closing in self._quotes:
            if self._takes(opening):
                key = self._until(closing)
                self._skip_spaces()
                break
        else:
            key = self._bare(":").strip()
        if not self._takes(":"):
            raise ValueError
        return f"{json.dumps(key, ensure_ascii=False)}: {self._value(depth + 1)}"

    def _skip_spaces(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1

    def _takes(self, text: str) -> bool:
        is_here = self._text.startswith(text, self._at)
        self._at += len(text) if is_here else 0
        return is_here

    def _until(self, mark: str) -> str:
        end = self._text.index(mark, self._at)
        found, self._at = self._text[self._at : end], end + len(mark)
        return found

    def _bare(self, ends: str) -> str:
        begin = self._at
        while self._at < len(self._text) and self._text[self._at] not in ends:
            self._at += 1
        if self._at in (begin, len(self._text)):
            raise ValueError
        return self._text[begin : self._at]


def _scalar(text: str) -> str:
    """Return a number or a word of JSON as it is, anything else as a string."""
    plain = text.strip()
    try:
        json.loads(plain, parse_constant=_no_constant)
    except ValueError:
        return json.dumps(plain, ensure_ascii=False)
    return plain


def _no_constant(text: str) -> str:
    raise ValueError(text)
