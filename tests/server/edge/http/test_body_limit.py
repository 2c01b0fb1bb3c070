"""Limit of a body's size. Over real sockets, since Content-Length may lie there."""

import asyncio
import contextlib
import json
import selectors
from collections.abc import Iterable
from urllib.parse import urlsplit

import httpx
import pytest

from engine.errors import Overloaded
from server.edge.error_replies import BodyTimeout, LowMemory
from server.edge.http.body_limit import BodyLimit
from server.edge.sockets import trimming

LIMIT = 64 * 1024


async def raw(url: str, *pieces: bytes) -> bytes:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()


def body_of(num_bytes: int) -> bytes:
    frame = len(json.dumps({"prompt": ""}))
    return json.dumps({"prompt": "x" * (num_bytes - frame)}).encode()


@pytest.mark.parametrize(("num_bytes", "status"), [(LIMIT, 400), (LIMIT + 1, 413), (8 * 1024 * 1024, 413)])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_the_limit_is_exact_whether_declared_or_chunked(url, num_bytes, status, is_chunked):
    body = body_of(num_bytes)

    async def pieces():
        for start in range(0, len(body), 16 * 1024):
            yield body[start : start + 16 * 1024]

    async with httpx.AsyncClient() as client:
        response = await client.post(f"{url}/v1/completions", content=pieces() if is_chunked else body)
    assert response.status_code == status
    code = {400: "context_length_exceeded", 413: "request_too_large"}[status]
    assert response.json()["error"]["code"] == code


async def test_a_large_promise_is_refused_before_anything_is_sent(url):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 99999999999\r\n\r\n"
    reply = await raw(url, head)
    assert reply.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in reply.lower()


