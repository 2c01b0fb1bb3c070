"""Calls written as tags, each argument between its own.

    qwen3_coder   <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    seed_oss      the same, in <seed:tool_call>
    glm45         <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    minimax_m2    <minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke> ...

Owns: the alternation of names, keys and values. What a value is, its tool's schema says.
Source: the chat templates of Qwen3-Coder, Seed-OSS, GLM-4.5 and MiniMax-M2, which ask their models to
write so.
"""

from collections.abc import Callable
from dataclasses import dataclass

from server.reply.tool_calls.argument_values import ArgumentWriter, ToolSchemas
from server.reply.tool_calls.events import ToolCallParser
from server.reply.tool_calls.marks import MarkFinder
from server.reply.tool_calls.wrapped_text import WrappedText

_MAX_NAME_CHARS = 256
_NOT_IN_NAMES = frozenset("{}\"'<>(),;[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedSyntax:
    """Marks of one dialect."""

    opening: str
    name_end: str
    key: str
    key_end: str
    value: str = ""
    """Before a value; empty: it begins behind its key."""
    value_end: str
    closing: str
    wrappers: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        tags = (self.opening, self.key, self.key_end, self.value, self.value_end, self.closing)
        return tuple(mark for mark in (*tags, *self.wrappers) if mark)


class TaggedCallParser(ToolCallParser):
    """Text between the tags of a call is dropped, and a call that is cut off keeps its arguments."""

    def __init__(self, syntax: TaggedSyntax, schemas: ToolSchemas) -> None:
        super().__init__()
        self._syntax = syntax
        self._schemas = schemas
        self._text = WrappedText(self._log, opening=syntax.opening, wrappers=syntax.wrappers)
        self._in_body_marks = (syntax.key, syntax.closing, syntax.opening, *syntax.wrappers)
        self._finder = MarkFinder(syntax.opening)
        self._name: list[str] = []
        self._key: list[str] = []
        self._writer = ArgumentWriter({})
        self._state: Callable[[str], None] = self._in_text

    @property
    def is_inside_call(self) -> bool:
        return self._state not in (self._in_text, self._in_name)

    def _push(self, char: str) -> None:
        self._state(char)

    def _end(self) -> None:
        if self._state == self._in_name:
            self._text.give_up(self._syntax.opening + "".join(self._name) + self._finder.flush())
        self._text.finish()

    def _look_for(self, state: Callable[[str], None], *marks: str) -> None:
        self._finder = MarkFinder(*marks)
        self._state = state

    def _in_text(self, char: str) -> None:
        if self._text.push(char):
            self._open_name()

    def _open_name(self) -> None:
        self._name.clear()
        ends = (self._syntax.name_end, self._syntax.key, self._syntax.closing)
        self._look_for(self._in_name, *ends)

    def _in_name(self, char: str) -> None:
        text, mark = self._finder.push(char)
        self._name.append(text)
        name = "".join(self._name).strip()
        is_possible = len(name) <= _MAX_NAME_CHARS and not _NOT_IN_NAMES.intersection(text)
        if is_possible and (not mark or (not name and mark == self._syntax.name_end and mark.isspace())):
            self._name += mark
            return
        if not is_possible or not name or " " in name:
            self._state = self._in_text
            self._text.give_up(self._syntax.opening + "".join(self._name) + mark + self._finder.flush())
            return
        self._text.hold_nothing()
        self._log.start(name)
        self._writer = ArgumentWriter(self._schemas.get(name, {}))
        self._look_for(self._in_body, *self._in_body_marks)
        if mark != self._syntax.name_end:
            self._after_mark(mark)

    def _in_body(self, char: str) -> None:
        _, mark = self._finder.push(char)
        if mark:
            self._after_mark(mark)

    def _after_mark(self, mark: str) -> None:
        if mark == self._syntax.key:
            self._key.clear()
            self._look_for(self._in_key, self._syntax.key_end)
            return
        self._log.arguments(self._writer.close())
        self._text.begin_after_call()
        self._state = self._in_text
        if mark == self._syntax.opening != self._syntax.closing:
            self._open_name()

    def _in_key(self, char: str) -> None:
        text, mark = self._finder.push(char)
        self._key.append(text)
        if mark:
            self._log.arguments(self._writer.begin("".join(self._key).strip()))
            if self._syntax.value:
                self._look_for(self._before_value, self._syntax.value)
            else:
                self._look_for(self._in_value, self._syntax.value_end)

    def _before_value(self, char: str) -> None:
        _, mark = self._finder.push(char)
        if mark:
            self._look_for(self._in_value, self._syntax.value_end)

    def _in_value(self, char: str) -> None:
        text, mark = self._finder.push(char)
        for one in text:
            self._log.arguments(self._writer.add(one))
        if mark:
            self._log.arguments(self._writer.end())
            self._look_for(self._in_body, *self._in_body_marks)
