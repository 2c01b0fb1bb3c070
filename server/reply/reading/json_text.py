"""JSON that a model writes, passed on as it comes, so that it can be closed whenever it may end.

Owns: the stack of open objects and lists, and the text that is held back: a comma, a key, a colon and white
space until the value behind them begins, and a number or a word until it ends.
Never: what the value is for.
"""

import ast
import json
import re
from dataclasses import dataclass

from server.reply.reading.argument_values import MAX_DEPTH, PYTHON_WORDS
from server.reply.reading.row import BodyPlace, Lexer, Progress

_MAX_SCALAR_CHARS = 1024
_HEX = "[0-9a-fA-F]"
_ESCAPE = rf"\\(?:[^uUx0-7]|[uUx0-7](?={_HEX}{{8}}|{_HEX}{{0,7}}(?!{_HEX})[\s\S]))"
_OF_PYTHON = re.compile(rf"\\(?:[\\av]|[0-7]{{1,3}}|x{_HEX}{{2}}|U00(?:0{_HEX}|10){_HEX}{{4}})")
_PLAIN = {quote: re.compile(rf"[^\"\\\x00-\x1f{quote}]*{quote}?").match for quote in "\"'"}
_STRINGS = {quote: re.compile(rf"[^{quote}\\]*(?:{_ESCAPE}[^{quote}\\]*)*").match for quote in "\"'"}
"""Strings up to their end, or to an escape of which more may come. Python's quotes are read as JSON's."""
_SIGNS = frozenset("{}[],:\"'")
_NEXT = re.compile(r',[ \t\r\n]*"')
"""The beginning of the next key, or of the next string in a list."""
_COLON_BEHIND = re.compile(r"[ \t\r\n]*:[ \t\r\n]*")
_SPECIAL = re.compile(r'["\\\x00-\x1f]').search
_TOKEN = re.compile(r'\s+|[^\s{}\[\],:"<]+')
_FOREIGN_SPACE = re.compile(r"[^ \t\r\n]")
"""White space that JSON does not know."""
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_UNFIT = re.compile(rf"\\(?:([\"\\/bfnrt]|u{_HEX}{{4}})|'|(?=[\s\S]))|[\"\x00-\x1f]")
"""An escape, or a character that has to be written otherwise."""
_KEY, _COLON, _VALUE, _END, _DROPPED = range(5)
"""Parts that may come next; of the last, text is dropped up to a mark."""


