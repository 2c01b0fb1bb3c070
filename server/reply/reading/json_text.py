"""JSON that a model writes, passed on as it comes, so that it can be closed whenever it may end.

Owns: the stack of open objects and lists, and the text that is held back: a comma, a key, a colon and white
space until the value behind them begins, and a number or a word until it ends.
Never: what the value is for.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from server.reply.reading.argument_values import PYTHON_WORDS
from server.reply.reading.row import BodyPlace, Lexer, Progress

_MAX_SCALAR_CHARS = 1024
_HEX = "[0-9a-fA-F]"
_STRING = re.compile(rf'[^"\\]*(?:\\(?:[^u]|u{_HEX}{{4}}|u(?={_HEX}{{0,3}}(?!{_HEX})[\s\S]))[^"\\]*)*')
"""A string up to its end, or to an escape of which more may come."""
_SIGNS = frozenset('{}[],:"')
_TOKEN = re.compile(r'\s+|[^\s{}\[\],:"<]+')
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_SPECIAL = re.compile(r'["\\\x00-\x1f]')
_BAD_ESCAPE = re.compile(rf'\\(?:(["\\/bfnrt]|u{_HEX}{{4}})|(?=[\s\S]))')
"""An escape, or a backslash that begins none."""
_CONTROLS = re.compile(r"[\x00-\x1f]")
_UNFIT = re.compile(r"[\\\x00-\x1f]")
"""Characters that may have to be written otherwise."""
_KEY, _COLON, _VALUE, _END = range(4)
"""Parts that may come next."""


class JsonText:
    """One JSON value. `lexer` has the marks that end it outside of its strings."""

    def __init__(self, lexer: Lexer, write: Callable[[str], None]) -> None:
        self._lexer = lexer
        self._write = write
        self._stack: list[str] = []
        """Closing brackets of what is open."""
        self._out: list[str] = []
        """Text of the piece under way that is certain."""
        self._held = ""
        self._expects = _VALUE
        self.is_in_string = False
        self._is_key = False
        self.progress = Progress.MORE

    def feed(self, text: str, at: int) -> int:
        """Read on; FAILED says that the character at the place that is returned cannot follow."""
        end = len(text)
        if self.is_in_string and not self._is_key and _SPECIAL.search(text, at) is None:
            self._write(text[at:])
            return end
        first_chars, before = self._lexer.first_chars, -1
        while at < end and at != before and self.progress is Progress.MORE:
            before, char = at, text[at]
            if self.is_in_string:
                at = self._read_string(text, at)
            elif char in first_chars and (is_mark := self._lexer.begins(text, at)) is not False:
                self.progress = Progress.FAILED if is_mark else Progress.MORE
            elif char in _SIGNS:
                at = self._read_sign(char, at)
            else:
                at = self._read_word(text, at)
        if self._out:
            self._write("".join(self._out))
            self._out.clear()
        return at

    @property
    def is_inside_value(self) -> bool:
        """The text is in a string that is a value: there nothing can be closed."""
        return self.is_in_string and not self._is_key

    def close(self) -> None:
        """Close what is open."""
        self._write("".join(reversed(self._stack)))

    def finish(self, rest: str, *, is_cut: bool) -> None:
        """End the text: what is open is closed, if the model has ended it; a half escape is left out."""
        is_word = bool(rest) and self._expects == _VALUE and not self.is_in_string
        if is_cut:
            if self.is_inside_value or is_word:
                self._write(self._held + rest)
        elif self.progress is not Progress.ENDED:
            # A number, say, that nothing has ended.
            self._write('"' if self.is_inside_value else self._held + _word(rest) if is_word else "")
            self.close()

    def _read_string(self, text: str, at: int) -> int:
        end = _STRING.match(text, at).end()  # type: ignore[union-attr] # which matches nothing as well
        is_over = text.startswith('"', end)
        end += is_over
        piece = text[at:end]
        if _UNFIT.search(piece) is not None:
            piece = _CONTROLS.sub(_escape, _BAD_ESCAPE.sub(_doubled, piece))
        if not self._is_key:
            self._out.append(piece)
            if is_over:
                self._end_value()
            return end
        self._held += piece
        if is_over:
            self.is_in_string, self._expects = False, _COLON
        return end

    def _read_word(self, text: str, at: int) -> int:
        """Read white space, a number, or a word, which is a string if it is none of JSON's."""
        found = _TOKEN.match(text, at)
        if found is None:
            return self._fail(at)
        token, end = found.group(), found.end()
        if token.isspace():
            spaces = " " if token.strip(" \t\r\n") else token  # JSON knows no others
            if self._held:
                self._held += spaces
            else:
                self._out.append(spaces)
        elif end == len(text) and len(token) < _MAX_SCALAR_CHARS:
            return at
        elif self._expects == _KEY:
            self._held += json.dumps(token, ensure_ascii=False)
            self._expects = _COLON
        elif self._expects == _VALUE:
            self._begin_value(_word(token))
            self._end_value()
        else:
            return self._fail(at)
        return end

    def _read_sign(self, char: str, at: int) -> int:
        """Read a sign of structure. A comma that is missing is written; one that is too many is not."""
        if char in "}]":
            if char not in self._stack:
                return self._fail(at)
            self._close_to(char)
            return at + 1
        if self._expects == _END and (char in ',"' or (char != ":" and self._stack[-1] == "]")):
            self._held = ","
            self._expects = _KEY if self._stack[-1] == "}" else _VALUE
        expects = self._expects
        if char == ":" and expects == _COLON:
            self._held += char
            self._expects = _VALUE
        elif char == "," or (char == ":" and expects == _VALUE):
            pass
        elif char == '"' and expects == _KEY:
            self._held += char
            self.is_in_string = self._is_key = True
        elif char != ":" and expects == _VALUE:
            self._begin_value(char)
            if char == '"':
                self.is_in_string, self._is_key = True, False
            else:
                self._stack.append("}" if char == "{" else "]")
                self._expects = _KEY if char == "{" else _VALUE
        else:
            return self._fail(at)
        return at + 1

    def _fail(self, at: int) -> int:
        self.progress = Progress.FAILED
        return at

    def _begin_value(self, text: str) -> None:
        self._out.append(self._held + text)
        self._held = ""

    def _end_value(self) -> None:
        self.is_in_string, self._expects = False, _END
        if not self._stack:
            self.progress = Progress.ENDED

    def _close_to(self, char: str) -> None:
        """Close up to a bracket, and all that it stands around."""
        self._held = ""
        closed = ""
        while closed != char:
            closed = self._stack.pop()
            self._out.append(closed)
        self._end_value()


