"""Arguments written as tags, each between its own.

    qwen3_coder   <parameter=a>1</parameter>
    glm45         <arg_key>a</arg_key><arg_value>1</arg_value>
    minimax_m2    <parameter name="a">1</parameter>
    deepseek_v32  <｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>

Owns: the alternation of keys and values, and which mark inside of a value is a part of it. What a value is,
its tool's schema says.
Never: the name of the call, or the marks around it.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from server.reply.reading.argument_values import ArgumentTypes, as_json
from server.reply.reading.json_text import ArgumentsReader
from server.reply.reading.row import ENDED, MORE, BodyPlace, Lexer

_TEXT = frozenset({"string"})
_MAX_KEY_CHARS = 300
_MAX_SPACES = 4096
_OBJECT = re.compile(r"\s*+(?:\{\s*+([\"'}])?)?")


class _In(Enum):
    BETWEEN = auto()
    KEY = auto()
    BEFORE_VALUE = auto()
    VALUE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedArguments:
    """Marks around keys and values."""

    key: str
    key_end: str
    value: str = ""
    """Before a value; empty: it begins behind its key."""
    value_end: str
    text_flag: str = ""
    """Between a key and `true` if its value is a text, `false` if it is JSON: where no schema says."""
    merges: bool = False
    """Values of one key are a list, where the schema does not say otherwise."""
    wrap: tuple[str, str] = ("", "")
    """Marks that may stand around the whole of a value, which is passed on when it is complete."""

    @property
    def marks(self) -> tuple[str, ...]:
        inner = (self.key, self.value, self.value_end)
        # A mark that is a word of its own is looked for everywhere.
        return tuple(mark for mark in (*inner, self.key_end if len(self.key_end) > 2 else "") if mark)

    @property
    def ends_of_keys(self) -> tuple[str, ...]:
        """Texts that stand behind the name of an argument."""
        return (self.key_end, self.text_flag) if self.text_flag else (self.key_end,)

    def begin(self, place: BodyPlace) -> "TagsReader":
        return TagsReader(self, place)


class TagsReader:
    """Reader of calls in tags. Text between them is dropped; a text value that nothing has ended stays open.

    An object in the place of the first tag is the arguments: Llama 3.1 and Functionary write so. The tags
    behind it are dropped.
    """

    raw = ""
    num_calls = 1

    def __init__(self, spec: TaggedArguments, place: BodyPlace) -> None:
        self._spec = spec
        self._place, self._row = place, place.row
        self._object: ArgumentsReader | None = None
        self._is_blank = True
        """Whether nothing has come that says if an object begins."""
        self._names = tuple(place.schemas)
        self._log = place.log
        self._lexer = place.lexer
        self._key_lexer = Lexer((*place.row.marks, spec.key_end))
        self._state = _In.BETWEEN
        self._key = self._flag = ""
        self._text = ""
        """Text of a key, or between a key and its value."""
        self._arguments = ArgumentWriter(place.schemas.get(place.name, {}), spec)
        self.has_begun = True
        self.progress = MORE

    def feed(self, text: str, at: int, *, is_last: bool) -> int:
        if self._is_blank and (found := _OBJECT.match(text, at)) is not None:
            is_open = found.end() == len(text) < at + _MAX_SPACES and not found[1]
            if is_open and not is_last:
                return at
            self._is_blank = False
            self._object = ArgumentsReader(self._place) if found[1] else None
        if self._object is not None and self.has_begun:
            at = self._object.feed(text, at, is_last=is_last)
            self.has_begun = self._object.has_begun
            if self.has_begun:
                return at
        return self._feed_tags(text, at, is_last=is_last)

    def _feed_tags(self, text: str, at: int, *, is_last: bool) -> int:
        if self._state is _In.VALUE and self._lexer.first.search(text, at) is None:
            self._write(self._arguments.add(text[at:]))
            return len(text)
        while self.progress is MORE:
            lexer = self._key_lexer if self._state is _In.KEY else self._lexer
            stop, mark = lexer.next(text, at)
            if stop > at:
                self._add(text[at:stop])
                at = stop
            if not mark:
                break
            behind = at + len(mark)
            if self._state is _In.VALUE:
                counts = self._counts(mark, text[behind:], is_last=is_last)
                if counts is None:
                    break
                if not counts:
                    self._add("" if mark == self._spec.value and self._arguments.is_empty else mark)
                    at = behind
                    continue
            if not self._take(mark):
                self._write(self._arguments.close())
                self.has_begun = False
                self.progress = ENDED
                break
            at = behind
        return at

    def finish(self, rest: str, *, is_cut: bool) -> None:
        """Close the value and the object if the model has ended the text. Cut off, a value stays open."""
        if self._object is not None:
            if self.has_begun:
                self._object.finish(rest, is_cut=is_cut)
            return
        is_in_value = self._state is _In.VALUE
        if is_in_value:
            self._write(self._arguments.add(rest))
            self._write(self._arguments.flush() if is_cut else self._arguments.end(was_lost=True))
        if not is_cut:
            self._write(self._arguments.close())
            self.has_begun = is_in_value

    def _write(self, text: str) -> None:
        if text and self._object is None:
            self._log.arguments(text)

    def _add(self, text: str) -> None:
        if self._state is _In.VALUE:
            self._write(self._arguments.add(text))
        elif self._state is not _In.BETWEEN:
            self._text += text
            if self._state is _In.KEY and len(self._text) > _MAX_KEY_CHARS:
                key = self._text[:_MAX_KEY_CHARS].lstrip().partition("\n")[0].strip()
                if key not in self._arguments.properties:
                    self._text = ""
                    self._state = _In.BETWEEN

    def _take(self, mark: str) -> bool:
        """Act on a mark; False if it belongs to what stands around the arguments."""
        spec = self._spec
        if self._state is _In.KEY:
            self._end_key(mark)
            if mark in (spec.key_end, spec.value):
                return True
        if self._state is _In.VALUE:
            self._write(self._arguments.end(was_lost=mark != spec.value_end))
        elif self._state is _In.BEFORE_VALUE and mark == spec.value:
            self._begin_argument("")
            self._state = _In.VALUE
            return True
        elif self._state is _In.BEFORE_VALUE and mark == spec.value_end and self._text.strip():
            self._begin_argument(self._text)  # the mark before it was lost
            self._write(self._arguments.end(was_lost=False))
        self._text = ""
        self._state = _In.KEY if mark == spec.key else _In.BETWEEN
        return mark in spec.marks or mark == spec.key_end

    def _end_key(self, mark: str) -> None:
        """End a key. Without its end mark it is one if the tool has it, alone on its line."""
        spec = self._spec
        key, newline, rest = self._text.lstrip().partition("\n")
        self._key, self._flag, self._text = key.strip(), "", ""
        if spec.text_flag:
            name, _, flag = self._key.partition(spec.text_flag)
            if flag in ("true", "false"):  # with any other, the end of the key was lost
                self._key, self._flag = name, flag
        is_alone = bool(newline and rest.strip())
        if is_alone and not spec.value and self._key in self._arguments.properties:
            self._begin_argument(rest + (mark if mark == spec.key_end else ""))
            self._state = _In.VALUE
        elif is_alone or mark not in (spec.key_end, spec.value):
            self._state = _In.BETWEEN
        elif spec.value and mark == spec.key_end:
            self._state = _In.BEFORE_VALUE
        else:
            self._begin_argument("")
            self._state = _In.VALUE

    def _begin_argument(self, text: str) -> None:
        """Begin a value, so that a key without one is left out."""
        self._write(self._arguments.begin(self._key, is_text=self._flag == "true"))
        self._write(self._arguments.add(text))

    def _counts(self, mark: str, rest: str, *, is_last: bool) -> bool | None:
        """Tell whether a mark ends the value, by what stands behind it; None if more text will tell."""
        spec, row, call = self._spec, self._row, self._row.call
        assert call is not None
        around = (*call.openings, *row.wraps, *row.unwraps, *row.answer.closings)
        left, texts = self._arguments.left, list[str]()
        if mark == spec.value_end:
            lost = (f"{name}{end}" for name in left for end in spec.ends_of_keys)
            return _follows(rest, (spec.key, mark, *call.closings, *around, *lost), is_last=is_last)
        if mark in (*call.closings, *row.unwraps, *row.answer.closings):
            return _follows(rest, around, is_last=is_last)
        if mark == spec.key and not self._arguments.properties:
            line, newline, _ = rest.partition("\n")
            if spec.key_end in line and self._arguments.is_at_line_start:
                return True
            return False if is_last or newline or len(rest) >= _MAX_KEY_CHARS else None
        if mark == spec.key:
            ends: tuple[str, ...] = (spec.key_end, "\n") if spec.value else spec.ends_of_keys
            texts += (f"{name}{end}" for name in left for end in ends)
        elif mark in row.wraps:
            texts += (f"{opening}{name}" for name in self._names for opening in call.openings)
        elif mark in call.openings and call.head is not None:
            ends = (*call.head.ends, spec.key, *call.closings)
            texts += (f"{name}{end}" for name in self._names for end in ends)
        return _follows(rest, texts, is_last=is_last, at_end=False) if texts else False


def _follows(rest: str, texts: Iterable[str], *, is_last: bool, at_end: bool = True) -> bool | None:
    """Tell whether one of these texts stands next, behind white space, or else the end of the reply."""
    visible = rest.lstrip()
    if not visible:
        return at_end if is_last else None if len(rest) < _MAX_SPACES else False
    is_begun = False
    for text in texts:
        if visible.startswith(text):
            return True
        is_begun |= not is_last and text.startswith(visible)
    return None if is_begun else False


class ArgumentWriter:
    """Writes one object, argument by argument. Each call returns the JSON text that is certain by now."""

    def __init__(self, schema: object, spec: TaggedArguments) -> None:
        self._all_types = ArgumentTypes(schema)
        self.properties = self._all_types.names
        self._merges, self._wrap = spec.merges, spec.wrap
        self._is_first = True
        self._given: set[str] = set()
        self._merged: dict[str, list[str]] = {}
        """JSON texts of the values of keys that may have several."""
        self._key = ""
        self._types: frozenset[str] = frozenset()
        self._is_dropped = False
        self._is_text = False
        self._pieces: list[str] = []
        self._newlines = ""
        """The last characters of a text, of which the end mark takes one."""
        self._is_at_start = True

    @property
    def left(self) -> Iterator[str]:
        """Properties that may still come."""
        return (name for name in self.properties if name not in self._given or self._may_repeat(name))

    @property
    def is_empty(self) -> bool:
        """No text of the value has come."""
        return self._is_at_start

    @property
    def is_at_line_start(self) -> bool:
        return (
            bool(self._newlines)
            or self._is_at_start
            or (not self._is_text and self._pieces[-1].endswith("\n"))
        )

    def _may_repeat(self, key: str) -> bool:
        types = self._all_types.of(key)
        return "array" in types or (self._merges and not types)

    def begin(self, key: str, *, is_text: bool) -> str:
        """Begin the argument `key`. Of a key that stands twice, the first value counts.

        `is_text`: the model says so, which counts where the schema allows it.
        """
        self._key = key
        types = self._all_types.of(key)
        self._types = _TEXT if is_text and (not types or types >= _TEXT) else types
        self._is_dropped = key in self._given and not self._may_repeat(key)
        self._is_text = self._types == _TEXT and not self._wrap[0]
        self._given.add(key)
        self._pieces.clear()
        self._newlines = ""
        self._is_at_start = True
        return self._key_text(key) + '"' if self._is_text and not self._is_dropped else ""

    def add(self, text: str) -> str:
        """Add text of the value. Texts are passed on as they come, but for one newline at each end."""
        if not text:
            return ""
        if self._is_at_start:
            self._is_at_start = False
            text = text.removeprefix("\n")
        if not self._is_text:
            self._pieces.append(text)
            return ""
        visible = text.rstrip("\n")
        if not visible:
            self._newlines += text
            return ""
        released, self._newlines = self._newlines + visible, text[len(visible) :]
        return "" if self._is_dropped else json.dumps(released, ensure_ascii=False)[1:-1]

    def end(self, *, was_lost: bool) -> str:
        """End the argument. Where its end mark was lost, the newlines at the end are not its own."""
        if self._is_dropped:
            return ""
        if self._is_text:
            newlines = "" if was_lost else self._newlines[:-1]
            return json.dumps(newlines)[1:-1] + '"'
        text = "".join(self._pieces)
        text = text.rstrip("\n") if was_lost else text.removesuffix("\n")
        begin, end = self._wrap
        if begin and text.startswith(begin):
            text = text.removeprefix(begin).removesuffix(end)
        value = as_json(text, self._types)
        if self._may_repeat(self._key):
            self._merged.setdefault(self._key, []).append(value)
            return ""
        return self._key_text(self._key) + value

    def flush(self) -> str:
        """Return what is left of a text that breaks off: it stays open, as do the brackets around it."""
        return "" if self._is_dropped or not self._is_text else json.dumps(self._newlines)[1:-1]

    def close(self) -> str:
        """End the object."""
        merged = "".join(self._key_text(key) + _merged(values) for key, values in self._merged.items())
        return merged + ("{}" if self._is_first else "}")

    def _key_text(self, key: str) -> str:
        opening = "{" if self._is_first else ", "
        self._is_first = False
        return f"{opening}{json.dumps(key, ensure_ascii=False)}: "


def _merged(values: list[str]) -> str:
    if len(values) == 1:
        return values[0]
    lists = [json.loads(value) for value in values]
    items = [item for each in lists for item in (each if isinstance(each, list) else [each])]
    return json.dumps(items, ensure_ascii=False)
