"""Files, batches and responses of the background, in the folder of --state-folder.

Owns: the owner of each row (the key that made it), that an answer is kept once, and when rows are deleted.
Never: the tables (database.py), a clock of its own, HTTP, or the sending of requests.

Every method is one transaction and blocks: callers of the event loop use a thread. A file lies in pieces: of
an upload some lines each, of a batch's output one answer each, so that neither is ever whole in memory.
"""

import secrets
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from engine.options.declaration import OptionError
from server.api.batches.database import Database, StorageFull

MAX_FILES_OF_OWNER = 1000
MAX_OPEN_BATCHES_OF_OWNER = 100
MAX_BATCHES_OF_OWNER = 1000
TTL_S = 30 * 24 * 3600
"""Age at which files, and batches that have ended, are deleted."""
RESPONSE_TTL_S = 24 * 3600
"""Age at which responses that have ended are deleted."""
PIECE_BYTES = 256 * 1024
OPEN_STATUSES = ("validating", "in_progress", "cancelling")
_OPEN = f"status IN {OPEN_STATUSES}"
_INPUT, _EXPIRES, _CREATED = (  # of a batch that can be read
    f"iif(json_valid(CAST(body AS TEXT)), json_extract(CAST(body AS TEXT), '$.{name}'), 0)"
    for name in ("input_file_id", "expires_at", "created_at")
)
FilePart = list[tuple[int, bytes]]
"""Pieces of a file, one behind the other, each with the number of its first line."""


class OwnerFull(Exception):
    """The files of an owner fill all that is allowed for all; the text says so."""


