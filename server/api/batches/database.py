"""The SQLite database of --state-folder: its tables, its files, and one transaction at a time.

Owns: that no other process or user reads it, and that neither a lock nor its own log keeps requests waiting.
Source: sqlite.org: pragma.html, wal.html, sections 2.1 and 6, and rescode.html.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DATABASE = "tokenyard.sqlite"
_LOCK_WAIT_S = 10.0
"""At the start, for a server that is just ending."""
_MAX_LOG_BYTES = 256 * 1024
"""Bytes of SQLite's log that stay on the disk behind a large transaction."""
_NO_ROOM = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})
"""Kinds of SQLite's errors when a write fails; a limit of the file's size gives the second."""
_LEFT_FREE_BYTES = 1024 * 1024
"""Bytes of the disk that new rows leave: all is first written to the log, deletions too, and copied later."""
_NO_ROOM_ON_DISK = "the disk of this server has no room for it; try again later"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    filename TEXT NOT NULL, purpose TEXT NOT NULL, created_at INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL DEFAULT 0, batch TEXT);  -- that still writes it; until then no client sees it
CREATE TABLE IF NOT EXISTS pieces (
    file TEXT NOT NULL, line INTEGER NOT NULL, content BLOB NOT NULL, UNIQUE (file, line));
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    status TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    is_open INTEGER NOT NULL, changed_at INTEGER NOT NULL, request BLOB NOT NULL, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS files_of_owner ON files (owner);
CREATE INDEX IF NOT EXISTS batches_of_owner ON batches (owner);
CREATE TRIGGER IF NOT EXISTS without_file AFTER DELETE ON files
    BEGIN DELETE FROM pieces WHERE file = old.id; END;
"""
_FROM_FIRST_FORM = """
BEGIN IMMEDIATE;
CREATE TABLE pieces (file TEXT NOT NULL, line INTEGER NOT NULL, content BLOB NOT NULL, UNIQUE (file, line));
INSERT INTO pieces SELECT id, 1, content FROM files;
ALTER TABLE files ADD COLUMN num_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE files ADD COLUMN batch TEXT;
UPDATE files SET num_bytes = length(content);
ALTER TABLE files DROP COLUMN content;
INSERT INTO files (id, owner, filename, purpose, created_at, num_bytes, batch)
    SELECT 'file-' || substr(batch, 7) || kind, owner, batch || '_' || kind || '.jsonl', 'batch_output',
    json_extract(CAST(body AS TEXT), '$.created_at'), sum(length(answer)), batch FROM (
    SELECT *, iif(is_error, 'error', 'output') AS kind FROM answers) JOIN batches ON id = batch
    GROUP BY batch, kind;
INSERT INTO pieces
    SELECT 'file-' || substr(batch, 7) || iif(is_error, 'error', 'output'), line, answer FROM answers;
DROP TABLE answers;
COMMIT;
"""
"""There a file was one value, and answers lay apart from files until the end of their batch."""


class StorageFull(Exception):
    """There is no room for a file or a batch of this owner; the text says why."""


STORAGE_FAULTS = (StorageFull, sqlite3.OperationalError, OSError)
"""Errors of the disk: all that has to be kept waits."""


class Database:
    """One connection, used by one thread at a time, and by this process alone."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError or sqlite3.Error if the folder cannot be used."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._place = place = folder / _DATABASE
        os.close(os.open(place, os.O_CREAT | os.O_CLOEXEC, 0o600))
        for path in folder.glob(f"{_DATABASE}*"):  # SQLite gives its other files the mode of the first
            path.chmod(0o600)
        self._folder = folder
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(
            place, check_same_thread=False, timeout=_LOCK_WAIT_S, isolation_level=None
        )
        # No other process can hold a lock that requests would wait for.
        for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.execute(f"PRAGMA journal_size_limit={_MAX_LOG_BYTES}")
        self._connection.execute(f"PRAGMA wal_autocheckpoint={_MAX_LOG_BYTES // 4096}")
        if self._connection.execute("SELECT 1 FROM pragma_table_info('answers')").fetchone():
            self._connection.executescript(_FROM_FIRST_FORM)
        self._connection.executescript(_SCHEMA)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run one transaction, whole or not at all. Raises StorageFull if the disk is full."""
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF in _NO_ROOM:
                    raise StorageFull(_NO_ROOM_ON_DISK) from error
                raise
            finally:
                # Also a COMMIT may fail, and SQLite may have rolled back by itself.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def require_disk(self, num_bytes: int) -> None:
        """Raise StorageFull if the disk has no room for `num_bytes`, in the log and then in the tables.

        Use it within a transaction, as `num_bytes`.
        """
        disk, log_bytes = os.statvfs(self._folder), self._place.with_name(f"{_DATABASE}-wal").stat().st_size
        new_bytes = num_bytes + max(0, num_bytes - self._count_bytes("freelist_count"))
        if disk.f_bavail * disk.f_frsize + log_bytes < new_bytes + _LEFT_FREE_BYTES:
            raise StorageFull(_NO_ROOM_ON_DISK)

    def num_bytes(self) -> int:
        return self._count_bytes("page_count") - self._count_bytes("freelist_count")

    def _count_bytes(self, pages: str) -> int:
        (page_bytes,), (num_pages,) = (
            self._connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_size", pages)
        )
        return int(page_bytes * num_pages)
