"""Calls written as Python: [f(a=1, b="x"), g()].

    pythonic    nothing but a list, or a list between <|python_start|> and <|python_end|>
    lfm2        text <|tool_call_start|> [f(a=1)] <|tool_call_end|>
    olmo3       text <function_calls> one call a line </function_calls>

Owns: the end of the text that is read as Python, and its values as JSON. Nothing is run.
Never: calls of a list one by one: a list is read when it is complete.
Source: the chat templates of Llama 3.2 and 4, LFM2 and OLMo 3.
"""

import ast
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from server.reply.tool_calls.events import ToolCallParser
from server.reply.tool_calls.marks import MarkFinder

MAX_LIST_CHARS = 64 * 1024
"""Longer lists are content: the reader of Python is given no more."""
_MAX_DEPTH = 64
_JSON_NAMES = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonicSyntax:
    """Marks around the list of one dialect."""

    opening: str
    closing: str
    may_begin_bare: bool = False


class PythonicParser(ToolCallParser):
    """Text that is no list of calls of these tools is content."""

    def __init__(self, syntax: PythonicSyntax, names: frozenset[str]) -> None:
        super().__init__()
        self._syntax = syntax
        self._names = names
        self._finder = MarkFinder(syntax.opening)
        self._list: list[str] = []
        self._brackets = _Brackets()
        self._state: Callable[[str], None] = self._first if syntax.may_begin_bare else self._in_text

    def _push(self, char: str) -> None:
        self._state(char)

    def _end(self) -> None:
        if self._state == self._in_bare:
            self._log.content("".join(self._list))
        elif self._state == self._in_marked:
            self._list.append(self._finder.flush())
            self._close("")
        else:
            self._log.content(self._finder.flush())

    def _first(self, char: str) -> None:
        """White space so far."""
        if char.isspace():
            self._log.content(char)
        elif char == "[":
            self._state = self._in_bare
            self._in_bare(char)
        else:
            self._state = self._in_text
            self._in_text(char)

    def _in_text(self, char: str) -> None:
        text, mark = self._finder.push(char)
        if text:
            self._log.content(text)
        if mark:
            self._list.clear()
            self._finder = MarkFinder(self._syntax.closing)
            self._state = self._in_marked

    def _in_marked(self, char: str) -> None:
        text, mark = self._finder.push(char)
        self._list.append(text)
        if mark:
            self._close(mark)

    def _close(self, mark: str) -> None:
        text = "".join(self._list)
        if not self._call(read_calls(text)):
            self._log.content(self._syntax.opening + text + mark)
        self._resume()

    def _in_bare(self, char: str) -> None:
        self._list.append(char)
        if self._brackets.push(char) and len(self._list) <= MAX_LIST_CHARS:
            return
        text = "".join(self._list)
        calls = read_calls(text)
        if not all(name in self._names for name, _ in calls) or not self._call(calls):
            self._log.content(text)
        self._resume()

    def _resume(self) -> None:
        self._list.clear()
        self._finder = MarkFinder(self._syntax.opening)
        self._state = self._in_text

    def _call(self, calls: list[tuple[str, str]]) -> bool:
        for name, arguments in calls:
            self._log.start(name)
            self._log.arguments(arguments)
        return bool(calls)


class _Brackets:
    """Depth of brackets in Python text, outside of its strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def push(self, char: str) -> bool:
        """True if a bracket is open behind `char`."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._quote:
            if char == "\\":
                self._is_escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
        return self._depth > 0 or bool(self._quote)


def read_calls(text: str) -> list[tuple[str, str]]:
    """Return names and arguments of calls, alone or in a list; empty if the text is anything else."""
    if len(text) > MAX_LIST_CHARS:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a model's escapes are nobody's mistake here
            tree = ast.parse(text.strip())
        return list(_calls(tree.body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _calls(statements: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for statement in statements:
        if not isinstance(statement, ast.Expr):
            raise ValueError("no expression")
        expression = statement.value
        elements = expression.elts if isinstance(expression, ast.List) else [expression]
        for element in elements:
            if not isinstance(element, ast.Call) or element.args:
                raise ValueError("no call with named arguments")
            arguments = {keyword.arg: _value(keyword.value) for keyword in element.keywords}
            if None in arguments:
                raise ValueError("no name")
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            written.encode()  # a ValueError for half a character, which Python can escape
            yield ast.unparse(element.func), written


def _value(node: ast.expr, depth: int = 0) -> Any:
    """Return the value of a literal. Raises ValueError for anything else."""
    if depth > _MAX_DEPTH:
        raise ValueError("too deep")
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List() | ast.Tuple():
            return [_value(element, depth + 1) for element in node.elts]
        case ast.Dict():
            return {
                _key(key): _value(value, depth + 1) for key, value in zip(node.keys, node.values, strict=True)
            }
        case ast.Name() if node.id in _JSON_NAMES:
            return _JSON_NAMES[node.id]
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("no key")