class FileInUse(Exception):
    """The file cannot be deleted yet; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """A file before it has an id."""

    filename: str
    created_s: int
    content: bytes
    purpose: str = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBatch:
    owner: str
    id: str
    expires_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A line of the output of a batch."""

    owner: str
    batch_id: str
    line: int
    content: bytes
    is_error: bool
    now_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPage:
    """Part of a list that a client asks for, the newest first."""

    limit: int
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRow:
    id: str
    owner: str
    is_open: bool
    """True until it has an end."""
    changed_s: int
    request: bytes
    """The request, as it is needed to make the response again, or to go on from it."""
    body: bytes
    """The response object, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseBounds:
    """Bounds of the responses at their end; the oldest go first."""

    max_responses: int
    max_bytes: int


def open_store(folder: str, *, max_bytes: int) -> "StateStore":
    """Open the database in a folder, or make it. Raises OptionError if the folder cannot be used."""
    try:
        return StateStore(Database(Path(folder)), max_bytes=max_bytes)
    except Exception as error:
        fix = "name a folder that this user may write"
        raise OptionError(f"--state-folder {folder}", f"it cannot be used ({error})", fix) from error


class StateStore:
    """One connection, used by one thread at a time, and by this process alone."""

    def __init__(self, database: Database, *, max_bytes: int) -> None:
        self._database = database
        self._transaction = database.transaction
        self._max_bytes = max_bytes

    def close(self) -> None:
        self._database.close()

    # Files.

    def add_file(self, owner: str, file: NewFile) -> dict[str, Any]:
        """Keep a file of a client. Raises StorageFull."""
        file_id = f"file-{secrets.token_hex(16)}"
        with self._transaction() as database:
            (num_files,) = database.execute("SELECT count(*) FROM files WHERE owner = ?", (owner,)).fetchone()
            if num_files >= MAX_FILES_OF_OWNER:
                raise StorageFull(f"there are {num_files} files already; delete some")
            self._require_room(len(file.content))
            database.execute(
                "INSERT INTO files (id, owner, filename, purpose, created_at, num_bytes)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (file_id, owner, file.filename, file.purpose, file.created_s, len(file.content)),
            )
            database.executemany(
                "INSERT INTO pieces VALUES (?, ?, ?)",
                ((file_id, line, content) for line, content in _pieces(file.content)),
            )
        return _file_body((file_id, file.filename, file.purpose, file.created_s, len(file.content)))

    def file(self, owner: str, file_id: str) -> dict[str, Any] | None:
        """Return the description of a file; None if there is none of this owner."""
        with self._transaction() as database:
            row = database.execute(f"{_FILES} AND id = ?", (owner, file_id)).fetchone()
        return None if row is None else _file_body(row)

    def files(self, owner: str, page: ListPage, purpose: str | None) -> list[dict[str, Any]]:
        """List one file more than the page holds, if there are more."""
        with self._transaction() as database:
            before = _number(database, "files", page.after)
            rows = database.execute(
                f"{_FILES} AND number < ? AND purpose = coalesce(?, purpose) ORDER BY number DESC LIMIT ?",
                (owner, before, purpose, page.limit + 1),
            ).fetchall()
        return [_file_body(row) for row in rows]

    def part(self, file_id: str, after: int) -> FilePart:
        """Return pieces of a file behind the one of line `after`, PIECE_BYTES or one; none at the end."""
        part: FilePart = []
        num_bytes = 0
        with self._transaction() as database:
            for line, content in database.execute(
                "SELECT line, content FROM pieces WHERE file = ? AND line > ? ORDER BY line", (file_id, after)
            ):
                num_bytes += len(content)
                if part and num_bytes > PIECE_BYTES:
                    break
                part.append((line, content))
        return part

    def delete_file(self, owner: str, file_id: str) -> bool:
        """Delete a file; False if there is none of this owner. Raises FileInUse."""
        with self._transaction() as database:
            if database.execute(
                f"SELECT 1 FROM batches WHERE owner = ? AND {_OPEN} AND {_INPUT} = ?", (owner, file_id)
            ).fetchone():
                raise FileInUse(f"a batch under way reads {file_id}; cancel it first")
            statement = "DELETE FROM files WHERE owner = ? AND id = ? AND batch IS NULL"
            return database.execute(statement, (owner, file_id)).rowcount > 0

    def delete_old(self, now_s: int) -> None:
        """Delete files, batches and responses at their end that are too old."""
        with self._transaction() as database:
            database.execute(
                "DELETE FROM files WHERE created_at < ? AND batch IS NULL"
                f" AND id NOT IN (SELECT {_INPUT} FROM batches WHERE {_OPEN})",
                (now_s - TTL_S,),
            )
            database.execute(f"DELETE FROM batches WHERE NOT {_OPEN} AND {_CREATED} < ?", (now_s - TTL_S,))
            old_s = now_s - RESPONSE_TTL_S
            database.execute("DELETE FROM responses WHERE is_open = 0 AND changed_at < ?", (old_s,))

    def _require_room(self, num_bytes: int) -> None:
        """Raise StorageFull if the disk has no room, or all that is kept would be more than is allowed."""
        self._database.require_disk(num_bytes)
        if self._database.num_bytes() + num_bytes > self._max_bytes:
            what = "all files, batches and responses of the background"
            raise StorageFull(f"{what} together may have {self._max_bytes} bytes; delete some")

    # Batches.

    def add_batch(self, owner: str, body: dict[str, Any]) -> None:
        """Keep a new batch, in place of the oldest at their end if there are many. Raises StorageFull."""
        with self._transaction() as database:
            (num_open,) = database.execute(
                f"SELECT count(*) FROM batches WHERE owner = ? AND {_OPEN}", (owner,)
            ).fetchone()
            if num_open >= MAX_OPEN_BATCHES_OF_OWNER:
                raise StorageFull(f"there are {num_open} batches under way; wait, or cancel some")
            stored = orjson.dumps(body)
            self._require_room(len(stored))
            database.execute(
                f"DELETE FROM batches WHERE owner = ? AND NOT {_OPEN} AND number <= ("
                " SELECT number FROM batches WHERE owner = ? ORDER BY number DESC LIMIT 1 OFFSET ?)",
                (owner, owner, MAX_BATCHES_OF_OWNER - 1),
            )
            database.execute(
                "INSERT INTO batches (id, owner, status, body) VALUES (?, ?, ?, ?)",
                (body["id"], owner, body["status"], stored),
            )

    def batch(self, owner: str, batch_id: str) -> dict[str, Any] | None:
        """Return a batch with its counts; None if there is none of this owner."""
        with self._transaction() as database:
            row = database.execute(
                "SELECT body FROM batches WHERE owner = ? AND id = ?", (owner, batch_id)
            ).fetchone()
            return None if row is None else _batch_body(database, row[0])

    def batches(self, owner: str, page: ListPage) -> list[dict[str, Any]]:
        """List one batch more than the page holds, if there are more."""
        with self._transaction() as database:
            rows = database.execute(
                "SELECT body FROM batches WHERE owner = ? AND number < ? ORDER BY number DESC LIMIT ?",
                (owner, _number(database, "batches", page.after), page.limit + 1),
            ).fetchall()
            return [_batch_body(database, row[0]) for row in rows]

    def open_batches(self) -> list[OpenBatch]:
        """Return the batches under way, the oldest first."""
        with self._transaction() as database:
            rows = database.execute(
                f"SELECT owner, id, {_EXPIRES} FROM batches WHERE {_OPEN} ORDER BY number"
            ).fetchall()
        return [OpenBatch(owner=owner, id=id_, expires_s=expires_s) for owner, id_, expires_s in rows]

    def update_batch(
        self, batch_id: str, changes: dict[str, Any], *, expected: Iterable[str]
    ) -> dict[str, Any] | None:
        """Change a batch if its status is one of `expected`; return it, or None if it is not."""
        with self._transaction() as database:
            row = database.execute("SELECT body FROM batches WHERE id = ?", (batch_id,)).fetchone()
            body = None if row is None else orjson.loads(row[0])
            if body is None or body["status"] not in tuple(expected):
                return None
            return _change(database, body, changes)

    def add_answer(self, answer: Answer) -> None:
        """Keep the answer of a line; a second one, or one behind the end, is none. Raises OwnerFull."""
        files = _output_files(answer.batch_id)
        file_id = files[answer.is_error]
        with self._transaction() as database:
            if not database.execute(
                f"SELECT 1 FROM batches WHERE id = ? AND {_OPEN}", (answer.batch_id,)
            ).fetchone():
                return
            if database.execute(
                "SELECT 1 FROM pieces WHERE file IN (?, ?) AND line = ?", (*files, answer.line)
            ).fetchone():
                return
            (num_bytes,) = database.execute(
                "SELECT total(num_bytes) FROM files WHERE owner = ?", (answer.owner,)
            ).fetchone()
            if num_bytes + len(answer.content) > self._max_bytes:
                raise OwnerFull(f"the files of this key fill all of {self._max_bytes} bytes; delete some")
            self._database.require_disk(len(answer.content))
            name = f"{answer.batch_id}_{'error' if answer.is_error else 'output'}.jsonl"
            database.execute(
                "INSERT OR IGNORE INTO files (id, owner, filename, purpose, created_at, batch)"
                " VALUES (?, ?, ?, 'batch_output', ?, ?)",
                (file_id, answer.owner, name, answer.now_s, answer.batch_id),
            )
            database.execute("INSERT INTO pieces VALUES (?, ?, ?)", (file_id, answer.line, answer.content))
            database.execute(
                "UPDATE files SET num_bytes = num_bytes + ? WHERE id = ?", (len(answer.content), file_id)
            )

    def answered(self, batch_id: str) -> set[int]:
        """Return the numbers of the lines that have an answer."""
        with self._transaction() as database:
            rows = database.execute(
                "SELECT line FROM pieces WHERE file IN (?, ?)", _output_files(batch_id)
            ).fetchall()
        return {line for (line,) in rows}

    def finish(self, batch_id: str, changes: dict[str, Any]) -> None:
        """End a batch, once: show its files and set its last status, together."""
        with self._transaction() as database:
            (row,) = database.execute("SELECT body FROM batches WHERE id = ?", (batch_id,)).fetchone()
            body = _batch_body(database, row)
            if body["status"] not in OPEN_STATUSES:
                return
            database.execute("UPDATE files SET batch = NULL WHERE batch = ?", (batch_id,))
            for file_id, field in zip(
                _output_files(batch_id), ("output_file_id", "error_file_id"), strict=True
            ):
                if database.execute("SELECT 1 FROM files WHERE id = ?", (file_id,)).fetchone():
                    body[field] = file_id
            _change(database, body, changes)

    # Responses of the background.

    def add_response(self, row: ResponseRow) -> None:
        """Keep a response that is to be made. Raises StorageFull."""
        values = (row.id, row.owner, row.is_open, row.changed_s, row.request, row.body)
        with self._transaction() as database:
            self._require_room(len(row.request) + len(row.body))
            database.execute(
                "INSERT INTO responses (id, owner, is_open, changed_at, request, body)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                values,
            )

    def end_response(self, response_id: str, body: bytes, bounds: ResponseBounds, *, now_s: int) -> None:
        """Keep the end of a response, and let older ones go for it."""
        with self._transaction() as database:
            self._database.require_disk(len(body))
            database.execute(
                "UPDATE responses SET is_open = 0, changed_at = ?, body = ? WHERE id = ?",
                (now_s, body, response_id),
            )
            database.execute(
                "DELETE FROM responses WHERE is_open = 0 AND number IN ("
                " SELECT number FROM (SELECT number, row_number() OVER newest AS place,"
                " sum(length(request) + length(body)) OVER newest AS num_bytes FROM responses"
                " WHERE is_open = 0 WINDOW newest AS (ORDER BY changed_at DESC, number DESC))"
                " WHERE place > ? OR num_bytes > ?)",
                (bounds.max_responses, bounds.max_bytes),
            )

    def delete_response(self, owner: str, response_id: str) -> None:
        with self._transaction() as database:
            database.execute("DELETE FROM responses WHERE owner = ? AND id = ?", (owner, response_id))

    def response_ids(self) -> list[str]:
        """List all responses, the one that changed last at the end."""
        with self._transaction() as database:
            rows = database.execute("SELECT id FROM responses ORDER BY changed_at, number").fetchall()
        return [id_ for (id_,) in rows]

    def response(self, response_id: str) -> ResponseRow | None:
        with self._transaction() as database:
            row = database.execute(
                "SELECT owner, is_open, changed_at, request, body FROM responses WHERE id = ?",
                (response_id,),
            ).fetchone()
        if row is None:
            return None
        owner, is_open, at, request, body = row
        return ResponseRow(
            id=response_id,
            owner=owner,
            is_open=bool(is_open),
            changed_s=at,
            request=request,
            body=body,
        )


_FILES = "SELECT id, filename, purpose, created_at, num_bytes FROM files WHERE batch IS NULL AND owner = ?"


def _pieces(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Divide a file behind line breaks; each piece has the number of its first line."""
    start, line = 0, 1
    while start < len(content):
        end = len(content)
        if end - start > PIECE_BYTES:
            end = content.rfind(b"\n", start, start + PIECE_BYTES) + 1
            end = end or content.find(b"\n", start + PIECE_BYTES) + 1 or len(content)
        yield line, content[start:end]
        line += content.count(b"\n", start, end)
        start = end


