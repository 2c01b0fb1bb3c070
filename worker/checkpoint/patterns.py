"""Regular expressions that strangers' files have for names of modules, in bounded time.

Never: an engine that can take exponential time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time

from pydantic_core import SchemaError, SchemaValidator, core_schema

_MAX_CHARS = 4096


class Patterns:
    """The expressions of one file, and the time that they take together."""

    def __init__(self, refusal: Callable[[str], Exception], *, max_s: float) -> None:
        """Take what makes an error of a line, and the most seconds of processor time."""
        self._refusal = refusal
        self._left_s = max_s

    def compile(self, expression: str, text: str, key: str) -> SchemaValidator:
        """Compile for Rust's engine, which takes linear time. Raises the refusal, with key and text."""
        if len(text) > _MAX_CHARS:
            raise self._refusal(f"{key} has a pattern of {len(text)} characters")
        try:
            with self._in_time():
                return SchemaValidator(core_schema.str_schema(pattern=expression, regex_engine="rust-regex"))
        except SchemaError as error:
            raise self._refusal(
                f"{key} has the pattern {text[:80]!r}, which needs look-around or is no regular expression"
            ) from error

    def accept(self, expression: SchemaValidator, name: str) -> bool:
        """Tell whether an expression matches a name. Raises the refusal."""
        with self._in_time():
            return bool(expression.isinstance_python(name))

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        began_s = thread_time()
        yield
        self._left_s -= thread_time() - began_s
        if self._left_s < 0:
            raise self._refusal("its patterns take too long")
