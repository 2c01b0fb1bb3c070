"""Expressions of a checkpoint, as programs that are searched for without backtracking.

Owns: the grammar of expressions, a part of Python's, and the bounds on their size.
Never: compiles what needs backtracking or a look around. It is refused by name.
Source: Thompson's construction, with priorities as in Pike's machine: the first alternative that matches
wins, as in Python. `.` takes line ends too, and `^` and `$` are the ends of the text.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

CharTest = Callable[[str], bool]

MAX_EXPRESSION_CHARS = 2_000
MAX_OPS = 1_000
_MAX_DEPTH = 30
_MAX_REPEATS = 1_000
_MAX_NAMES = 20
_MAX_KNOWN_CHARS = 1_000

DONE = -1
"""Place behind the last op."""

_CLASSES: dict[str, CharTest] = {
    "s": str.isspace,
    "d": str.isdecimal,
    "w": lambda char: char.isalnum() or char == "_",
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_HEX_DIGITS = {"x": 2, "u": 4}
_REFUSED_GROUPS = {
    "?=": "a look ahead",
    "?!": "a look ahead",
    "?<=": "a look behind",
    "?<!": "a look behind",
    "?>": "an atomic group",
    "?P=": "a reference to a group",
    "?P>": "recursion",
    "?(": "a condition",
    "?#": "a comment",
}


class ExpressionError(ValueError):
    """An expression that is broken or is not read here. Its text says why."""


@dataclass(frozen=True, slots=True)
class Take:
    """One character that passes the test."""

    test: CharTest


@dataclass(frozen=True, slots=True)
class Fork:
    """Two ways on, the preferred one first."""

    first: int
    second: int


@dataclass(frozen=True, slots=True)
class Save:
    """The place in the text goes to a slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class AtStart:
    """The start of the text."""


@dataclass(frozen=True, slots=True)
class AtEnd:
    """The end of the text."""


Op = Take | Fork | Save | AtStart | AtEnd
Way = tuple[int, tuple[int, ...]]
"""An op that waits for a character or the end, or DONE, and the slots that are saved before it."""


@dataclass(frozen=True)
class SearchProgram:
    """An expression, ready to be searched for."""

    ops: tuple[Op, ...]
    names: tuple[str, ...]
    """Names of the groups; the group `names[i]` has the slots 2i and 2i + 1."""
    _known: dict[str, bool] = field(default_factory=dict)

    @cached_property
    def first(self) -> tuple[Way, ...]:
        """Ways in at the start of the text."""
        return self._ways(0, passes=AtStart)

    @cached_property
    def later(self) -> tuple[Way, ...]:
        """Ways in anywhere else."""
        return self._ways(0, passes=None)

    @cached_property
    def behind(self) -> tuple[tuple[Way, ...], ...]:
        """Ways on behind each op."""
        return tuple(self._ways_behind(at, op) for at, op in enumerate(self.ops))

    @cached_property
    def is_nullable(self) -> bool:
        """A match may be empty, and not only at an end of the text."""
        return any(target == DONE for target, _ in self.later)

    def begins_with(self, char: str) -> bool:
        """Whether a match behind the start of the text may begin with this character."""
        known = self._known.get(char)
        if known is None:
            waiting = [self.ops[target] for target, _ in self.later if target != DONE]
            known = any(isinstance(op, Take) and op.test(char) for op in waiting)
            if len(self._known) < _MAX_KNOWN_CHARS:
                self._known[char] = known
        return known

    def _ways_behind(self, at: int, op: Op) -> tuple[Way, ...]:
        match op:
            case Take():
                return self._ways(at + 1, passes=None)
            case AtEnd():
                return self._ways(at + 1, passes=AtEnd)
            case _:
                return ()  # no thread waits there

    def _ways(self, begin: int, *, passes: type[AtStart] | type[AtEnd] | None) -> tuple[Way, ...]:
        """Follow all ops that take no character, preferred ways first."""
        found: list[Way] = []
        seen: set[int] = set()
        todo: list[Way] = [(begin, ())]
        while todo:
            at, slots = todo.pop()
            if at in seen:
                continue
            seen.add(at)
            if at == len(self.ops):
                found.append((DONE, slots))
                continue
            match self.ops[at]:
                case Fork(first, second):
                    todo += [(second, slots), (first, slots)]
                case Save(slot):
                    todo.append((at + 1, (*slots, slot)))
                case Take():
                    found.append((at, slots))
                case op if passes is not None and isinstance(op, passes):
                    todo.append((at + 1, slots))
                case AtEnd():
                    found.append((at, slots))
        return tuple(found)


@lru_cache(maxsize=64)
def of_expression(text: str) -> SearchProgram:
    """Compile an expression. Raises ExpressionError."""
    if len(text) > MAX_EXPRESSION_CHARS:
        raise ExpressionError(f"it has {len(text)} characters; at most {MAX_EXPRESSION_CHARS} are read")
    reader = _Reader(text)
    node = reader.read()
    names = tuple(reader.names)
    return _ready(SearchProgram(tuple(_Emitter(names).emit(node)), names))