def _word(token: str) -> str:
    """The JSON of a word, which is a string if it is none of JSON's."""
    plain = PYTHON_WORDS.get(token, token)
    return plain if _SCALAR.fullmatch(plain) is not None else json.dumps(plain, ensure_ascii=False)


def _doubled(found: re.Match[str]) -> str:
    return found.group() if found.group(1) else "\\\\"


def _escape(found: re.Match[str]) -> str:
    return json.dumps(found.group())[1:-1]


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """The arguments alone, as JSON."""

    marks: tuple[str, ...] = ()

    def begin(self, place: BodyPlace) -> "ArgumentsReader":
        return ArgumentsReader(place)


class ArgumentsReader:
    """Passes the arguments of a call on, whose name has been written down."""

    raw = ""
    num_calls = 1

    def __init__(self, place: BodyPlace) -> None:
        self._log = place.log
        self._json = JsonText(place.lexer, self._write)
        self._is_empty = True
        self.has_begun = True
        self.progress = Progress.MORE

    def feed(self, text: str, at: int, *, is_last: bool) -> int:  # noqa: ARG002 (nothing here looks ahead)
        if self._is_empty and at < len(text):
            rest = text[at:].lstrip()
            at = len(text) - len(rest)
            if not rest:
                return at
        at = self._json.feed(text, at)
        if self._json.progress is not Progress.MORE:
            if self._json.progress is Progress.FAILED:
                self._json.close()
            if self._is_empty:
                self._write("{}")
            self.has_begun = False
            self.progress = Progress.ENDED
        return at

    def finish(self, rest: str, *, is_cut: bool) -> None:
        self._json.finish(rest, is_cut=is_cut)
        if self._is_empty and not is_cut:
            self._write("{}")

    def _write(self, text: str) -> None:
        if text:
            self._is_empty = False
            self._log.arguments(text)
