"""The database of --state-folder: bounded, old rows gone, for its owner alone, and never kept waiting."""

import sqlite3
import stat
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import orjson
import pytest

from engine.options.declaration import OptionError
from server.api.batches.database import StorageFull
from server.api.batches.store import (
    RESPONSE_TTL_S,
    TTL_S,
    Answer,
    ListPage,
    NewFile,
    OwnerFull,
    ResponseRow,
    open_store,
)
from tests.server.api.batches.test_faults_of_batches import content_of

MANY = 1 << 30
ALL = ListPage(limit=10_000, after=None)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def store(folder):
    store = open_store(str(folder), max_bytes=MANY)
    yield store
    store.close()


def new_file(content: bytes = b"x\n", *, created_s: int = 0) -> NewFile:
    return NewFile(filename="in.jsonl", created_s=created_s, content=content)


def new_batch(number: int = 1, *, status: str = "validating", created_s: int = 0, **fields) -> dict:
    counts = {"total": 0, "completed": 0, "failed": 0}
    return {
        "id": f"batch_{number}",
        "status": status,
        "created_at": created_s,
        "expires_at": created_s + 86_400,
        "request_counts": counts,
        "input_file_id": "file-none",
        "output_file_id": None,
        "error_file_id": None,
        **fields,
    }


def answer(line: int, content: bytes, *, is_error: bool = False, owner: str = "a") -> Answer:
    return Answer(owner=owner, batch_id="batch_1", line=line, content=content, is_error=is_error, now_s=0)


def test_its_files_are_for_their_owner_alone_also_in_a_folder_that_others_may_enter(folder):
    folder.mkdir(mode=0o755)
    (folder / "tokenyard.sqlite").touch(mode=0o644)
    store = open_store(str(folder), max_bytes=MANY)
    store.add_file("a", new_file())
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    store.close()
    assert set(modes.values()) == {0o600}, modes