def of_literals(literals: tuple[str, ...]) -> SearchProgram:
    """Compile a choice of texts, of which the longest wins. Raises ExpressionError."""
    rows = [_Row(tuple(_Chars(char.__eq__) for char in each)) for each in sorted(literals, key=len)[::-1]]
    return _ready(SearchProgram(tuple(_Emitter(()).emit(_Choice(tuple(rows)))), ()))


def _ready(program: SearchProgram) -> SearchProgram:
    """Follow all ways now, so that no reply has to."""
    _ = program.first, program.later, program.behind
    return program


@dataclass(frozen=True, slots=True)
class _Chars:
    test: CharTest


@dataclass(frozen=True, slots=True)
class _Edge:
    op: AtStart | AtEnd


@dataclass(frozen=True, slots=True)
class _Row:
    parts: tuple["_Node", ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    rows: tuple[_Row, ...]


@dataclass(frozen=True, slots=True)
class _Named:
    part: "_Node"
    name: str


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: "_Node"
    least: int
    most: int | None
    is_lazy: bool


_Node = _Chars | _Edge | _Row | _Choice | _Named | _Repeat


class _Reader:
    """Reads an expression from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self.names: list[str] = []

    def read(self) -> _Node:
        self._takes("(?s)")  # how all expressions are read
        node = self._choice()
        if self._at < len(self._text):
            raise ExpressionError(f"a ')' too many at character {self._at}")
        return node

    def _choice(self) -> _Choice:
        rows = [self._row()]
        while self._takes("|"):
            rows.append(self._row())
        return _Choice(tuple(rows))

    def _row(self) -> _Row:
        parts: list[_Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._part()))
        return _Row(tuple(parts))

    def _part(self) -> _Node:
        match self._next():
            case "(":
                return self._group()
            case "[":
                return _Chars(self._set())
            case ".":
                return _Chars(lambda _: True)
            case "^":
                return _Edge(AtStart())
            case "$":
                return _Edge(AtEnd())
            case "\\":
                return self._escape()
            case "*" | "+" | "?" as sign:
                raise ExpressionError(f"nothing stands before {sign!r} at character {self._at - 1}")
            case char:
                return _Chars(char.__eq__)

    def _repeated(self, part: _Node) -> _Node:
        bounds = self._bounds()
        if bounds is None:
            return part
        if self._takes("+"):
            raise ExpressionError("possessive repeats are not read")
        repeat = _Repeat(part, *bounds, is_lazy=self._takes("?"))
        if self._bounds() is not None:
            raise ExpressionError(f"a repeat of a repeat at character {self._at}")
        return repeat

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in {"*": (0, None), "+": (1, None), "?": (0, 1)}.items():
            if self._takes(sign):
                return bounds
        end = self._text.find("}", self._at) if self._text.startswith("{", self._at) else -1
        if end < 0:
            return None
        least, comma, most = self._text[self._at + 1 : end].partition(",")
        if not (least + most).isdecimal() or len(least + most) > len(str(_MAX_REPEATS)) * 2:
            return None  # braces that are no repeat stand for themselves
        self._at = end + 1
        numbers = int(least or 0), int(most) if most else None if comma else int(least)
        if max(number or 0 for number in numbers) > _MAX_REPEATS:
            raise ExpressionError(f"more than {_MAX_REPEATS} repeats")
        if numbers[1] is not None and numbers[1] < numbers[0]:
            raise ExpressionError("a repeat of which the most is less than the least")
        return numbers

    def _group(self) -> _Node:
        for sign, name in _REFUSED_GROUPS.items():
            if self._text.startswith(sign, self._at):
                raise ExpressionError(f"{name} at character {self._at - 1} is not read")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ExpressionError(f"groups are nested more than {_MAX_DEPTH} deep")
        name = ""
        if self._takes("?P<") or self._takes("?<"):
            name, _, _ = self._text[self._at :].partition(">")
            self._at += len(name) + 1
            if not name.isidentifier() or name in self.names:
                raise ExpressionError(f"the name of a group, {name[:50]!r}, is no word or stands twice")
            self.names.append(name)
            if len(self.names) > _MAX_NAMES:
                raise ExpressionError(f"more than {_MAX_NAMES} groups with names")
        elif not self._takes("?:") and self._text.startswith("?", self._at):
            raise ExpressionError(f"flags at character {self._at} are not read")
        part = self._choice()
        if not self._takes(")"):
            raise ExpressionError("a ')' is missing")
        self._depth -= 1
        return _Named(part, name) if name else part

    def _escape(self) -> _Node:
        char = self._next()
        if char in "Zz":
            return _Edge(AtEnd())
        if char == "A":
            return _Edge(AtStart())
        return _Chars(self._escaped(char))

    def _escaped(self, char: str) -> CharTest:
        test = _CLASSES.get(char.lower())
        if test is not None:
            return test if char.islower() else lambda each: not test(each)
        return self._escaped_char(char).__eq__

    def _escaped_char(self, char: str) -> str:
        if char in _HEX_DIGITS:
            digits = self._text[self._at : self._at + _HEX_DIGITS[char]]
            self._at += len(digits)
            try:
                return chr(int(digits, 16))
            except ValueError:
                raise ExpressionError(f"\\{char}{digits} is no character") from None
        if char.isalnum() and char not in _ESCAPES:
            raise ExpressionError(f"\\{char} is not read")
        return _ESCAPES.get(char, char)

    def _set(self) -> CharTest:
        is_negated = self._takes("^")
        tests: list[CharTest] = []
        is_first = True
        while is_first or not self._takes("]"):
            tests.append(self._member())
            is_first = False
        if is_negated:
            return lambda char: not any(test(char) for test in tests)
        return lambda char: any(test(char) for test in tests)

    def _member(self) -> CharTest:
        """Read a character, a class or a range."""
        char = self._next()
        if char == "\\":
            escaped = self._next()
            if escaped.lower() in _CLASSES:
                return self._escaped(escaped)
            char = self._escaped_char(escaped)
        if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
            self._at += 1
            last = self._next()
            last = self._escaped_char(self._next()) if last == "\\" else last
            if last < char:
                raise ExpressionError(f"the range {char}-{last} is empty")
            return lambda each: char <= each <= last
        return char.__eq__

    def _next(self) -> str:
        if self._at == len(self._text):
            raise ExpressionError("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _takes(self, text: str) -> bool:
        is_here = self._text.startswith(text, self._at)
        self._at += len(text) if is_here else 0
        return is_here


class _Emitter:
    """Writes the ops of a program."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._ops: list[Op] = []
        self._num_visits = 0

    def emit(self, node: _Node) -> list[Op]:
        self._visit(node)
        return self._ops

    def _visit(self, node: _Node) -> None:
        self._num_visits += 1
        if max(self._num_visits, len(self._ops)) > MAX_OPS * 2 or len(self._ops) > MAX_OPS:
            raise ExpressionError(f"it needs more than {MAX_OPS} steps")
        match node:
            case _Chars(test):
                self._ops.append(Take(test))
            case _Edge(op):
                self._ops.append(op)
            case _Row(parts):
                for part in parts:
                    self._visit(part)
            case _Choice(rows):
                self._visit_choice(rows)
            case _Named(part, name):
                slot = self._names.index(name) * 2
                self._ops.append(Save(slot))
                self._visit(part)
                self._ops.append(Save(slot + 1))
            case _Repeat():
                self._visit_repeat(node)

    def _visit_choice(self, rows: tuple[_Row, ...]) -> None:
        forks: list[int] = []
        ends: list[int] = []
        for row in rows[:-1]:
            forks.append(self._reserve())
            self._visit(row)
            ends.append(self._reserve())
            self._ops[forks[-1]] = Fork(forks[-1] + 1, len(self._ops))
        self._visit(rows[-1])
        for end in ends:
            self._ops[end] = Fork(len(self._ops), len(self._ops))

    def _visit_part(self, node: _Repeat) -> None:
        begin = len(self._ops)
        self._visit(node.part)
        if node.most != 1 and _prefers_empty(self._ops, begin):
            raise ExpressionError("a repeat of a part that prefers to be empty is not read")

    def _visit_repeat(self, node: _Repeat) -> None:
        for _ in range(node.least):
            self._visit_part(node)
        if node.most is None:
            begin = self._reserve()
            self._visit_part(node)
            again = self._reserve()
            self._ops[again] = Fork(begin, begin)
            self._ops[begin] = self._fork(begin + 1, len(self._ops), node)
            return
        forks: list[int] = []
        for _ in range(node.most - node.least):
            forks.append(self._reserve())
            self._visit_part(node)
        for fork in forks:
            self._ops[fork] = self._fork(fork + 1, len(self._ops), node)

    def _fork(self, inside: int, behind: int, node: _Repeat) -> Fork:
        return Fork(behind, inside) if node.is_lazy else Fork(inside, behind)

    def _reserve(self) -> int:
        self._ops.append(Fork(0, 0))
        return len(self._ops) - 1


def _prefers_empty(ops: list[Op], begin: int) -> bool:
    """Whether the way without a character, from `begin` to the end, is preferred to one with a character.

    In a repeat Python ends there; all ways side by side would go on.
    """
    seen: set[int] = set()
    todo = [begin]
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        if at == len(ops):
            continue
        match ops[at]:
            case Take():
                if len(ops) in seen:
                    return True
            case Fork(first, second):
                todo += [second, first]
            case _:
                todo.append(at + 1)
    return False
