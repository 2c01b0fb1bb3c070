"""The form of a log line: text for people, or one JSON object for machines.

Owns: the form, and that nothing in a line can look like another line or move a cursor.

An exception's message may quote a client's data. The API process therefore leaves it out, unless the
operating system or the engine wrote it; type and stack stay.
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
    """Values of --log-format."""

    AUTO = "auto"  # text on a terminal, JSON otherwise
    TEXT = "text"
    JSON = "json"


class ProcessName(StrEnum):
    API = "api"
    ENGINE = "engine"
    RANK = "rank"
    NODE = "node"
    PLACEMENT = "placement"


def fields(**values: Field) -> dict[str, dict[str, Field]]:
    """Make the `extra` of a logger call: fields after the message. None and empty texts are left out."""
    return {_FIELDS: {name: value for name, value in values.items() if value not in (None, "")}}


class LineFormatter(logging.Formatter):
    """The base of both forms; `encode` makes the line."""

    def __init__(self, process: ProcessName) -> None:
        super().__init__()
        self._process = process
        self._pid = os.getpid()

    def encode(self, record: logging.LogRecord) -> bytes:
        """Make the line with its line break. Raises TypeError or ValueError if the arguments do not fit."""
        raise NotImplementedError

    def _message(self, record: logging.LogRecord) -> str:
        return printable(record.getMessage()[:_MAX_CHARS])

    def _stack(self, record: logging.LogRecord) -> str:
        if not record.exc_info or record.exc_info[1] is None:
            return ""
        lines = _stack_lines(record.exc_info[1], self._process)
        return "\n".join(lines)[-_MAX_STACK_CHARS:]


class TextLines(LineFormatter):
    """Text: `2026-11-21 19:06:51.123 INFO api[17] server.app: words field=value`, then a stack."""

    def encode(self, record: logging.LogRecord) -> bytes:
        when = _time_of(record).astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        head = f"{when} {record.levelname} {self._process}[{self._pid}] {_logger_name(record)}"
        facts = "".join(f" {name}={_shown(value)}" for name, value in _fields_of(record).items())
        stack = self._stack(record)
        text = f"{head}: {self._message(record)}{facts}" + (f"\n{stack}" if stack else "")
        return text.encode() + _NEWLINE


class JsonLines(LineFormatter):
    """JSON with time (UTC), level, process, pid, logger, message, the fields, and any stack."""

    def encode(self, record: logging.LogRecord) -> bytes:
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
    """Escape every character that is not printed as itself, above all line breaks."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _shown(value: Field) -> str:
    """Format a value; quote a text whose end could not be seen."""
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
    """List the stack lines, the first cause first, as Python prints them."""
    for link in reversed(_chain(error)):
        yield from _frames(link.__traceback__)
        words = _words(link) if process is not ProcessName.API or _speaks_for_us(link) else ""
        yield f"{type(link).__qualname__}: {words}" if words else type(link).__qualname__


def _chain(error: BaseException) -> list[BaseException]:
    """List an error and its causes, the last error first; bounded, since they may form a circle."""
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
    """Whether the message is by the engine or the operating system, and quotes no client."""
    may_quote = isinstance(error, RequestRejected | RequestFailed)
    return isinstance(error, OSError | EngineError) and not may_quote
