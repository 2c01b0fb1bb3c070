"""The client of our own commands: whole replies, streams, and what is said when neither comes."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from server.edge.http import http_client
from server.edge.http.http_client import ExchangeFailed, Target, Timeouts, exchange, fetch, open_stream
from tests.server.conftest import eventually

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
Writing = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(write: Writing) -> AsyncIterator[Target]:
    """Answers each request with what `write` sends, then ends the connection."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            await write(writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with listener:
        yield Target.parse(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")


async def test_a_reply_that_breaks_off_is_told_and_not_taken_for_a_whole_one():
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")

    async with server(write) as target:
        with pytest.raises(ExchangeFailed, match="broke off"):
            await fetch(target, "GET", "/", silence_s=5.0)
        async with open_stream(target, "GET", "/", silence_s=5.0) as reply:
            with pytest.raises(ExchangeFailed, match="broke off"):
                [event async for event in reply.events()]


async def test_silence_is_an_end_too(engine, url):
    engine.stall_after = 0
    target = Target.parse(url)
    body = json.dumps({"prompt": "hi"}).encode()
    with pytest.raises(ExchangeFailed, match="silent"):
        await fetch(target, "POST", "/v1/completions", body, silence_s=0.2)
    await eventually(lambda: engine.num_running == 0)


async def test_a_slow_stream_is_not_silent():
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        for number in range(8):
            await asyncio.sleep(0.1)
            writer.write(b"data: %d\n\n" % number)

    async with server(write) as target, open_stream(target, "GET", "/", silence_s=0.5) as reply:
        assert [int(event) async for event in reply.events()] == list(range(8))


async def test_events_are_read_whole_whatever_their_text_holds(engine, url):
    engine.texts = ("a\u2028b", "\x85", "data: [DONE]", "\n\n", "é")
    target = Target.parse(f"{url}/v1/")
    body = json.dumps({"prompt": "hi", "max_tokens": 5, "stream": True}).encode()
    async with open_stream(target, "POST", "/v1/completions", body, silence_s=5.0) as reply:
        events = [event async for event in reply.events()]
    assert events.pop() == b"[DONE]"
    assert tuple(json.loads(event)["choices"][0]["text"] for event in events) == engine.texts


async def test_a_refused_stream_is_a_reply_without_events(url):
    body = json.dumps({"prompt": "hi", "max_tokens": -1, "stream": True}).encode()
    async with open_stream(Target.parse(url), "POST", "/v1/completions", body, silence_s=5.0) as reply:
        assert [event async for event in reply.events()] == []
        whole = await reply.whole()
    assert whole.status == 400
    assert json.loads(whole.body)["error"]["param"] == "max_tokens"


async def test_leaving_a_stream_stops_the_servers_work(engine, url):
    engine.stall_after = 1
    body = json.dumps({"prompt": "hi", "max_tokens": 9, "stream": True}).encode()
    async with open_stream(Target.parse(url), "POST", "/v1/completions", body, silence_s=5.0) as reply:
        async for _ in reply.events():
            break
        assert engine.num_running == 1
    await eventually(lambda: engine.num_running == 0)


async def test_a_slow_reader_holds_few_events_and_loses_none():
    """The server's writes stand still meanwhile, as its own limit on slow readers expects."""
    num, sent = 3000, 0
    padding = b"x" * 4096

    async def write(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(STREAM)
        for sent in range(1, num + 1):
            writer.write(b"data: %d %b\n\n" % (sent, padding))
            await writer.drain()

    async with server(write) as target, open_stream(target, "GET", "/", silence_s=0.3) as reply:
        events = reply.events()
        first = await anext(events)
        await asyncio.sleep(1.0)  # much longer than the silence that is allowed
        held = len(reply._waiting)
        assert sent < num
        numbers = [int(event.split()[0]) async for event in events]
    assert held < 2 * http_client._MAX_WAITING_EVENTS
    assert [int(first.split()[0]), *numbers] == list(range(1, num + 1))


async def test_no_whole_reply_in_time_is_a_failure_of_its_own():
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        while True:
            await asyncio.sleep(0.02)
            writer.write(b"data: 1\n\n")
            await writer.drain()

    async with server(write) as target:
        with pytest.raises(ExchangeFailed, match=r"within 0\.2 s") as caught:
            await exchange(target, target.request("GET", "/"), timeouts=Timeouts(whole_s=0.2))
    assert caught.value.kind == "timeout"
