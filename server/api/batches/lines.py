"""The two files of a batch: requests in, a line for each answered request out.

Owns: OpenAI's batch format, the faults of an input file, and an output file that can be continued
after anything, a power cut included: lines are appended whole, and half a line at its end is removed.
Source: OpenAI's reference of the batch API: request input and output objects.
"""

import contextlib
import fcntl
import io
import os
import secrets
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from engine.errors import RequestRejected
from server.edge.http.http_client import Reply
from server.edge.http.json_body import check_num_items

MAX_LINE_BYTES = 256 * 1024 * 1024
MAX_ID_CHARS = 512
_BEGINS = b'{"id":"batch_req_'
"""Beginning of each line that is written here."""


class BatchFileError(Exception):
    """A file that cannot be used. One line for the operator."""

    def __init__(self, message: str, *, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class LineFault(Exception):
    """A line that cannot be sent; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """A line of the input."""

    custom_id: str
    method: Any
    url: Any
    body: Any
    """These three are not checked yet: faults are reported in the line of the request."""

    def check_url(self, paths: frozenset[str]) -> None:
        """Raise LineFault if its URL is none of these paths."""
        if not isinstance(self.url, str) or self.url not in paths:
            raise LineFault(f"url must be one of {', '.join(sorted(paths))}")

    def encoded(self, **fields: Any) -> bytes:
        """The body that is sent, with these fields in it. Raises LineFault."""
        if self.method != "POST":
            raise LineFault('method must be "POST"')
        if not isinstance(self.body, dict):
            raise LineFault("body must be a JSON object")
        if self.body.get("stream"):
            raise LineFault("stream: replies in a batch are whole; leave it out")
        if self.body.get("background"):
            raise LineFault("background: a line of a batch waits for its answer; leave it out")
        try:
            return orjson.dumps({**self.body, **fields})
        except orjson.JSONEncodeError as error:  # nested deeper than it writes, though it has read it
            raise LineFault(f"body cannot be sent: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """A file of requests that was read through once and is fit to be sent."""

    path: Path
    num_requests: int

    def requests(self) -> Iterator[BatchRequest]:
        """Requests in the order of the file, read one by one, since the file may be large."""
        with self.path.open("rb") as file:
            for number, line in _numbered_lines(file):
                yield _request(line, f"{self.path} line {number}")


def numbered_requests(content: bytes, *, first: int = 1) -> Iterator[tuple[int, BatchRequest]]:
    """Requests of some lines, with their numbers from `first` on. Raises BatchFileError."""
    for place, line in _numbered_lines(io.BytesIO(content)):
        number = first - 1 + place
        try:
            check_num_items(line)
            yield number, _request(line, f"line {number}")
        except (RequestRejected, BatchFileError) as error:
            told = str(error).removeprefix(f"line {number}: ")
            raise BatchFileError(f"line {number}: {told}", line=number) from None


def check_input(path: Path) -> InputFile:
    """Read the whole file. Raises BatchFileError if the output would be ambiguous."""
    seen: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for number, line in _numbered_lines(file):
                where = f"{path} line {number}"
                custom_id = _request(line, where).custom_id
                if custom_id in seen:
                    earlier = f"custom_id {custom_id[:80]!r} is in line {seen[custom_id]} already"
                    raise BatchFileError(f"{where}: {earlier}; give each line its own")
                seen[custom_id] = number
    except OSError as error:
        raise BatchFileError(f"{path} cannot be read: {error.strerror}") from None
    return InputFile(path=path, num_requests=len(seen))


def _numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise BatchFileError(f"line {number} is longer than {MAX_LINE_BYTES} bytes")
        if line.strip():
            yield number, line


def _request(line: bytes, where: str) -> BatchRequest:
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BatchFileError(f"{where}: not JSON ({error.msg})") from None
    custom_id = found.get("custom_id") if isinstance(found, dict) else None
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        raise BatchFileError(
            f"{where}: each line is an object whose custom_id is a text of 1 to {MAX_ID_CHARS} characters"
        )
    return BatchRequest(
        custom_id=custom_id, method=found.get("method"), url=found.get("url"), body=found.get("body")
    )


def answer_line(custom_id: str, reply: Reply) -> bytes:
    """A reply, good or bad, as the output file has it. Its body is copied: it must be JSON of one line."""
    response = {"status_code": reply.status, "request_id": reply.headers.get("x-request-id", "")}
    line = _line(custom_id, response=response, error=None)
    head, tail = line.rsplit(b'},"error"', 1)
    return b'%b,"body":%b},"error"%b' % (head, reply.body, tail)


def as_one_line(reply: Reply) -> Reply:
    """Return a reply of any server with a body that an answer may have."""
    try:
        body = orjson.dumps(orjson.loads(reply.body))
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # a proxy's page, or nested too deep to write
        body = orjson.dumps(reply.body[:4096].decode(errors="replace"))
    return replace(reply, body=body)


def fault_line(custom_id: str, message: str) -> bytes:
    """A request that was never sent."""
    return _line(custom_id, response=None, error={"code": "invalid_request", "message": message})


def failed_line(custom_id: str) -> bytes:
    """A request that failed by a fault of this server."""
    message = "this line failed by a fault of the server, which its log has; send it again in another batch"
    return _line(custom_id, response=None, error={"code": "internal_error", "message": message})


def _line(custom_id: str, *, response: Any, error: Any) -> bytes:
    line = {
        "id": f"batch_req_{secrets.token_hex(16)}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return orjson.dumps(line) + b"\n"


class OutputFile:
    """Grows by whole lines."""

    def __init__(self, descriptor: int, answered_ids: frozenset[str]) -> None:
        self._descriptor = descriptor
        self.answered_ids = answered_ids
        """Ids of the lines that were there before."""

    def append(self, line: bytes) -> None:
        """Append a line. Raises OSError: a disk may be full. The next run removes a half-written line."""
        while line:
            line = line[os.write(self._descriptor, line) :]


@contextlib.contextmanager
def open_output(path: Path) -> Generator[OutputFile, None, None]:
    """Open the output for this process alone, repair it, and find the answered ids. Raises BatchFileError."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise BatchFileError(f"{path} cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchFileError(f"{path} is being written by another run") from None
        answered_ids, end = _answered_ids(path)
        os.ftruncate(descriptor, end)
        yield OutputFile(descriptor, answered_ids)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _answered_ids(path: Path) -> tuple[frozenset[str], int]:
    """Ids of the whole lines, and where these end: a request whose answer was cut off is sent again.

    Raises BatchFileError for a line that was not written here: another file must not lose its end.
    """
    ids, end = set[str](), 0
    with path.open("rb") as file:
        for number, line in _numbered_lines(file):
            where = f"{path} line {number}"
            # After a power cut there may be zeros where bytes were to come.
            if not _BEGINS.startswith(line.strip(b"\0")[: len(_BEGINS)]):
                raise BatchFileError(f"{where} is no answer of a batch; name another file for the answers")
            if line.endswith(b"\n"):
                ids.add(_request(line, where).custom_id)
                end = file.tell()
    return frozenset(ids), end
