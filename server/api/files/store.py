"""Files, batches and responses of the background in one SQLite database, in the folder of --state-folder.

Owns: the tables, the owner of each row (the key that made it), and that an answer is kept once.
Never: a clock of its own, HTTP, or the sending of requests.

Every method is one transaction and blocks: callers of the event loop use a thread.
"""

import secrets
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from engine.options.declaration import OptionError

MAX_FILES_OF_OWNER = 1000
MAX_OPEN_BATCHES_OF_OWNER = 100
_DATABASE = "tokenyard.sqlite"
_LOCK_WAIT_S = 10.0
_NO_ROOM = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})
"""Kinds of SQLite's errors when a write fails; a limit of the file's size gives the second."""
OPEN_STATUSES = ("validating", "in_progress", "cancelling")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    filename TEXT NOT NULL, purpose TEXT NOT NULL, created_at INTEGER NOT NULL, content BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    status TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS answers (
    batch TEXT NOT NULL, line INTEGER NOT NULL, is_error INTEGER NOT NULL, answer BLOB NOT NULL,
    PRIMARY KEY (batch, line)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    is_open INTEGER NOT NULL, changed_at INTEGER NOT NULL, request BLOB NOT NULL, body BLOB NOT NULL);
"""


class StorageFull(Exception):
    """There is no room for a file or a batch of this owner; the text says why."""


STORAGE_FAULTS = (StorageFull, sqlite3.OperationalError, OSError)
"""Errors of the disk, or of another process that holds the database: all that has to be kept waits."""


class FileInUse(Exception):
    """The file cannot be deleted yet; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """A file before it has an id."""

    filename: str
    purpose: str
    created_s: int
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPage:
    """Part of a list that a client asks for, the newest first."""

    limit: int
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRow:
    """A response of the background."""

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
    ttl_s: float


def open_store(folder: str, *, max_bytes: int) -> "StateStore":
    """Open the database in a folder, or make it. Raises OptionError if the folder cannot be used."""
    try:
        return StateStore(Path(folder), max_bytes=max_bytes)
    except Exception as error:
        fix = "name a folder that this user may write"
        raise OptionError(f"--state-folder {folder}", f"it cannot be used ({error})", fix) from error


