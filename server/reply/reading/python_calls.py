"""Calls written as Python, alone or in a list: [f(a=1, b="x"), g()].

Owns: the text that is read as Python, and its values as JSON. Nothing is run.
Never: calls of a list one by one: a list is read when it is complete.
Source: the chat templates of Llama 3.2 and 4, LFM2 and OLMo 3.
"""

import ast
import json
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from server.reply.reading.argument_values import MAX_DEPTH, fits_in

MAX_LIST_CHARS = 64 * 1024
"""Longer lists are content: the reader of Python is given no more."""
_UNREADABLE = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
_JSON_NAMES = {"true": True, "false": False, "null": None}


def read_calls(text: str) -> list[tuple[str, str]]:
    """Return names and arguments of calls, alone or in a list; empty if the text is anything else."""
    with suppress(*_UNREADABLE):
        return list(_calls(_statements(text)))
    return []


def read_object(text: str) -> str | None:
    """Return the JSON text of a dict; None if the text is anything else."""
    with suppress(*_UNREADABLE):
        match _statements(text):
            case [ast.Expr(value=ast.Dict() as expression)]:
                return _written(_value(expression))
    return None


def _statements(text: str) -> list[ast.stmt]:
    if len(text) > MAX_LIST_CHARS:
        raise ValueError("too long")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escapes in a model's text are no mistake of ours
        return ast.parse(text.strip()).body


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
            yield ast.unparse(element.func), _written(arguments)


def _value(node: ast.expr) -> Any:
    with suppress(ValueError):
        return ast.literal_eval(node)
    return ast.literal_eval(_JsonWords().visit(node))


class _JsonWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _written(value: Any) -> str:
    if not fits_in(value, MAX_DEPTH):
        raise ValueError("too deep")
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if json.dumps(json.loads(written), ensure_ascii=False) != written:
        raise ValueError("a number and a string that are the same key")
    written.encode()  # a ValueError for half a character, which Python can escape
    return written
