"""Values with unquoted keys, and strings between marks of their own, as JSON.

    functiongemma   call:f{a:<escape>x<escape>,n:1}
    gemma4          call:f{a:<|"|>x<|"|>,n:1}

Owns: the value that a whole text is.
Never: marks around calls, or pieces: a call is read when it is complete.
Source: the chat templates of FunctionGemma and Gemma 4. Models also write JSON's and Python's quotes there,
round brackets, and no `call`.
"""

import json
import re

from server.reply.reading.row import ToolSchemas

_MAX_DEPTH = 64
_HEAD = re.compile(r"\s*+(?:call)?:?\s*+([^\s{}()\"'<>:,]+)\s*+([{(])")  # no backing up: a text may be long


def read_brace_call(quote: str, text: str, _: ToolSchemas) -> list[tuple[str, str]]:
    """Return the name of a call and the JSON text of its arguments; none if the text is anything else.

    `quote`: mark at both ends of a string, beside the quotes of JSON.
    """
    found = _HEAD.match(text)
    try:
        return [] if found is None else [(found[1], _BraceText(text[found.end() - 1 :], quote).read_all())]
    except ValueError:
        return []


class _BraceText:
    """Reads a value from a text, by places in it. Every method raises ValueError if there is none."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
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
        for opening, closing in (("{", "}"), ("(", ")")):
            if self._takes(opening):
                return "{" + ", ".join(self._items(closing, depth, has_keys=True)) + "}"
        if self._takes("["):
            return "[" + ", ".join(self._items("]", depth, has_keys=False)) + "]"
        text = self._string()
        return _scalar(self._bare(",}])")) if text is None else json.dumps(text, ensure_ascii=False)

    def _string(self) -> str | None:
        """Return the string that begins here; None if none does."""
        if self._takes(self._quote):
            end = self._text.index(self._quote, self._at)
            found, self._at = self._text[self._at : end], end + len(self._quote)
            return found
        for quote in "\"'":
            if self._takes(quote):
                return self._escaped(quote)
        return None

    def _escaped(self, quote: str) -> str:
        """Read up to a quote that has no backslash before it."""
        begin = self._at
        while self._text[self._at : self._at + 1] != quote:
            self._at += 2 if self._text.startswith("\\", self._at) else 1
            if self._at >= len(self._text):
                raise ValueError
        self._at += 1
        written = self._text[begin : self._at - 1].replace("\\'", "'")
        if quote == "'":
            written = re.sub(r'(?<!\\)"', r'\\"', written)
        try:
            value = json.loads(f'"{written}"', strict=False)
            value.encode()
        except ValueError:
            return written
        return str(value)

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
        key = self._string()
        if key is None:
            key = self._bare(":=").strip()
        self._skip_spaces()
        if not self._takes(":") and not self._takes("="):
            raise ValueError
        return f"{json.dumps(key, ensure_ascii=False)}: {self._value(depth + 1)}"

    def _skip_spaces(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1

    def _takes(self, text: str) -> bool:
        is_here = self._text.startswith(text, self._at)
        self._at += len(text) if is_here else 0
        return is_here

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
