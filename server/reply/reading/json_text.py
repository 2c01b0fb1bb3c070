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
_STRUCTURE = frozenset('{}[],:"')
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

    __slots__ = ("_expects", "_held", "_is_key", "_lexer", "_write", "is_in_string", "progress", "stack")

    def __init__(self, lexer: Lexer, write: Callable[[str], None]) -> None:
        self._lexer = lexer
        self._write = write
        self.stack: list[str] = []
        """Closing brackets of what is open."""
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
        while at < end and self.progress is Progress.MORE:
            before = at
            at = self._read_string(text, at) if self.is_in_string else self._read_token(text, at)
            if at == before:
                break
        return at

    @property
    def is_inside_value(self) -> bool:
        """The text is in a string that is a value: there nothing can be closed."""
        return self.is_in_string and not self._is_key

    def close(self) -> None:
        """Close what is open."""
        self._write("".join(reversed(self.stack)))

    def finish(self, rest: str, *, is_cut: bool) -> None:
        """End the text: what is open is closed, if the model has ended it; a half escape is left out."""
        if self.is_inside_value:
            if is_cut:
                self._write(rest)
            else:
                self._write('"')
                self.close()
        elif rest and self._expects == _VALUE and not self.is_in_string:
            # A number, say, that nothing has ended.
            if is_cut:
                self._write(self._held + rest)
            elif self._take_scalar(rest):
                self.close()
        elif not is_cut and self.progress is not Progress.ENDED:
            self.close()

    def _read_string(self, text: str, at: int) -> int:
        found = _STRING.match(text, at)
        assert found is not None
        end = found.end()
        is_over = text.startswith('"', end)
        end += is_over
        piece = text[at:end]
        if _UNFIT.search(piece) is not None:
            piece = _CONTROLS.sub(_escape, _BAD_ESCAPE.sub(_doubled, piece))
        if self._is_key:
            self._held += piece
        else:
            self._write(piece)
        if is_over:
            self.is_in_string = False
            if self._is_key:
                self._expects = _COLON
            else:
                self._end_value()
        return end

    def _read_token(self, text: str, at: int) -> int:
        char = text[at]
        if char in self._lexer.first_chars:
            if self._lexer.match(text, at) is not None:
                return self._fail(at)
            if self._lexer.is_begun(text[at:]):
                return at
        if char in _STRUCTURE:
            return at + 1 if self._take_sign(char) else self._fail(at)
        found = _TOKEN.match(text, at)
        if found is None:
            return self._fail(at)
        token, end = found.group(), found.end()
        if char.isspace():
            if self._held:
                self._held += token
            else:
                self._write(token)
            return end
        if end == len(text) and len(token) < _MAX_SCALAR_CHARS:
            return at
        return end if self._take_scalar(token) else self._fail(at)

    def _take_sign(self, char: str) -> bool:
        """False if it cannot follow. A comma that is missing is written."""
        if char in "}]":
            return self._close_to(char)
        if char == ",":
            self._separate()
            return True
        if char == ":":
            if self._expects == _COLON:
                self._held += char
                self._expects = _VALUE
            return self._expects == _VALUE
        if self._expects == _END and (char == '"' or self.stack[-1] == "]"):
            self._separate()
        return self._open_string() if char == '"' else self._open(char)

    def _fail(self, at: int) -> int:
        self.progress = Progress.FAILED
        return at

    def _end_value(self) -> None:
        self._expects = _END
        if not self.stack:
            self.progress = Progress.ENDED

    def _separate(self) -> None:
        if self._expects == _END:
            self._held = ","
            self._expects = _KEY if self.stack[-1] == "}" else _VALUE

    def _close_to(self, char: str) -> bool:
        """Close up to a bracket, and all that it stands around."""
        if char not in self.stack:
            return False
        self._held = ""
        while True:
            closed = self.stack.pop()
            self._write(closed)
            if closed == char:
                break
        self._end_value()
        return True

    def _begin_value(self) -> None:
        if self._held:
            self._write(self._held)
            self._held = ""

    def _open_string(self) -> bool:
        self._is_key = self._expects == _KEY
        if self._is_key:
            self._held += '"'
        elif self._expects == _VALUE:
            self._begin_value()
            self._write('"')
        else:
            return False
        self.is_in_string = True
        return True

    def _open(self, char: str) -> bool:
        if self._expects != _VALUE:
            return False
        self._begin_value()
        self._write(char)
        self.stack.append("}" if char == "{" else "]")
        self._expects = _KEY if char == "{" else _VALUE
        return True

    def _take_scalar(self, token: str) -> bool:
        """A word that is none of JSON's is a string."""
        if self._expects == _KEY:
            self._held += json.dumps(token, ensure_ascii=False)
            self._expects = _COLON
            return True
        if self._expects != _VALUE:
            return False
        self._begin_value()
        plain = PYTHON_WORDS.get(token, token)
        is_json = _SCALAR.fullmatch(plain) is not None
        self._write(plain if is_json else json.dumps(plain, ensure_ascii=False))
        self._end_value()
        return True


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