class StateStore:
    """One connection, used by one thread at a time."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        """Raises OSError or sqlite3.Error if the folder cannot be used."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(
            folder / _DATABASE, check_same_thread=False, timeout=_LOCK_WAIT_S, isolation_level=None
        )
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.executescript(_SCHEMA)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run one transaction, whole or not at all. Raises StorageFull if the disk is full."""
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF in _NO_ROOM:
                    raise StorageFull(
                        "the disk of this server has no room for it; try again later"
                    ) from error
                raise
            finally:
                # Also a COMMIT may fail, and SQLite may have rolled back by itself.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    # Files.

    def add_file(self, owner: str, file: NewFile) -> dict[str, Any]:
        """Keep a file of a client. Raises StorageFull."""
        with self._transaction() as database:
            (num_files,) = database.execute("SELECT count(*) FROM files WHERE owner = ?", (owner,)).fetchone()
            if num_files >= MAX_FILES_OF_OWNER:
                raise StorageFull(f"there are {num_files} files already; delete some")
            (num_bytes,) = database.execute("SELECT total(length(content)) FROM files").fetchone()
            if num_bytes + len(file.content) > self._max_bytes:
                raise StorageFull(f"all files together may have {self._max_bytes} bytes; delete some")
            return _add_file(database, owner, file)

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

    def content(self, owner: str, file_id: str) -> bytes | None:
        """Return the bytes of a file; None if there is none of this owner."""
        with self._transaction() as database:
            row = database.execute(
                "SELECT content FROM files WHERE owner = ? AND id = ?", (owner, file_id)
            ).fetchone()
        return None if row is None else row[0]

    def delete_file(self, owner: str, file_id: str) -> bool:
        """Delete a file; False if there is none of this owner. Raises FileInUse."""
        with self._transaction() as database:
            rows = database.execute(
                "SELECT body FROM batches WHERE owner = ? AND status IN (?, ?, ?)", (owner, *OPEN_STATUSES)
            ).fetchall()
            if any(orjson.loads(row)["input_file_id"] == file_id for (row,) in rows):
                raise FileInUse(f"a batch under way reads {file_id}; cancel it first")
            statement = "DELETE FROM files WHERE owner = ? AND id = ?"
            return database.execute(statement, (owner, file_id)).rowcount > 0

    # Batches.

    def add_batch(self, owner: str, body: dict[str, Any]) -> None:
        """Keep a new batch. Raises StorageFull."""
        with self._transaction() as database:
            (num_open,) = database.execute(
                "SELECT count(*) FROM batches WHERE owner = ? AND status IN (?, ?, ?)",
                (owner, *OPEN_STATUSES),
            ).fetchone()
            if num_open >= MAX_OPEN_BATCHES_OF_OWNER:
                raise StorageFull(f"there are {num_open} batches under way; wait, or cancel some")
            database.execute(
                "INSERT INTO batches (id, owner, status, body) VALUES (?, ?, ?, ?)",
                (body["id"], owner, body["status"], orjson.dumps(body)),
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

    def next_open(self, after: str | None) -> tuple[str, str] | None:
        """Return owner and id of the oldest batch under way, of those behind the batch `after`."""
        with self._transaction() as database:
            row: tuple[str, str] | None = database.execute(
                "SELECT owner, id FROM batches WHERE status IN (?, ?, ?)"
                " AND number > coalesce((SELECT number FROM batches WHERE id = ?), 0)"
                " ORDER BY number LIMIT 1",
                (*OPEN_STATUSES, after),
            ).fetchone()
        return row

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

    def add_answer(self, batch_id: str, line: int, answer: bytes, *, is_error: bool) -> None:
        """Keep the answer of a line. A second one changes nothing."""
        with self._transaction() as database:
            database.execute(
                "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", (batch_id, line, is_error, answer)
            )

    def answered(self, batch_id: str) -> frozenset[int]:
        """Return the numbers of the lines that have an answer."""
        with self._transaction() as database:
            rows = database.execute("SELECT line FROM answers WHERE batch = ?", (batch_id,)).fetchall()
        return frozenset(line for (line,) in rows)

    def finish(self, owner: str, batch_id: str, changes: dict[str, Any], *, now_s: int) -> None:
        """End a batch, once: write its files, drop its answers and set its last status, all together."""
        with self._transaction() as database:
            (row,) = database.execute("SELECT body FROM batches WHERE id = ?", (batch_id,)).fetchone()
            body = _batch_body(database, row)
            if body["status"] not in OPEN_STATUSES:
                return
            for is_error, field in ((0, "output_file_id"), (1, "error_file_id")):
                rows = database.execute(
                    "SELECT answer FROM answers WHERE batch = ? AND is_error = ? ORDER BY line",
                    (batch_id, is_error),
                ).fetchall()
                if rows:
                    content = b"".join(answer for (answer,) in rows)
                    name = f"{batch_id}_{'error' if is_error else 'output'}.jsonl"
                    file = NewFile(filename=name, purpose="batch_output", created_s=now_s, content=content)
                    body[field] = _add_file(database, owner, file)["id"]
            _change(database, body, changes)
            database.execute("DELETE FROM answers WHERE batch = ?", (batch_id,))

    def abandon(self, batch_id: str, changes: dict[str, Any]) -> None:
        """End a batch whose files cannot be written: its answers are lost."""
        with self._transaction() as database:
            database.execute("DELETE FROM answers WHERE batch = ?", (batch_id,))
            (row,) = database.execute("SELECT body FROM batches WHERE id = ?", (batch_id,)).fetchone()
            body = _batch_body(database, row)
            if body["status"] in OPEN_STATUSES:
                _change(database, body, changes)

    # Responses of the background.

    def add_response(self, row: ResponseRow) -> None:
        """Keep a response that is to be made."""
        values = (row.id, row.owner, row.is_open, row.changed_s, row.request, row.body)
        with self._transaction() as database:
            database.execute(
                "INSERT INTO responses (id, owner, is_open, changed_at, request, body)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                values,
            )

    def end_response(self, response_id: str, body: bytes, bounds: ResponseBounds, *, now_s: int) -> None:
        """Keep the end of a response, and let older ones go for it."""
        with self._transaction() as database:
            database.execute(
                "UPDATE responses SET is_open = 0, changed_at = ?, body = ? WHERE id = ?",
                (now_s, body, response_id),
            )
            database.execute(
                "DELETE FROM responses WHERE is_open = 0 AND (changed_at < ? OR number IN ("
                " SELECT number FROM (SELECT number, row_number() OVER newest AS place,"
                " sum(length(request) + length(body)) OVER newest AS num_bytes FROM responses"
                " WHERE is_open = 0 WINDOW newest AS (ORDER BY changed_at DESC, number DESC))"
                " WHERE place > ? OR num_bytes > ?))",
                (now_s - bounds.ttl_s, bounds.max_responses, bounds.max_bytes),
            )

    def delete_response(self, owner: str, response_id: str) -> None:
        with self._transaction() as database:
            database.execute("DELETE FROM responses WHERE owner = ? AND id = ?", (owner, response_id))

    def responses(self) -> list[ResponseRow]:
        """List all responses, the one that changed last at the end."""
        with self._transaction() as database:
            rows = database.execute(
                "SELECT id, owner, is_open, changed_at, request, body FROM responses"
                " ORDER BY changed_at, number"
            ).fetchall()
        return [
            ResponseRow(id=id_, owner=owner, is_open=bool(is_open), changed_s=at, request=request, body=body)
            for id_, owner, is_open, at, request, body in rows
        ]


_FILES = "SELECT id, filename, purpose, created_at, length(content) FROM files WHERE owner = ?"


def _add_file(database: sqlite3.Connection, owner: str, file: NewFile) -> dict[str, Any]:
    file_id = f"file-{secrets.token_hex(16)}"
    database.execute(
        "INSERT INTO files (id, owner, filename, purpose, created_at, content) VALUES (?, ?, ?, ?, ?, ?)",
        (file_id, owner, file.filename, file.purpose, file.created_s, file.content),
    )
    return _file_body((file_id, file.filename, file.purpose, file.created_s, len(file.content)))


def _file_body(row: tuple[Any, ...]) -> dict[str, Any]:
    file_id, filename, purpose, created_s, num_bytes = row
    return {
        "id": file_id,
        "object": "file",
        "bytes": num_bytes,
        "created_at": created_s,
        "expires_at": None,
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }


def _batch_body(database: sqlite3.Connection, stored: bytes) -> dict[str, Any]:
    """Return a batch; while it is under way, its counts are those of its answers."""
    body: dict[str, Any] = orjson.loads(stored)
    if body["status"] in OPEN_STATUSES:
        num_answers, num_errors = database.execute(
            "SELECT count(*), total(is_error) FROM answers WHERE batch = ?", (body["id"],)
        ).fetchone()
        body["request_counts"] |= {"completed": num_answers - int(num_errors), "failed": int(num_errors)}
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
