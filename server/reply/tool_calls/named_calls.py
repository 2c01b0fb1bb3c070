"""Calls whose name stands before a JSON object, between marks.

    deepseek    <｜tool▁call▁begin｜>function<｜tool▁sep｜>f ```json {...} ```<｜tool▁call▁end｜>   (V3, R1)
                <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>                      (V3.1)
    kimi_k2     <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    harmony     <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>

Owns: the header of a call, its end, and the marks around several calls.
Source: the chat templates of DeepSeek V3 to V3.1 and Kimi K2; the description of harmony by OpenAI.
"""

from collections.abc import Callable
from dataclasses import dataclass

from server.reply.tool_calls.call_reader import Progress, ValueScanner
from server.reply.tool_calls.events import ToolCallParser
from server.reply.tool_calls.marks import MarkFinder
from server.reply.tool_calls.wrapped_text import WrappedText

DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
KIMI_SEPARATOR = "<|tool_call_argument_begin|>"
_MAX_HEADER_CHARS = 512
_FILLERS = frozenset("`}]")
"""Characters that may stand between the arguments and the closing mark, beside white space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHeader:
    """Content of the text between the opening mark and the arguments."""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSyntax:
    """Marks of one dialect."""

    opening: str
    closing: str
    read_header: Callable[[str], CallHeader | None]
    """Reader of a header; it returns None for a text that cannot be one."""
    wrappers: tuple[str, ...] = ()
    """Marks around several calls."""
    separators: tuple[str, ...] = ()
    """Marks inside of a header."""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.opening, self.closing, *self.wrappers, *self.separators)


class NamedCallParser(ToolCallParser):
    """A header that names nothing is content, mark included."""

    def __init__(self, syntax: NamedSyntax) -> None:
        super().__init__()
        self._syntax = syntax
        self._text = WrappedText(self._log, opening=syntax.opening, wrappers=syntax.wrappers)
        self._finder = MarkFinder(syntax.opening, syntax.closing)
        self._header: list[str] = []
        self._value = ValueScanner()
        self._state: Callable[[str], None] = self._in_text

    @property
    def is_inside_call(self) -> bool:
        return self._state == self._in_arguments

    def _push(self, char: str) -> None:
        self._state(char)

    def _end(self) -> None:
        if self._state == self._in_header:
            self._header.append(self._finder.flush())
            self._leave_header()
        self._text.finish()

    def _in_text(self, char: str) -> None:
        if self._text.push(char):
            self._open_header()

    def _open_header(self) -> None:
        self._header.clear()
        self._finder = MarkFinder(self._syntax.opening, self._syntax.closing)
        self._state = self._in_header

    def _in_header(self, char: str) -> None:
        text, mark = self._finder.push(char)
        self._header.append(text)
        if mark == self._syntax.closing:
            self._close_header()
        elif mark:
            self._leave_header()
            self._text.hold_nothing()
            self._open_header()
        elif text.endswith("{"):
            self._begin_arguments()
        elif len(self._header) > _MAX_HEADER_CHARS:
            self._header.append(self._finder.flush())
            self._leave_header()

    def _begin_arguments(self) -> None:
        header = self._syntax.read_header("".join(self._header)[:-1])
        if header is None:
            self._leave_header()
            return
        self._log.start(header.name, header.id)
        self._value = ValueScanner()
        self._state = self._in_arguments
        self._in_arguments("{")

    def _close_header(self) -> None:
        """End a call without arguments."""
        header = self._syntax.read_header("".join(self._header))
        if header is None:
            self._header.append(self._syntax.closing)
            self._leave_header()
            return
        self._log.start(header.name, header.id)
        self._log.arguments("{}")
        self._text.begin_after_call()
        self._state = self._in_text

    def _leave_header(self) -> None:
        self._text.give_up(self._syntax.opening + "".join(self._header))
        self._header.clear()
        self._state = self._in_text

    def _in_arguments(self, char: str) -> None:
        progress = self._value.push(char)
        if progress is not Progress.BEYOND:
            self._log.arguments(char)
        if progress is not Progress.INSIDE:
            self._finder = MarkFinder(self._syntax.opening, self._syntax.closing)
            self._state = self._behind_arguments
        if progress is Progress.BEYOND:
            self._behind_arguments(char)

    def _behind_arguments(self, char: str) -> None:
        text, mark = self._finder.push(char)
        rest = text.lstrip("".join(_FILLERS) + " \t\r\n")
        if rest or mark == self._syntax.closing:
            self._text.begin_after_call()
            self._state = self._in_text
            for one in rest:
                self._state(one)
        elif mark:
            self._open_header()


def deepseek_header(text: str) -> CallHeader | None:
    """V3 writes `function`, the mark and the name on a line; V3.1 the name and the mark."""
    before, mark, after = text.partition(DEEPSEEK_SEPARATOR)
    lines = after.split()
    return _header(lines[0] if lines and not lines[0].startswith("`") else before.strip()) if mark else None


def kimi_header(text: str) -> CallHeader | None:
    """The id holds the name; Kimi's template shows it to the model again."""
    written = text.partition(KIMI_SEPARATOR)[0].strip()
    name = written.removeprefix("functions.").partition(":")[0]
    return CallHeader(name=name, id=written) if _is_name(name) else None


def harmony_header(text: str) -> CallHeader | None:
    """The recipient is the function."""
    recipient = text.partition("<|message|>")[0].partition(" to=")[2].split("<")[0].split()
    return _header(recipient[0].removeprefix("functions.")) if recipient else None


def _header(name: str) -> CallHeader | None:
    return CallHeader(name=name) if _is_name(name) else None


def _is_name(text: str) -> bool:
    return bool(text) and all(char.isalnum() or char in "_-." for char in text)
