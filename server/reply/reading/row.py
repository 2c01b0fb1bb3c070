"""Rows: one way of writing replies each, as data, and the search for their marks.

Owns: what a row may say, and the marks that each state of the reader looks for.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from server.reply.reading.events import Parts, ReplyEvents

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""The schema of the parameters, by the name of the tool."""


class Phase(Enum):
    ANSWER = auto()
    THOUGHT = auto()
    POSSIBLE = auto()  # thoughts may begin, or the answer
    CALL = auto()  # behind the opening mark of a call


class ReaderState(Enum):
    FIRST = auto()
    """White space so far: thoughts, an answer or a call without a mark may begin."""
    TEXT = auto()
    THOUGHT = auto()
    DRAFT = auto()
    """A call in thoughts, which is one if the reply ends behind it."""
    HEAD = auto()
    BODY = auto()
    AFTER = auto()
    """Behind the arguments of a call."""
    OUTSIDE = auto()


class Progress(Enum):
    """Effect of a text on a part of it."""

    MORE = auto()
    """The part goes on; text that was not taken is to come again, with more behind it."""
    ENDED = auto()
    """It ended before the text that was not taken."""
    FAILED = auto()
    """It is no such part at all."""


MORE, ENDED, FAILED = Progress
TEXT, THOUGHT = ReaderState.TEXT, ReaderState.THOUGHT
"""Names of the module cost a tenth of those of an enumeration, and are looked up at each piece of a reply."""


class Lexer:
    """Finds several marks, none of which is the beginning of another one, in a text that comes in pieces."""

    __slots__ = ("_begun", "_find", "_longest", "first", "first_chars", "match")

    def __init__(self, marks: Iterable[str]) -> None:
        known = sorted(set(filter(None, marks)), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, known)) or r"(?!)")
        self._find, self.match = pattern.search, pattern.match
        self.first_chars = frozenset(mark[0] for mark in known)
        self.first = re.compile("[" + re.escape("".join(sorted(self.first_chars))) + "]" if known else "(?!)")
        self._begun = frozenset(mark[:length] for mark in known for length in range(1, len(mark)))
        self._longest = len(known[0]) if known else 1

    def next(self, text: str, at: int) -> tuple[int, str]:
        """Return the end of the text that is certainly no mark, and the mark behind it, or ""."""
        found = self._find(text, at)
        if found is not None:
            return found.start(), found.group()
        return self.held_from(text, at), ""

    def held_from(self, text: str, at: int) -> int:
        """Return the place of the end of the text that may become a mark; its length without one."""
        first = self.first.search(text, max(at, len(text) - self._longest + 1))
        while first is not None:
            if text[first.start() :] in self._begun:
                return first.start()
            first = self.first.search(text, first.start() + 1)
        return len(text)

    def begins(self, text: str, at: int) -> bool | None:
        """Whether a mark stands at this place; None if more text will tell."""
        if self.match(text, at) is not None:
            return True
        is_short = len(text) - at < self._longest  # else a copy of a long text for each of its brackets
        return None if is_short and text[at:] in self._begun else False


NO_MARKS = Lexer(())


class BodyReader(Protocol):
    """The part of a call in which its arguments stand."""

    progress: Progress
    has_begun: bool
    """A call was written down, and is not over."""
    num_calls: int

    @property
    def raw(self) -> str:
        """Text of the body that is no call, if it fails."""

    def feed(self, text: str, at: int, *, is_last: bool) -> int:
        """Read on from a place in the text; return the place behind what was taken."""

    def finish(self, rest: str, *, is_cut: bool) -> None:
        """End the text inside of the body, with a rest that was not taken."""


class BodyPlace(NamedTuple):
    log: ReplyEvents
    lexer: Lexer
    """Marks of the row, each of which may end the body."""
    row: "Row"
    schemas: ToolSchemas
    name: str = ""
    """Name of the call, where its head has it."""
    is_bare: bool = False
    """No mark says that this is a call."""


