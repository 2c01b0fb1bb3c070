"""Traces that others published: which one a file is, and its lines as requests.

Owns: their fields and units, as their publishers document them:

Mooncake    JSON lines: timestamp (ms), input_length, output_length, hash_ids of 512 tokens each
Bailian     JSON lines: as Mooncake's, but timestamp in s and hash_ids of 16; chat_id, parent_chat_id, turn
Azure       CSV: TIMESTAMP (a date), ContextTokens, GeneratedTokens
BurstGPT    CSV: Timestamp (s), Model, Request tokens, Response tokens, ...; 0 response tokens: it failed

Never: opens files (files.py).
"""

import csv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson

from bench.simulate.requests.arrivals import ArrivalsError, SimRequest

_MOONCAKE_IDS_OF, _BAILIAN_IDS_OF = 512, 16
_MAX_SECONDS = 1e12
_MAX_DIGITS = 20

Lines = Iterable[tuple[str, bytes]]
"""Lines that are not empty, each behind the words that say where it stands."""


@dataclass(frozen=True, slots=True)
class PublicTrace:
    """A form of trace. `read` returns the requests of its lines in their order; it raises ArrivalsError."""

    name: str
    fields: frozenset[str]
    """Fields by which its first line is recognised."""
    read: Callable[[Lines], list[SimRequest]]


def public_trace_of(first_line: bytes) -> PublicTrace | None:
    """Return the form of a trace by its first line; None if it is none of these."""
    try:
        entry: Any = orjson.loads(first_line)
    except orjson.JSONDecodeError:
        try:
            entry = next(csv.reader([first_line.decode("utf-8-sig", errors="replace")]), [])
        except csv.Error:
            return None
    names = {str(name).strip() for name in entry} if isinstance(entry, dict | list) else set()
    return next((trace for trace in _TRACES if trace.fields <= names), None)


def whole_number(entry: dict[str, Any], name: str, where: str, least: int) -> int:
    """Return a field that is a whole number of at least `least`. Raises ArrivalsError."""
    value = entry.get(name)
    if type(value) is not int or value < least:
        raise ArrivalsError(f"{where}: {name} must be a whole number of at least {least}")
    return value


def whole_numbers(entry: dict[str, Any], name: str, where: str) -> tuple[int, ...]:
    """Return a field that is a list of whole numbers. Raises ArrivalsError."""
    value = entry.get(name)
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise ArrivalsError(f"{where}: {name} must be a list of whole numbers")
    return tuple(value)


def _read_mooncake(lines: Lines) -> list[SimRequest]:
    return list(_hashed(lines, _MOONCAKE_IDS_OF, ticks_per_s=1e3))


def _read_bailian(lines: Lines) -> list[SimRequest]:
    return list(_hashed(lines, _BAILIAN_IDS_OF, ticks_per_s=1.0))


def _hashed(lines: Lines, ids_of: int, *, ticks_per_s: float) -> Iterator[SimRequest]:
    """Read lines of JSON with hashes of the prompt's parts. An answer of no token counts as one."""
    for where, line in lines:
        try:
            entry: Any = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ArrivalsError(f"{where}: {error}") from None
        if not isinstance(entry, dict):
            raise ArrivalsError(f"{where}: expected an object")
        yield SimRequest(
            arrival_s=_seconds(entry.get("timestamp"), where, "timestamp") / ticks_per_s,
            prompt_len=whole_number(entry, "input_length", where, 1),
            max_tokens=max(whole_number(entry, "output_length", where, 0), 1),
            block_ids=whole_numbers(entry, "hash_ids", where),
            block_id_len=ids_of,
        )


def _read_azure(lines: Lines) -> list[SimRequest]:
    return [
        SimRequest(
            arrival_s=_date_s(row["TIMESTAMP"], where),
            prompt_len=_tokens(row, "ContextTokens", where, 1),
            max_tokens=_tokens(row, "GeneratedTokens", where, 1),
        )
        for where, row in _rows(lines)
    ]


def _read_burst_gpt(lines: Lines) -> list[SimRequest]:
    """Read the requests that were answered; those that failed have no lengths to serve."""
    return [
        SimRequest(
            arrival_s=_seconds(row["Timestamp"], where, "Timestamp"),
            prompt_len=_tokens(row, "Request tokens", where, 1),
            max_tokens=_tokens(row, "Response tokens", where, 1),
        )
        for where, row in _rows(lines)
        if _tokens(row, "Response tokens", where, 0)
    ]


def _rows(lines: Lines) -> Iterator[tuple[str, dict[str, str]]]:
    """Read rows of CSV by the names in the first line. Raises ArrivalsError where cells are missing."""
    names: list[str] = []
    for where, line in lines:
        try:
            cells = [cell.strip() for cell in next(csv.reader([line.decode("utf-8-sig")]), [])]
        except (UnicodeDecodeError, csv.Error) as error:
            raise ArrivalsError(f"{where}: {error}") from None
        if not names:
            names = cells
        elif len(cells) != len(names):
            raise ArrivalsError(f"{where}: expected {len(names)} cells, got {len(cells)}")
        else:
            yield where, dict(zip(names, cells, strict=True))


def _tokens(row: dict[str, str], name: str, where: str, least: int) -> int:
    text = row[name]
    if not text.isdecimal() or len(text) > _MAX_DIGITS or not least <= int(text) < 2**31:
        raise ArrivalsError(f"{where}: {name} must be a whole number of at least {least}, not {text[:40]!r}")
    return int(text)


def _seconds(value: Any, where: str, name: str) -> float:
    """Return a moment. Raises ArrivalsError unless it is a number of 0 or more."""
    try:
        seconds = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds <= _MAX_SECONDS:
        raise ArrivalsError(f"{where}: {name} must be a number, 0 or more")
    return seconds


def _date_s(text: str, where: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ArrivalsError(f"{where}: TIMESTAMP must be a date and a time, not {text[:40]!r}") from None


# Bailian before Mooncake, whose fields it has, too.
_TRACES = (
    PublicTrace("Bailian", frozenset({"chat_id", "parent_chat_id", "timestamp", "hash_ids"}), _read_bailian),
    PublicTrace("Mooncake", frozenset({"timestamp", "input_length", "hash_ids"}), _read_mooncake),
    PublicTrace("Azure", frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _read_azure),
    PublicTrace("BurstGPT", frozenset({"Timestamp", "Request tokens", "Response tokens"}), _read_burst_gpt),
)
