"""JSON that a model writes, passed on as it comes, so that it can be closed whenever it may end.

Owns: the stack of open objects and lists, and the text that is held back: a comma, a key, a colon and white
space until the value behind them begins, and a number or a word until it ends.
"""

import ast
import json
import re
from dataclasses import dataclass

from server.reply.reading.argument_values import MAX_DEPTH, PYTHON_WORDS
from server.reply.reading.row import ENDED, FAILED, MORE, BodyPlace, Lexer

_MAX_SCALAR_CHARS = 1024
_HEX = "[0-9a-fA-F]"
_HALF = rf"u[dD][89a-fA-F]{_HEX}{{2}}"
_FIRST = rf"u[dD][89abAB]{_HEX}{{2}}"
_PAIR = rf"{_FIRST}\\u[dD][c-fC-F]{_HEX}{{2}}"
"""Halves of a character that two escapes write."""
_OPEN = rf"{_FIRST}(?:\\(?:u{_HEX}{{0,7}})?)?\Z"
_ESCAPE = rf"\\(?!{_OPEN})(?:[^uUx0-7]|[uUx0-7](?={_HEX}{{8}}|{_HEX}{{0,7}}(?!{_HEX})[\s\S]))"
_OF_PYTHON = re.compile(rf"\\(?:[\\av]|[0-7]{{1,3}}|x{_HEX}{{2}}|U00(?:0{_HEX}|10){_HEX}{{4}})")
_STRINGS = {
    sign * num: re.compile(rf"[^{sign}\\]*(?:{inner}[^{sign}\\]*)*").match
    for sign in "\"'"
    for num, inner in ((1, _ESCAPE), (3, rf"(?:{_ESCAPE}|{sign}{{1,2}}(?=[^{sign}]))"))
}
"""Strings up to their end, or to an escape of which more may come. Python's quotes are read as JSON's."""
_CLOSINGS = {"{": "}", "[": "]"}
_SPECIAL = re.compile(r'["\\\x00-\x1f]').search
_SIGNS = frozenset("{}[],:\"'")
_TOKEN = re.compile(r'\s+|[^\s{}\[\],:"<]+')
_FOREIGN_SPACE = re.compile(r"[^ \t\r\n]")
"""White space that JSON does not know."""
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_UNFIT = re.compile(
    rf"\\(?:([\"\\/bfnrt]|{_PAIR}|(?!{_HALF})u{_HEX}{{4}})|'|{_HALF}|(?=[\s\S]))|[\"\x00-\x1f]"
)
"""An escape, or a character that has to be written otherwise."""
_IN_KEY, _IN_VALUE, _KEY, _COLON, _VALUE, _END, _DROPPED = range(7)
"""Strings under way, or parts that may come next; of the last, text is dropped up to a mark."""


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
        self._state = _VALUE
        self._quote = ""
        """Quote of the string under way."""
        self._is_new = False
        """Whether nothing of this string has come."""
        self._is_behind_string = False
        """The last value on this line was a string; a second one may belong to it, as in Python."""
        self.progress = MORE

    def feed(self, text: str, at: int) -> int:
        """Read on; FAILED says that the character at the place that is returned cannot follow."""
        end, before = len(text), -1
        if self._state == _IN_VALUE and self._quote == '"' and _SPECIAL(text, at) is None:  # as in most steps
            self._is_new = False
            self._out.append(text[at:])
            return end
        while before < at < end and self.progress is MORE and self._state != _DROPPED:
            before = at
            at = self._read_token(text, at) if self._state >= _KEY else self._read_string(text, at)
        if self._state == _DROPPED:
            at, mark = self._lexer.next(text, at)
            self.progress = FAILED if mark else MORE
        return at

    @property
    def is_inside_value(self) -> bool:
        """The text is in a string that is a value: there nothing can be closed."""
        return self._state == _IN_VALUE

    @property
    def is_empty(self) -> bool:
        """White space alone has come."""
        return self._state == _VALUE and not self._stack

    def close(self) -> None:
        """Close what is open."""
        self._out += reversed(self._stack)

    def finish(self, rest: str, *, is_cut: bool) -> None:
        """End the text: what is open is closed, if the model has ended it; a half escape is left out."""
        is_word = bool(rest) and self._state == _VALUE
        if is_cut:
            if self.is_inside_value or is_word:
                self._out.append(self._held + rest)
        elif self.progress is not ENDED:
            # A number, say, that nothing has ended.
            self._out.append('"' if self.is_inside_value else self._held + json_word(rest) if is_word else "")
            self.close()

    def _read_string(self, text: str, at: int) -> int:
        if self._is_new and text.startswith(self._quote, at):
            if at + 1 == len(text):
                return at
            if text[at + 1] == self._quote:
                self._quote *= 3
                at += 2
        self._is_new = False
        end = _STRINGS[self._quote](text, at).end()  # type: ignore[union-attr] # which matches nothing as well
        is_over = text.startswith(self._quote, end)
        piece = text[at:end]
        if _SPECIAL(piece) is not None:
            is_python = self._quote != '"'
            piece = _UNFIT.sub(_fitting, _OF_PYTHON.sub(_from_python, piece) if is_python else piece)
        end += len(self._quote) * is_over
        if is_over:
            piece += '"'
        if self._state == _IN_VALUE:
            self._out.append(piece)
            if is_over:
                self._end_value()
                self._is_behind_string = True
        else:
            self._held += piece
            if is_over:
                self._state = _COLON
        return end

    def _read_token(self, text: str, at: int) -> int:
        char = text[at]
        if char in self._mark_chars and (is_mark := self._lexer.begins(text, at)) is not False:
            return self._fail(at) if is_mark else at
        if char not in _SIGNS:
            return self._read_word(text, at)
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
        elif self._state == _KEY:
            self._held += json.dumps(token, ensure_ascii=False)
            self._state = _COLON
        elif self._state == _VALUE:
            self._begin_value(json_word(token))
            self._end_value()
        else:
            return self._fail(at)
        return end

    def _add_spaces(self, spaces: str) -> None:
        if self._held:
            self._held += spaces
        elif not self.is_empty:
            self._out.append(spaces)

    def _read_sign(self, char: str, at: int) -> int:
        """Read a sign of structure. A comma that is missing is written; one that is too many is not."""
        if char in "}]":
            if char not in self._stack:
                return self._fail(at)
            self._close_to(char)
            return at + 1
        if self._is_behind_string and self._state == _END and char in "\"'":
            return self._fail(at)
        if self._state == _END and (char in ",\"'" or (char != ":" and self._stack[-1] == "]")):
            self._held = ","
            self._state = _KEY if self._stack[-1] == "}" else _VALUE
        expects = self._state
        if char == ":" and expects == _COLON:
            self._held += char
            self._state = _VALUE
        elif char == "," or (char == ":" and expects == _VALUE):
            pass
        elif char in "\"'" and expects in (_KEY, _VALUE):
            self._begin_string(char)
        elif char in "{[" and expects == _VALUE and len(self._stack) < MAX_DEPTH:
            self._begin_value(char)
            self._stack.append(_CLOSINGS[char])
            self._state = _KEY if char == "{" else _VALUE
        else:
            return self._fail(at)
        return at + 1

    def _fail(self, at: int) -> int:
        """End the value; what is left of an object or a list is dropped, where a mark may end it."""
        if self._stack and self._lexer.first_chars:
            self._state = _DROPPED
        else:
            self.progress = FAILED
        return at

    def _begin_string(self, quote: str) -> None:
        self._quote, self._is_new = quote, True
        if self._state == _KEY:
            self._held += '"'
            self._state = _IN_KEY
        else:
            self._begin_value('"')
            self._state = _IN_VALUE

    def _begin_value(self, text: str) -> None:
        self._out.append(self._held + text)
        self._held = ""

    def _end_value(self) -> None:
        self._state, self._is_behind_string = _END, False
        if not self._stack:
            self.progress = ENDED

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
    """Write a character as JSON does; a backslash before none that JSON knows is one of the text.

    Half a character, at which readers of JSON end, is a replacement character.
    """
    text = found.group()
    if found.group(1):
        return text
    if len(text) > 2:
        return r"\ufffd"
    return "'" if text == "\\'" else json.dumps(text)[1:-1]


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
        self.progress = MORE

    def feed(self, text: str, at: int, *, is_last: bool) -> int:  # noqa: ARG002 (nothing here looks ahead)
        json_text = self._json
        at = json_text.feed(text, at)
        if json_text.progress is not MORE:
            if json_text.progress is FAILED:
                self._close()
            self.has_begun = False
            self.progress = ENDED
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