class BodySpec(Protocol):
    """Form of a body, as data."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks inside of it."""

    def begin(self, place: BodyPlace) -> BodyReader: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallName:
    """Content of the text between the opening mark and the arguments."""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHead:
    """Text between the opening mark of a call and its body. Any mark ends it too."""

    ends: tuple[str, ...] = ("{",)
    """A brace belongs to the body."""
    inner: tuple[str, ...] = ()
    """Marks inside of it."""
    read: Callable[[str], CallName | None]
    """Reader of a head; it returns None for a text that cannot be one."""
    forbidden: re.Pattern[str] = re.compile("(?!)")
    """Characters that no head has."""
    max_chars: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Form of one call, or of a list of calls."""

    openings: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    head: CallHead | None = None
    """Text before the body; None: the body has the name."""
    body: BodySpec
    headless: BodySpec | None = None
    """The body where a brace or a bracket stands in the place of the head."""


_JOINED = Parts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoughts:
    begin: str
    ends: tuple[str, ...]
    parts: Parts = _JOINED
    may_return: bool = False
    """They may begin behind an answer too, not only in the place of it."""
    begins_open: bool = False
    """The mark before the first block may be missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerMarks:
    openings: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    """Marks that begin what stands before an opening, such as a header."""
    head_end: str = ""
    """Mark behind a header that says what follows."""
    read_head: Callable[[str], tuple[Phase, CallName | None]] | None = None
    read_lost_head: Callable[[str], tuple[Phase, str]] | None = None
    """Reader of a header without its end: the text behind it, or an empty one."""
    parts: Parts | None = None
    """Treatment of its parts; None: the text as it is."""
    opened: str = ""
    """Text that an answer without thoughts begins with, if it needs one."""

    @property
    def is_framed(self) -> bool:
        """Text outside of all marks belongs to nothing, once there was one."""
        return bool(self.openings or self.head_end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way of writing replies."""

    thoughts: Thoughts | None = None
    call: Call | None = None
    wraps: tuple[str, ...] = ()
    """Marks before several calls."""
    unwraps: tuple[str, ...] = ()
    """Marks behind them."""
    answer: AnswerMarks = field(default_factory=AnswerMarks)
    may_begin_bare: bool = False
    """A reply whose first character opens a list or an object needs no mark."""
    named: str = ""
    """The function of which all of the answer is the arguments; empty: there is none."""
    is_forced: bool = False
    """A grammar keeps the reply to calls: nothing in it is content."""
    anchors: tuple[str, ...] = ()
    """Texts at the end of everything before a reply, in the prompt."""

    def behind_anchor(self, prompt: str) -> str | None:
        """Return the text behind the last anchor; None if there is none."""
        ends = [prompt.rfind(text) + len(text) for text in self.anchors if text in prompt]
        return prompt[max(ends) :] if ends else None

    def marks_around_calls(self, *, is_first: bool, is_behind: bool) -> tuple[str, ...]:
        """Return the marks before a call, those behind one that was there, and that of the first thoughts."""
        begin = (self.thoughts.begin,) if is_first and self.thoughts is not None else ()
        if self.call is None:
            return begin
        behind = (*self.call.closings, *self.unwraps) if is_behind else ()
        return (*self.call.openings, *self.wraps, *behind, *begin)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks but that at which thoughts begin."""
        call, answer = self.call, self.answer
        of_call: tuple[str, ...] = ()
        if call is not None:
            inner = () if call.head is None else call.head.inner
            of_call = (*call.openings, *call.closings, *inner, *call.body.marks)
        ends = () if self.thoughts is None else self.thoughts.ends
        around = (*answer.openings, *answer.closings, *answer.frames, answer.head_end)
        return tuple(mark for mark in (*of_call, *self.wraps, *self.unwraps, *ends, *around) if mark)


@dataclass(frozen=True, slots=True)
class RowLexers:
    """Searches of the states of a reader."""

    base: Lexer
    with_begin: Lexer
    """Also for the mark at which thoughts begin."""
    head: Lexer

    def of(self, state: ReaderState) -> Lexer:
        """Return the search of a state. That of thoughts that may begin is the reader's to take."""
        if state is ReaderState.HEAD:
            return self.head
        return self.with_begin if state in (ReaderState.THOUGHT, ReaderState.DRAFT) else self.base


@lru_cache(maxsize=256)
def lexers_of(row: Row) -> RowLexers:
    """Compile the searches of a row, once."""
    # A header says where thoughts begin; its first mark would be the beginning of theirs.
    begin = () if row.thoughts is None or row.answer.head_end else (row.thoughts.begin,)
    base = (*row.marks, *(begin if row.thoughts is not None and row.thoughts.may_return else ()))
    ends = () if row.call is None or row.call.head is None else row.call.head.ends
    return RowLexers(Lexer(base), Lexer((*base, *begin)), Lexer((*base, *ends)))