class Held:
    """Bodies in pieces, and an application that reads them and answers when it is let."""

    def __init__(self, num_bytes: int) -> None:
        self.answer = asyncio.Event()
        self.is_read = False
        self._pieces = [num_bytes // 4] * 4

    async def receive(self) -> dict:
        size = self._pieces.pop()
        return {"type": "http.request", "body": b"x" * size, "more_body": bool(self._pieces)}

    async def app(self, scope, receive, send) -> None:
        while (await receive())["more_body"]:
            pass
        self.is_read = True
        await self.answer.wait()


def limited(*held: Held, budget_bytes: int = 1 << 30, left_bytes: int = 1 << 40) -> list[asyncio.Task]:
    async def app(scope, receive, send) -> None:
        await scope["held"].app(scope, receive, send)

    limit = BodyLimit(app, max_body_bytes=1 << 30, available_bytes=lambda: left_bytes - limit._held_bytes)
    limit._budget_bytes = budget_bytes
    scopes = [{"type": "http", "headers": [], "held": each} for each in held]
    return [asyncio.create_task(limit(scope, scope["held"].receive, None)) for scope in scopes]


async def test_the_bodies_of_all_have_one_budget_until_their_replies_and_small_ones_pass() -> None:
    first, second, small = Held(8 << 20), Held(8 << 20), Held(1 << 10)
    working = limited(first, second, small, budget_bytes=10 << 20)
    await asyncio.sleep(0.01)
    assert (first.is_read or second.is_read, small.is_read) == (True, True)
    refused = [each for each in working if each.done()]
    assert [type(each.exception()) for each in refused] == [Overloaded]
    for each in (first, second, small):
        each.answer.set()
    await asyncio.gather(*working, return_exceptions=True)


async def test_where_memory_is_left_for_few_bodies_the_others_are_refused_and_small_ones_pass() -> None:
    large, small = [Held(8 << 20) for _ in range(3)], Held(1 << 10)
    working = limited(*large, small, left_bytes=80 << 20)
    await asyncio.sleep(0.01)
    assert (sum(each.is_read for each in large), small.is_read) == (2, True)
    assert [type(each.exception()) for each in working if each.done()] == [LowMemory]
    for each in (*large, small):
        each.answer.set()
    await asyncio.gather(*working, return_exceptions=True)


async def test_a_body_that_was_answered_or_refused_is_counted_no_more() -> None:
    limit = BodyLimit(Held(4).app, max_body_bytes=1 << 30)
    limit._budget_bytes = 8 << 20
    for size in (4 << 20, 12 << 20):
        held = Held(size)
        held.answer.set()
        limit._app = held.app
        with contextlib.suppress(Overloaded):
            await limit({"type": "http", "headers": []}, held.receive, None)
        assert limit._held_bytes == 0


async def test_memory_of_large_bodies_is_given_back_once_for_a_crowd_of_them(monkeypatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(trimming, "_AFTER_S", 0.05)
    monkeypatch.setattr(trimming, "_find_trim", lambda: asked.append)
    for crowd in ([1 << 10], [2 << 20, 3 << 20, 4 << 20]):
        held = [Held(size) for size in crowd]
        for each in held:
            each.answer.set()
        await asyncio.gather(*limited(*held, budget_bytes=64 << 20))
        await asyncio.sleep(0.15)
    assert asked == [0], "not for a small one"


async def test_two_opinions_on_the_length_of_a_body_are_refused_and_end_the_connection(url, engine):
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: t\r\n\r\n"
    reply = await raw(url, head + b'f\r\n{"prompt": "x"}\r\n0\r\n\r\n' + hidden)
    assert reply.startswith(b"HTTP/1.1 400")
    assert reply.count(b"HTTP/1.1") == 1
    assert b"connection: close" in reply.lower()
    assert engine.requests == []


async def test_a_body_longer_than_its_promise_does_not_get_in(url, engine):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: 15\r\n\r\n"
    reply = await raw(url, head + b'{"prompt": "x"}' + b"x" * 1000)
    assert reply.startswith(b"HTTP/1.1 200")
    assert len(engine.requests) == 1


async def test_a_body_that_stands_still_is_given_up():
    async def app(scope, receive, send):
        await receive()

    async def receive():
        await asyncio.Event().wait()

    limit = BodyLimit(app, max_body_bytes=10, idle_s=0.01)
    with pytest.raises(BodyTimeout):
        await limit({"type": "http", "headers": []}, receive, None)


async def test_waiting_for_the_hang_up_after_the_body_has_no_limit():
    messages = [{"type": "http.request", "body": b"x", "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await asyncio.sleep(0.03)
        return {"type": "http.disconnect"}

    async def app(scope, receive, send):
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"

    await BodyLimit(app, max_body_bytes=10, idle_s=0.01)({"type": "http", "headers": []}, receive, None)


class OurSelector(selectors.DefaultSelector):
    """Waits for nothing: the time that it was to wait has passed at once."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list:
        self.now_s += timeout or 0.0
        return super().select(0)


class OurLoop(asyncio.SelectorEventLoop):
    """A loop whose clock moves only when it waits: half an hour of a slow client is over at once."""

    def __init__(self) -> None:
        self._ours = OurSelector()
        super().__init__(self._ours)

    def time(self) -> float:
        return self._ours.now_s


def seconds_of(sender: Iterable[tuple[float, int]]) -> float:
    """Read the body of a sender of (seconds to wait, bytes); return its time, or raise as the server does."""
    pieces = iter(sender)

    async def receive():
        pause_s, num_bytes = next(pieces, (0.0, 0))
        await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": b"x" * num_bytes, "more_body": bool(num_bytes)}

    async def app(scope, receive, send):
        while (await receive())["more_body"]:
            pass

    async def read() -> float:
        limit = BodyLimit(app, max_body_bytes=8 << 20, available_bytes=None)
        try:
            await limit({"type": "http", "headers": []}, receive, None)
        except BodyTimeout as error:
            error.add_note(f"{asyncio.get_running_loop().time():g}")
            raise
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=OurLoop) as runner:
        return runner.run(read())


@pytest.mark.parametrize("num_fast", [0, 1 << 10, 60 << 10, 3_900_000], ids=["none", "1K", "60K", "3.9M"])
@pytest.mark.parametrize("pause_s", [0.5, 10.0, 29.0])
def test_a_body_that_trickles_is_given_up_in_time_however_fast_it_began(num_fast, pause_s):
    fast = [(0.001, min(16 << 10, num_fast - sent)) for sent in range(0, num_fast, 16 << 10)]
    with pytest.raises(BodyTimeout, match="bytes a second") as ended:
        seconds_of([*fast, *[(pause_s, 1)] * 100_000])
    (ended_s,) = map(float, ended.value.__notes__)
    assert ended_s < 32


@pytest.mark.parametrize(("pause_s", "num_bytes"), [(0.25, 257), (1.0, 1025), (15.0, 15_400), (29.0, 29_700)])
def test_a_body_that_is_slow_but_brings_enough_is_read_to_its_end(pause_s, num_bytes):
    num_pieces = (4 << 20) // num_bytes
    assert seconds_of([(pause_s, num_bytes)] * num_pieces) == pytest.approx(pause_s * num_pieces)


def test_a_body_that_becomes_slow_is_not_ended_for_having_been_fast_before():
    assert seconds_of([(0.001, 64 << 10)] * 40 + [(1.0, 1025)] * 1000) > 1000


async def test_a_steady_body_may_take_as_long_as_it_needs():
    pieces = [True] * 20 + [False]

    async def receive():
        await asyncio.sleep(0.03)
        return {"type": "http.request", "body": b"x" * 1024, "more_body": pieces.pop(0)}

    async def app(scope, receive, send):
        while (await receive())["more_body"]:
            pass

    await BodyLimit(app, max_body_bytes=10**6, idle_s=0.5)({"type": "http", "headers": []}, receive, None)
    assert pieces == []


async def test_a_body_without_end_is_refused_at_the_limit(url):
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n")
    piece = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
    reply = asyncio.create_task(reader.readline())
    async with asyncio.timeout(30):
        while not reply.done():
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), 30)
            await asyncio.sleep(0.001)
    assert reply.result().startswith(b"HTTP/1.1 413")
    writer.close()


@pytest.mark.parametrize(
    ("version", "field", "status"),
    [
        (b"1.0", b"Transfer-Encoding: chunked", b"400"),
        (b"1.1", b"Content-Type: application/json\r\nContent-Type: text/plain\r\nContent-Length: 2", b"415"),
    ],
)
async def test_what_two_readers_could_understand_differently_is_refused(url, engine, version, field, status):
    head = b"POST /v1/completions HTTP/%b\r\nHost: t\r\nConnection: close\r\n%b\r\n\r\n"
    reply = await raw(url, head % (version, field), b"{}")
    assert reply.startswith(b"HTTP/1.1 " + status)
    assert engine.requests == []
