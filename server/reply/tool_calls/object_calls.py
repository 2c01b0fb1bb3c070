"""Calls written as JSON objects, with marks around them or without.

Owns: the alternation of text, marks and objects.

    hermes        text <tool_call> {...} </tool_call> <tool_call> {...} </tool_call>
    llama3_json   text <|python_tag|> {...} ; {...}     or nothing but   {...} ; {...}
    llama4_json   text <|python_start|> {...} <|python_end|>     or nothing but   {...} ; {...}
    granite       text <|tool_call|> [{...}, {...}]
    phi4          text functools[{...}, {...}]     or   <|tool_call|>[{...}]<|/tool_call|>
    json          nothing but   {...}   or   [{...}, {...}]

Text that is no call after all becomes content, mark included. Separators between two calls are dropped, and
so are surplus closing brackets.
Source: the chat templates of Qwen 2.5 and 3, Hermes 2 and 3, Llama 3.1 to 4, Granite 3 and Phi-4-mini,
which ask their models to write so.
"""

from collections.abc import Callable
from dataclasses import dataclass

from server.reply.tool_calls.call_reader import CallReader, CallRule, Progress
from server.reply.tool_calls.events import ToolCallParser
from server.reply.tool_calls.marks import MarkFinder

_SEPARATORS = frozenset(",;]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSyntax:
    """Marks around the objects of one dialect."""

    opening: str = ""
    """Before a call, or before the first of several; empty: there is no such mark."""
    closing: str = ""
    other_opening: str = ""
    """A second mark before a call, if there are two."""
    may_begin_bare: bool = False
    """A reply whose first character opens an object or a list needs no mark."""

    @property
    def openings(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.opening, self.other_opening) if mark)

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (*self.openings, self.closing) if mark)


class ObjectCallParser(ToolCallParser):
    """`names` of the tools: an object without a mark is a call only if it names one of them."""

    def __init__(self, syntax: ObjectSyntax, names: frozenset[str]) -> None:
        super().__init__()
        self._syntax = syntax
        self._finder = MarkFinder(*syntax.openings)
        self._mark_after = MarkFinder(*syntax.marks)
        self._marked = CallRule()
        self._bare = CallRule(names=names)
        self._rule = self._marked
        self._reader = CallReader(self._log, self._rule)
        self._undecided: list[str] = []
        """A mark, brackets and white space that are content unless a call follows."""
        self._state: Callable[[str], None] = self._first if syntax.may_begin_bare else self._in_text

    @property
    def is_inside_call(self) -> bool:
        return self._state == self._in_call and self._reader.has_started

    def _push(self, char: str) -> None:
        self._state(char)

    def _end(self) -> None:
        if self._state == self._in_call and self._reader.has_started:
            self._reader.finish()
        elif self._state == self._in_call:
            self._log.content("".join(self._undecided) + self._reader.raw)
        elif self._state == self._in_text:
            self._log.content(self._finder.flush())
        elif self._state != self._after_call:  # there it is no more than separators
            self._log.content("".join(self._undecided))

    def _first(self, char: str) -> None:
        """White space only so far."""
        if char in "{[":
            self._rule = self._bare
            self._before_call(char)
        elif char.isspace():
            self._log.content(char)
        else:
            self._give_up(char)

    def _in_text(self, char: str) -> None:
        text, mark = self._finder.push(char)
        if text:
            self._log.content(text)
        if mark:
            self._after_mark(mark)

    def _after_mark(self, mark: str) -> None:
        self._undecided = [mark]
        self._rule = self._marked
        self._state = self._before_call

    def _before_call(self, char: str) -> None:
        if char == "{":
            self._reader = CallReader(self._log, self._rule)
            self._state = self._in_call
            self._reader.push(char)
        elif char == "[" or char.isspace():
            self._undecided.append(char)
            self._state = self._before_call
        else:
            self._give_up(char)

    def _in_call(self, char: str) -> None:
        progress = self._reader.push(char)
        if progress is Progress.INSIDE:
            return
        if progress is Progress.BEYOND and not self._reader.has_started:
            self._undecided.append(self._reader.raw)
            self._give_up(char)
            return
        self._undecided.clear()
        self._state = self._after_call
        if progress is Progress.BEYOND:
            self._after_call(char)

    def _after_call(self, char: str) -> None:
        text, mark = self._mark_after.push(char) if self._syntax.opening else (char, "")
        for released in text:
            if self._state == self._after_call:
                self._between_calls(released)
            else:
                self._state(released)
        if mark and mark == self._syntax.closing:
            self._undecided.clear()
            self._state = self._in_text
        elif mark:
            self._after_mark(mark)

    def _between_calls(self, char: str) -> None:
        if char == "{":
            self._before_call(char)
        elif char in _SEPARATORS or char.isspace():
            self._undecided.append(char)
        else:
            self._give_up(char)

    def _give_up(self, char: str) -> None:
        """End an object that is no call: undecided text is content, and `char` is read again."""
        self._log.content("".join(self._undecided))
        self._undecided.clear()
        self._state = self._in_text
        self._in_text(char)