class JsonText:
    """One JSON value. `lexer` has the marks that end it outside of its strings."""

    def __init__(self, lexer: Lexer, out: list[str]) -> None:
        """`out` takes the text that is certain."""
        self._lexer = lexer
        self._mark_chars = lexer.first_chars
        self._out = out
        self._stack: list[str] = []
        """Closing brackets of what is open."""
        self._held = ""
        self._expects = _VALUE
        self._quote = ""
        """Quote that the string under way ends with; empty outside of strings."""
        self._is_key = False
        self._is_behind_string = False
        """The last value on this line was a string; a second one may belong to it, as in Python."""
        self.progress = Progress.MORE

    def feed(self, text: str, at: int) -> int:
        """Read on; FAILED says that the character at the place that is returned cannot follow."""
        end, before, more = len(text), -1, Progress.MORE
        if self._quote == '"' and not self._is_key and _SPECIAL(text, at) is None:  # as in most steps
            self._out.append(text[at:])
            return end
        while before < at < end and self.progress is more and self._expects != _DROPPED:
            before = at
            at = self._read_string(text, at) if self._quote else self._read_token(text, at)
        if self._expects == _DROPPED:
            at, mark = self._lexer.next(text, at)
            self.progress = Progress.FAILED if mark else Progress.MORE
        return at

    @property
    def is_inside_value(self) -> bool:
        """The text is in a string that is a value: there nothing can be closed."""
        return self._quote != "" and not self._is_key

    @property
    def is_empty(self) -> bool:
        """White space alone has come."""
        return self._expects == _VALUE and not self._stack and not self._quote

    def close(self) -> None:
        """Close what is open."""
        self._out += reversed(self._stack)

    def finish(self, rest: str, *, is_cut: bool) -> None:
        """End the text: what is open is closed, if the model has ended it; a half escape is left out."""
        is_word = bool(rest) and self._expects == _VALUE and not self._quote
        if is_cut:
            if self.is_inside_value or is_word:
                self._out.append(self._held + rest)
        elif self.progress is not Progress.ENDED:
            # A number, say, that nothing has ended.
            self._out.append('"' if self.is_inside_value else self._held + json_word(rest) if is_word else "")
            self.close()

    def _read_string(self, text: str, at: int) -> int:
        quote = self._quote
        end = _PLAIN[quote](text, at).end()  # type: ignore[union-attr] # which matches nothing as well
        is_over = end > at and text[end - 1] == quote
        piece = text[at:end]
        if end < len(text) and not is_over:
            end = _STRINGS[quote](text, at).end()  # type: ignore[union-attr]
            is_over = text.startswith(quote, end)
            piece = text[at:end] if quote == '"' else _OF_PYTHON.sub(_from_python, text[at:end])
            piece = _UNFIT.sub(_fitting, piece) + quote * is_over
            end += is_over
        if is_over and quote == "'":
            piece = piece[:-1] + '"'
        if self._is_key:
            self._held += piece
            return self._end_key(text, end) if is_over else end
        self._out.append(piece)
        if is_over:
            self._end_value()
            self._is_behind_string = True
        return end

    def _end_key(self, text: str, at: int) -> int:
        self._quote, self._expects = "", _COLON
        found = _COLON_BEHIND.match(text, at)
        if found is None:
            return at
        self._held += found.group()
        self._expects = _VALUE
        return found.end()

    def _read_token(self, text: str, at: int) -> int:
        char = text[at]
        if char in self._mark_chars and (is_mark := self._lexer.begins(text, at)) is not False:
            return self._fail(at) if is_mark else at
        if char not in _SIGNS:
            return self._read_word(text, at)
        if self._expects == _END and self._stack and (found := _NEXT.match(text, at)) is not None:
            self._begin_next(found.group())
            return found.end()
        return self._read_sign(char, at)

    def _read_word(self, text: str, at: int) -> int:
        """Read white space, a number, or a word, which is a string if it is none of JSON's."""
        found = _TOKEN.match(text, at)
        if found is None:
            return self._fail(at)
        token, end = found.group(), found.end()
        if token.isspace():
            self._is_behind_string &= "\n" not in token
            self._add_spaces(token if token == " " else _FOREIGN_SPACE.sub(" ", token))
        elif end == len(text) and len(token) < _MAX_SCALAR_CHARS:
            return at
        elif self._expects == _KEY:
            self._held += json.dumps(token, ensure_ascii=False)
            self._expects = _COLON
        elif self._expects == _VALUE:
            self._begin_value(json_word(token))
            self._end_value()
        else:
            return self._fail(at)
        return end

    def _add_spaces(self, spaces: str) -> None:
        if self._held:
            self._held += spaces
        else:
            self._out.append(spaces)

    def _read_sign(self, char: str, at: int) -> int:
        """Read a sign of structure. A comma that is missing is written; one that is too many is not."""
        if char in "}]":
            if char not in self._stack:
                return self._fail(at)
            self._close_to(char)
            return at + 1
        if self._is_behind_string and self._expects == _END and char in "\"'":
            return self._fail(at)
        if self._expects == _END and (char in ",\"'" or (char != ":" and self._stack[-1] == "]")):
            self._begin_next(",")
        expects = self._expects
        if char == ":" and expects == _COLON:
            self._held += char
            self._expects = _VALUE
        elif char == "," or (char == ":" and expects == _VALUE):
            pass
        elif char in "\"'" and expects in (_KEY, _VALUE):
            self._begin_string(char)
        elif char in "{[" and expects == _VALUE and len(self._stack) < MAX_DEPTH:
            self._begin_value(char)
            self._stack.append("}" if char == "{" else "]")
            self._expects = _KEY if char == "{" else _VALUE
        else:
            return self._fail(at)
        return at + 1

    def _fail(self, at: int) -> int:
        """End the value; what is left of an object or a list is dropped, where a mark may end it."""
        if self._stack and self._lexer.first_chars:
            self._expects = _DROPPED
        else:
            self.progress = Progress.FAILED
        return at

    def _begin_next(self, text: str) -> None:
        """Go on behind a comma, and behind the quote that the text may end with."""
        self._held = text.rstrip('"')
        self._expects = _KEY if self._stack[-1] == "}" else _VALUE
        if text[-1] == '"':
            self._begin_string('"')

    def _begin_string(self, quote: str) -> None:
        self._quote, self._is_key = quote, self._expects == _KEY
        if self._is_key:
            self._held += '"'
        else:
            self._begin_value('"')

    def _begin_value(self, text: str) -> None:
        self._out.append(self._held + text)
        self._held = ""

    def _end_value(self) -> None:
        self._quote, self._expects, self._is_behind_string = "", _END, False
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


def json_word(token: str) -> str:
    """The JSON of a word, which is a string if it is none of JSON's."""
    plain = PYTHON_WORDS.get(token, token)
    return plain if _SCALAR.fullmatch(plain) is not None else json.dumps(plain, ensure_ascii=False)


def _from_python(found: re.Match[str]) -> str:
    return json.dumps(ast.literal_eval(f"'{found.group()}'"))[1:-1]


def _fitting(found: re.Match[str]) -> str:
    """Write a character as JSON does; a backslash before none that JSON knows is one of the text."""
    text = found.group()
    return text if found.group(1) else "'" if text == "\\'" else json.dumps(text)[1:-1]


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
        self._out = place.log.pieces
        self._json = JsonText(place.lexer, self._out)
        self.has_begun = True
        self.progress = Progress.MORE

    def feed(self, text: str, at: int, *, is_last: bool) -> int:  # noqa: ARG002 (nothing here looks ahead)
        json_text = self._json
        if json_text.is_empty:
            at = len(text) - len(text[at:].lstrip())
        at = json_text.feed(text, at)
        if json_text.progress is not Progress.MORE:
            if json_text.progress is Progress.FAILED:
                self._close()
            self.has_begun = False
            self.progress = Progress.ENDED
        return at

    def finish(self, rest: str, *, is_cut: bool) -> None:
        if self._json.is_empty and not rest and not is_cut:
            self._close()
        else:
            self._json.finish(rest, is_cut=is_cut)

    def _close(self) -> None:
        if self._json.is_empty:
            self._out.append("{}")
        self._json.close()
