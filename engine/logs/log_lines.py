"""What a line of the log looks like: text for a person, or one JSON object for a machine.

Owns: the words of a line, and that nothing in it can look like another line or move a cursor.
Never: where lines go (log_setup.py).

An exception's own words may quote what a client sent. In the API process they are therefore left out, unless
the operating system or the engine said them; its type and its stack stay.
"""

import logging
import os
import traceback
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from types import TracebackType

import orjson

from engine.errors import EngineError, RequestFailed, RequestRejected

Field = str | int | float | None
_FIELDS = "fields"
_MAX_CHARS = 8192
_MAX_STACK_CHARS = 32 * 1024
_MAX_CHAIN = 8
_NEWLINE = b"\n"


class LogFormat(StrEnum):
    """The words of --log-format."""

    AUTO = "auto"  # text where a person looks on, JSON otherwise
    TEXT = "text"
    JSON = "json"


class ProcessName(StrEnum):
    """Who says it."""

    API = "api"
    ENGINE = "engine"


def fields(**values: Field) -> dict[str, dict[str, Field]]:
    """The `extra` of a call of a logger: facts beside its words. None and empty text are left out."""
    return {_FIELDS: {name: value for name, value in values.items() if value not in (None, "")}}


class LineFormatter(logging.Formatter):
    """Makes a record one line, without its line break; `encode` is what the two forms differ in."""

    def __init__(self, process: ProcessName) -> None:
        super().__init__()
        self._process = process
        self._pid = os.getpid()

    def encode(self, record: logging.LogRecord) -> bytes:
        """The line, with its line break. Raises TypeError or ValueError if the arguments do not fit."""
        raise NotImplementedError

    def _message(self, record: logging.LogRecord) -> str:
        return printable(record.getMessage()[:_MAX_CHARS])

    def _stack(self, record: logging.LogRecord) -> str:
        if not record.exc_info or record.exc_info[1] is None:
            return ""
        lines = _stack_lines(record.exc_info[1], self._process)
        return "\n".join(lines)[-_MAX_STACK_CHARS:]


class TextLines(LineFormatter):
    """`2026-11-21 19:06:51.123 INFO api[17] server.launch: words field=value`, a stack on lines below."""

    def encode(self, record: logging.LogRecord) -> bytes:
        """As the base class says."""
        when = _time_of(record).astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        head = f"{when} {record.levelname} {self._process}[{self._pid}] {_logger_name(record)}"
        facts = "".join(f" {name}={_shown(value)}" for name, value in _fields_of(record).items())
        stack = self._stack(record)
        text = f"{head}: {self._message(record)}{facts}" + (f"\n{stack}" if stack else "")
        return text.encode() + _NEWLINE


class JsonLines(LineFormatter):
    """One object: time (UTC), level, process, pid, logger, message, the fields, and the stack, if any."""

    def encode(self, record: logging.LogRecord) -> bytes:
        """As the base class says."""
        document: dict[str, Field] = {
            "time": _time_of(record).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process.value,
            "pid": self._pid,
            "logger": _logger_name(record),
            "message": self._message(record),
        }
        for name, value in _fields_of(record).items():
            document[name] = printable(value[:_MAX_CHARS]) if isinstance(value, str) else value
        stack = self._stack(record)
        if stack:
            document["stack"] = stack
        return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


def printable(text: str) -> str:
    """Every character that is not seen as itself, a line break above all, as its escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _shown(value: Field) -> str:
    """Quoted where its border could not be seen."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = printable(str(value)[:_MAX_CHARS])
    return text if text and not any(char in ' "=' for char in text) else orjson.dumps(text).decode()


def _fields_of(record: logging.LogRecord) -> Mapping[str, Field]:
    facts: Mapping[str, Field] = getattr(record, _FIELDS, {})
    return facts


def _logger_name(record: logging.LogRecord) -> str:
    return "engine.core.process" if record.name == "__main__" else record.name


def _time_of(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _stack_lines(error: BaseException, process: ProcessName) -> Iterator[str]:
    """The first cause first, as Python prints it."""
    for link in reversed(_chain(error)):
        yield from _frames(link.__traceback__)
        words = _words(link) if process is ProcessName.ENGINE or _speaks_for_us(link) else ""
        yield f"{type(link).__qualname__}: {words}" if words else type(link).__qualname__


def _chain(error: BaseException) -> list[BaseException]:
    """An error and what it was raised from, the last first; bounded, since it may be a circle."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and len(chain) < _MAX_CHAIN:
        chain.append(following)
        hidden = following.__suppress_context__
        following = following.__cause__ or (None if hidden else following.__context__)
    return chain


def _frames(trace: TracebackType | None) -> Iterator[str]:
    for frame in traceback.extract_tb(trace):
        yield f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"


def _words(error: BaseException) -> str:
    return printable(str(error)[:_MAX_CHARS])


def _speaks_for_us(error: BaseException) -> bool:
    """Its text was written by us or by the operating system, and quotes no client."""
    may_quote = isinstance(error, RequestRejected | RequestFailed)
    return isinstance(error, OSError | EngineError) and not may_quote