def _output_files(batch_id: str) -> tuple[str, str]:
    """Return the ids of the files with the answers and the errors of a batch."""
    number = batch_id.removeprefix("batch_")
    return f"file-{number}output", f"file-{number}error"


def _file_body(row: tuple[Any, ...]) -> dict[str, Any]:
    file_id, filename, purpose, created_s, num_bytes = row
    return {
        "id": file_id,
        "object": "file",
        "bytes": num_bytes,
        "created_at": created_s,
        "expires_at": created_s + TTL_S,
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }


def _batch_body(database: sqlite3.Connection, stored: bytes) -> dict[str, Any]:
    """Return a batch; while it is under way, its counts are those of its answers."""
    body: dict[str, Any] = orjson.loads(stored)
    if body["status"] in OPEN_STATUSES:
        num_completed, num_failed = (
            database.execute("SELECT count(*) FROM pieces WHERE file = ?", (file_id,)).fetchone()[0]
            for file_id in _output_files(body["id"])
        )
        body["request_counts"] |= {"completed": num_completed, "failed": num_failed}
    return body


def _change(database: sqlite3.Connection, body: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    changed = {**body, **changes}
    database.execute(
        "UPDATE batches SET status = ?, body = ? WHERE id = ?",
        (changed["status"], orjson.dumps(changed), changed["id"]),
    )
    return changed


def _number(database: sqlite3.Connection, table: str, after: str | None) -> int:
    """Return the number of the row `after`, below which a page begins; beyond all rows if there is none."""
    row = database.execute(f"SELECT number FROM {table} WHERE id = ?", (after,)).fetchone()
    return 2**62 if row is None else int(row[0])
