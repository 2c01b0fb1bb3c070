"""Whatever goes wrong with a line, a batch or the disk: all others go on, and each batch has one end."""

import asyncio
import json
import logging
import resource
import threading

import pytest

import server.api.batches.queue as queue_module
from server.api.batches.access import StateAccess, unix_time_s
from server.api.batches.places import FairPlaces
from server.api.batches.queue import BatchQueue
from server.api.batches.store import NewFile, StateStore
from server.edge.http.http_client import Reply
from tests.tiers import by_day

ENDPOINT = "/v1/completions"
ENDS = {"completed", "failed", "cancelled", "expired"}
MANY = 1 << 30
_MOST_AWAITS = 64


class Odd(Exception):
    """A fault that nobody lists."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("server.api.batches.access.PAUSE_S", 0.001)
    monkeypatch.setattr("server.api.batches.queue.PAUSE_S", 0.001)


@pytest.fixture
def desk(tmp_path):
    desk = StateAccess(str(tmp_path / "state"), max_bytes=MANY)
    yield desk
    desk.close()


class Server:
    """A client of a server that answers at once, after a turn of the event loop."""

    async def post(self, path: str, body: bytes) -> Reply:
        await asyncio.sleep(0)
        return Reply(status=200, headers={}, body=b"{}")


def line(custom_id: str, body: str = '{"prompt":"hi"}') -> str:
    return f'{{"custom_id":"{custom_id}","method":"POST","url":"{ENDPOINT}","body":{body}}}\n'


def nested(num_levels: int) -> str:
    return '{"prompt":' + "[" * num_levels + "]" * num_levels + "}"


def begin(desk: StateAccess, owner: str, *lines: str) -> str:
    """Keep a file and a batch of it; return the id of the batch, which is its number for this owner."""
    content = "".join(lines).encode()
    file = NewFile(filename="in.jsonl", created_s=unix_time_s(), content=content)
    file_id = desk.store.add_file(owner, file)["id"]
    batch_id = f"batch_{owner}"
    body = {
        "id": batch_id,
        "status": "validating",
        "endpoint": ENDPOINT,
        "input_file_id": file_id,
        "created_at": unix_time_s(),
        "expires_at": unix_time_s() + 3600,
        "output_file_id": None,
        "error_file_id": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
    }
    desk.store.add_batch(owner, body)
    return batch_id


def answers(desk: StateAccess, owner: str, field: str) -> list[dict]:
    file_id = desk.store.batch(owner, f"batch_{owner}")[field]
    return list(map(json.loads, content_of(desk.store, file_id).splitlines())) if file_id else []


def content_of(store: StateStore, file_id: str) -> bytes:
    content, last = b"", 0
    while part := store.part(file_id, last):
        content += b"".join(piece for _, piece in part)
        last = part[-1][0]
    return content


async def until_ended(desk: StateAccess, *owners: str) -> list[str]:
    async with asyncio.timeout(60):
        while True:
            ends = [desk.store.batch(owner, f"batch_{owner}")["status"] for owner in owners]
            if set(ends) <= ENDS:
                return ends
            await asyncio.sleep(0.002)


class Working:
    """The queue of a running server, which has to work still when the block ends."""

    def __init__(self, desk: StateAccess, client=None) -> None:
        self.parts: list[str] = []
        self.queue = BatchQueue(
            desk, lambda _: client or Server(), FairPlaces(2), count_fault=self.parts.append
        )

    async def __aenter__(self) -> "Working":
        self.task = asyncio.create_task(self.queue.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        was_done = self.task.done()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        assert not was_done, "the queue gave up"


async def test_a_line_that_cannot_be_sent_is_an_error_of_its_own(desk):
    """The parser takes a body that the writer does not."""
    begin(desk, "a", line("deep", nested(300)), line("plain"))
    begin(desk, "b", line("other"))
    async with Working(desk) as working:
        assert await until_ended(desk, "a", "b") == ["completed", "completed"]
    (error,) = answers(desk, "a", "error_file_id")
    assert (error["custom_id"], error["error"]["code"]) == ("deep", "invalid_request")
    assert [each["custom_id"] for each in answers(desk, "a", "output_file_id")] == ["plain"]
    assert desk.store.batch("a", "batch_a")["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert working.parts == []


async def test_a_line_that_fails_as_nobody_foresaw_is_an_error_counted_and_logged(desk, caplog):
    class Failing(Server):
        async def post(self, path: str, body: bytes) -> Reply:
            if b"bad" in body:
                raise Odd("never seen")
            return await super().post(path, body)

    begin(desk, "a", line("one", '{"prompt":"bad"}'), line("two"))
    async with Working(desk, Failing()) as working:
        assert await until_ended(desk, "a") == ["completed"]
    (error,) = answers(desk, "a", "error_file_id")
    assert (error["custom_id"], error["error"]["code"]) == ("one", "internal_error")
    assert "never seen" not in json.dumps(error)
    assert working.parts == ["batch_line"]
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert record.exc_info[0] is Odd


async def test_a_batch_that_cannot_be_read_fails_with_a_reason_and_others_go_on(desk, monkeypatch):
    check = queue_module._check_part

    def failing(part, endpoint, seen):
        if b"bad" in part[0][1]:
            raise Odd
        check(part, endpoint, seen)

    monkeypatch.setattr(queue_module, "_check_part", failing)
    begin(desk, "a", line("bad"))
    begin(desk, "b", line("good"))
    async with Working(desk) as working:
        assert await until_ended(desk, "a", "b") == ["failed", "completed"]
    (fault,) = desk.store.batch("a", "batch_a")["errors"]["data"]
    assert fault["code"] == "internal_error"
    assert working.parts == ["batch"]


async def test_a_batch_that_cannot_even_fail_keeps_no_other_back(desk):
    begin(desk, "a", line("one"))
    begin(desk, "b", line("two"))
    desk.store._database._connection.execute("UPDATE batches SET body = 'oops' WHERE id = 'batch_a'")
    async with Working(desk) as working:
        assert await until_ended(desk, "b") == ["completed"]
        while "batches" not in working.parts:
            await asyncio.sleep(0.002)


# A fault at every await.


class Interposed:
    """A coroutine into which a fault is thrown at one of its awaits, which all its fellows count together."""

    def __init__(self, coroutine, plan: "Plan") -> None:
        self._coroutine = coroutine
        self._plan = plan

    def __await__(self):
        awaited = self._coroutine.__await__()
        value, fault = None, None
        while True:
            try:
                waits_for = awaited.send(value) if fault is None else awaited.throw(fault)
            except StopIteration as end:
                return end.value
            fault = self._plan.at_an_await()
            if fault is not None:
                if waits_for is not None:
                    waits_for._asyncio_future_blocking = False
                continue
            try:
                value = yield waits_for
            except BaseException as error:  # noqa: BLE001 -- cancelled, or what it waited for has failed
                value, fault = None, error


class Plan:
    """The await that is to fail, and the count of all."""

    def __init__(self, place: int, kind: type[BaseException]) -> None:
        self._place = place
        self.kind: type[BaseException] | None = kind
        self.num_awaits = 0

    def at_an_await(self) -> BaseException | None:
        self.num_awaits += 1
        return self.kind("planned") if self.kind and self.num_awaits - 1 == self._place else None

    def task(self, loop, coroutine, **options):
        async def run():
            return await Interposed(coroutine, self)

        task = asyncio.Task(run(), loop=loop, **options)
        task.add_done_callback(lambda _: coroutine.close())  # one that was cancelled before its first step
        return task


async def run_with_a_fault(desk: StateAccess, place: int, kind: type[BaseException]) -> int:
    """Let two batches end while one await of the queue, or of a task of its own, fails; count the awaits."""
    database = desk.store._database._connection
    database.execute("CREATE TABLE ends (id TEXT)")
    database.execute(
        "CREATE TRIGGER watch AFTER UPDATE OF status ON batches WHEN new.status IN"
        " ('completed', 'failed', 'cancelled', 'expired') BEGIN INSERT INTO ends VALUES (new.id); END"
    )
    begin(desk, "a", line("one"), line("two"), line("three"))
    begin(desk, "b", line("four"), line("five"))
    plan = Plan(place, kind)
    loop = asyncio.get_running_loop()
    queue = BatchQueue(desk, lambda _: Server(), FairPlaces(2))
    loop.set_task_factory(plan.task)
    working = loop.create_task(queue.run())
    watching = asyncio.Task(until_ended(desk, "a", "b"), loop=loop)
    try:
        first, second = await watching
        assert not working.done(), "the queue gave up"
        assert "completed" in (first, second), "a fault of one batch was the end of the other"
        num_awaits, plan.kind = plan.num_awaits, None
        # The queue still works.
        begin(desk, "c", line("six"))
        desk.wake()
        assert await asyncio.Task(until_ended(desk, "c"), loop=loop) == ["completed"]
    finally:
        loop.set_task_factory(None)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    ends = [id_ for (id_,) in database.execute("SELECT id FROM ends")]
    assert sorted(ends) == ["batch_a", "batch_b", "batch_c"], "each batch has one end"
    for owner in "abc":
        counts = desk.store.batch(owner, f"batch_{owner}")["request_counts"]
        lines = answers(desk, owner, "output_file_id") + answers(desk, owner, "error_file_id")
        assert (
            len(lines) == len({each["custom_id"] for each in lines}) == counts["completed"] + counts["failed"]
        )
        if desk.store.batch(owner, f"batch_{owner}")["status"] == "completed":
            assert len(lines) == {"a": 3, "b": 2, "c": 1}[owner]
    return num_awaits


@pytest.mark.parametrize("kind", [Odd, asyncio.CancelledError, OSError])
@pytest.mark.parametrize("place", by_day(range(_MOST_AWAITS), range(0, _MOST_AWAITS, 4)))
async def test_a_fault_at_any_await_ends_neither_the_queue_nor_another_tenants_batch(tmp_path, place, kind):
    desk = StateAccess(str(tmp_path / "state"), max_bytes=MANY)
    try:
        await run_with_a_fault(desk, place, kind)
    finally:
        desk.close()


async def test_these_are_all_awaits_of_two_batches(desk):
    assert await run_with_a_fault(desk, -1, Odd) < _MOST_AWAITS


async def test_a_batch_goes_on_by_itself_when_a_full_disk_has_room_again(desk, tmp_path):
    """A limit of the size of files stands for the disk."""
    begin(desk, "a", line("one"), line("two"))
    begin(desk, "b", line("three"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(path.stat().st_size for path in (tmp_path / "state").iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
    try:
        async with Working(desk) as working:
            while not desk.degraded():
                await asyncio.sleep(0.002)
            assert desk.num_waiting > 0
            await asyncio.sleep(0.05)  # more tries
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert await until_ended(desk, "a", "b") == ["completed", "completed"]
            assert working.parts == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(answers(desk, "a", "output_file_id")) == 2
    async with asyncio.timeout(60):
        while desk.degraded():
            await asyncio.sleep(0.002)


async def test_a_slow_disk_takes_no_thread_of_what_else_runs(desk):
    let_go = threading.Event()
    tasks = [asyncio.create_task(desk.attempt(lambda _: let_go.wait(60))) for _ in range(64)]
    await asyncio.sleep(0)
    try:
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), timeout=30) == "free"
    finally:
        let_go.set()
        await asyncio.gather(*tasks)