def test_no_other_process_can_lock_it_so_that_nothing_waits(store, folder):
    other = sqlite3.connect(folder / "tokenyard.sqlite", timeout=0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("BEGIN EXCLUSIVE")
    other.close()
    began_s = time.monotonic()
    store.add_file("a", new_file())
    assert time.monotonic() - began_s < 5


def test_a_second_server_in_the_same_folder_is_refused(store, folder, monkeypatch):
    monkeypatch.setattr("server.api.batches.database._LOCK_WAIT_S", 0.05)
    with pytest.raises(OptionError, match="locked"):
        open_store(str(folder), max_bytes=MANY)


def test_the_log_of_a_large_file_does_not_stay_on_the_disk(store, folder):
    store.add_file("a", new_file(b"x" * 8_000_000))
    for _ in range(3):
        store.add_file("a", new_file())
    assert (folder / "tokenyard.sqlite-wal").stat().st_size < 1_000_000


def test_new_rows_leave_room_in_which_files_are_deleted(store, folder, monkeypatch):
    """Numbers of the system stand for the disk; the same was seen on one of 4 MiB."""
    kept = store.add_file("a", new_file(b"x" * 100_000))["id"]
    store.add_batch("a", new_batch())
    log_bytes = (folder / "tokenyard.sqlite-wal").stat().st_size
    free_bytes = 1024 * 1024 - log_bytes + 2 * 500_000
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_bavail=free_bytes // 4096, f_frsize=4096))
    for add in (
        lambda: store.add_file("a", new_file(b"x" * 600_000)),
        lambda: store.add_answer(answer(1, b"x" * 600_000)),
    ):
        with pytest.raises(StorageFull, match="disk"):
            add()
    store.add_file("a", new_file(b"x" * 400_000))
    free_bytes = 0
    assert store.delete_file("a", kept)


def test_an_answer_that_comes_after_the_end_of_its_batch_changes_nothing(store):
    store.add_batch("a", new_batch())
    store.finish("batch_1", {"status": "cancelled"})
    store.add_answer(answer(1, b"late\n"))
    assert store.answered("batch_1") == set()
    assert store.files("a", ALL, None) == []


def test_answers_are_the_file_of_the_batch_which_is_seen_at_its_end(store):
    store.add_batch("a", new_batch())
    for line, content, is_error in ((3, b"three\n", False), (1, b"one\n", False), (2, b"two\n", True)):
        store.add_answer(answer(line, content, is_error=is_error))
    store.add_answer(answer(3, b"again\n", is_error=True))
    assert store.answered("batch_1") == {1, 2, 3}
    assert store.batch("a", "batch_1")["request_counts"] == {"total": 0, "completed": 2, "failed": 1}
    assert store.files("a", ALL, None) == []
    store.finish("batch_1", {"status": "completed"})
    batch = store.batch("a", "batch_1")
    assert content_of(store, batch["output_file_id"]) == b"one\nthree\n"
    assert content_of(store, batch["error_file_id"]) == b"two\n"
    assert store.file("a", batch["output_file_id"])["bytes"] == 10
    assert store.file("b", batch["output_file_id"]) is None
    assert store.delete_file("a", batch["output_file_id"])
    assert content_of(store, batch["output_file_id"]) == b""


def test_files_and_batches_are_deleted_after_a_time_unless_a_batch_under_way_reads_them(store):
    read = store.add_file("a", new_file())["id"]
    unread = store.add_file("a", new_file())["id"]
    young = store.add_file("a", new_file(created_s=10))["id"]
    assert store.file("a", unread)["expires_at"] == TTL_S
    store.add_batch("a", new_batch(1, input_file_id=read))
    store.add_batch("a", new_batch(2, status="completed"))
    store.add_batch("a", new_batch(3, status="completed", created_s=10))
    store.delete_old(TTL_S)
    assert store.file("a", unread) is not None
    store.delete_old(TTL_S + 5)
    assert {each["id"] for each in store.files("a", ALL, None)} == {read, young}
    assert {each["id"] for each in store.batches("a", ALL)} == {"batch_1", "batch_3"}
    assert content_of(store, unread) == b""


def test_responses_at_their_end_are_deleted_after_a_day(store):
    for id_, is_open in (("ended", False), ("open", True)):
        row = ResponseRow(id=id_, owner="a", is_open=is_open, changed_s=0, request=b"{}", body=b"{}")
        store.add_response(row)
    store.delete_old(RESPONSE_TTL_S)
    assert store.response_ids() == ["ended", "open"]
    store.delete_old(RESPONSE_TTL_S + 1)
    assert store.response_ids() == ["open"]


def test_batches_count_against_the_bound_and_of_many_the_oldest_goes(folder, monkeypatch):
    monkeypatch.setattr("server.api.batches.store.MAX_BATCHES_OF_OWNER", 3)
    store = open_store(str(folder), max_bytes=150_000)
    for number in range(5):
        store.add_batch("a", new_batch(number, status="cancelled"))
    assert [each["id"] for each in store.batches("a", ALL)] == ["batch_4", "batch_3", "batch_2"]
    metadata = {f"{key}": "x" * 512 for key in range(16)}

    def add_many() -> None:
        for number in range(5, 40):
            store.add_batch(f"{number}", new_batch(number, status="cancelled", metadata=metadata))

    with pytest.raises(StorageFull, match="150000 bytes"):
        add_many()
    store.close()


def test_responses_under_way_count_against_the_bound_of_all(folder):
    with closing(open_store(str(folder), max_bytes=200_000)) as store:
        row = ResponseRow(id="r0", owner="a", is_open=True, changed_s=0, request=b"x" * 60_000, body=b"{}")
        store.add_response(row)
        with pytest.raises(StorageFull, match="responses"):
            store.add_response(replace(row, id="r1", body=b"x" * 100_000))
        assert store.response_ids() == ["r0"]
        assert store.response("r0") == row
        assert store.response("r1") is None


def test_the_answers_of_a_key_are_bounded_and_leave_those_of_another_alone(folder):
    store = open_store(str(folder), max_bytes=200_000)
    store.add_batch("a", new_batch())
    store.add_batch("b", new_batch(2))
    for line in range(2):
        store.add_answer(answer(line, b"x" * 90_000))
    with pytest.raises(OwnerFull):
        store.add_answer(answer(3, b"x" * 90_000))
    store.add_answer(
        Answer(owner="b", batch_id="batch_2", line=1, content=b"x" * 90_000, is_error=False, now_s=0)
    )
    with pytest.raises(StorageFull):
        store.add_file("b", new_file())
    store.close()


def test_a_database_of_the_first_form_is_taken_over(folder):
    folder.mkdir()
    old = sqlite3.connect(folder / "tokenyard.sqlite")
    old.executescript(
        "CREATE TABLE files (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL,"
        " owner TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL, created_at INTEGER NOT NULL,"
        " content BLOB NOT NULL);"
        "CREATE TABLE batches (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL,"
        " owner TEXT NOT NULL, status TEXT NOT NULL, body BLOB NOT NULL);"
        "CREATE TABLE answers (batch TEXT NOT NULL, line INTEGER NOT NULL, is_error INTEGER NOT NULL,"
        " answer BLOB NOT NULL, PRIMARY KEY (batch, line)) WITHOUT ROWID;"
        "INSERT INTO files VALUES (7, 'file-one', 'a', 'in.jsonl', 'batch', 5, CAST('l1' AS BLOB));"
    )
    body = orjson.dumps(new_batch(1, status="in_progress", created_s=5))
    old.execute("INSERT INTO batches VALUES (1, 'batch_1', 'a', 'in_progress', ?)", (body,))
    rows = [(2, 0, b"two\n"), (1, 0, b"one\n"), (3, 1, b"bad\n")]
    old.executemany("INSERT INTO answers VALUES ('batch_1', ?, ?, ?)", rows)
    old.commit()
    old.close()
    for _ in range(2):
        store = open_store(str(folder), max_bytes=MANY)
        assert store.file("a", "file-one")["bytes"] == 2
        assert content_of(store, "file-one") == b"l1"
        assert store.answered("batch_1") == {1, 2, 3}
        store.close()
    store = open_store(str(folder), max_bytes=MANY)
    store.finish("batch_1", {"status": "completed"})
    batch = store.batch("a", "batch_1")
    assert content_of(store, batch["output_file_id"]) == b"one\ntwo\n"
    assert store.file("a", batch["error_file_id"])["bytes"] == 4
    store.close()
