"""A client that leaves takes its request with it. Over real sockets: only they can be closed."""

import asyncio
import json
import socket
from urllib.parse import urlsplit

import h11
import pytest

from server.edge.http.strict_http import StrictConnection
from tests.server.conftest import eventually, impatient, serving

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
PROMPTS = {"prompt": ["a", "b", "c"], "max_tokens": 100, "n": 2}


async def post(url: str, path: str, body: dict) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request and do not wait for the answer."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", PROMPTS)])
async def test_hanging_up_before_the_first_token_aborts(url, engine, path, body, stream):
    engine.stall_after = 0
    _, writer = await post(url, path, {**body, "stream": stream})
    num_requests = len(body.get("prompt", "1"))
    await eventually(lambda: engine.num_running == num_requests)
    writer.close()
    await eventually(lambda: len(engine.aborted) == num_requests)
    assert engine.num_running == 0
    await eventually(lambda: count(engine, path, "499") == 1)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", PROMPTS)])
async def test_hanging_up_in_the_middle_of_a_stream_aborts(url, engine, path, body):
    engine.pause_s = 0.005
    reader, writer = await post(url, path, {**body, "stream": True})
    await reader.readuntil(b"data: ")
    writer.close()
    await eventually(lambda: engine.num_running == 0)
    assert len(engine.aborted) == len(body.get("prompt", "1"))
    await eventually(lambda: count(engine, path, "200") == 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_gives_up_the_place_in_the_line_for_the_trial_of_a_grammar(
    url, engine, monkeypatch, stream
):
    in_line: list[bool] = []

    async def wait_for_turn(*_: object, **__: object) -> None:
        in_line.append(True)
        try:
            await asyncio.Event().wait()
        finally:
            in_line.clear()

    monkeypatch.setattr(engine, "compile_grammar", wait_for_turn)
    body = {**CHAT, "structured_outputs": {"regex": "a"}, "stream": stream}
    _, writer = await post(url, "/v1/chat/completions", body)
    await eventually(lambda: bool(in_line))
    writer.close()
    await eventually(lambda: not in_line)
    await eventually(lambda: count(engine, "/v1/chat/completions", "499") == 1)
    assert engine.requests == []


async def test_hanging_up_in_the_middle_of_a_body_starts_nothing(url, engine):
    address = urlsplit(url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: 100\r\n\r\n{"prompt"')
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.close()
    await eventually(lambda: count(engine, "/v1/completions", "499") == 1)
    assert engine.requests == []


@pytest.mark.parametrize("place", ["receive_data", "next_event"])
async def test_a_connection_whose_bytes_find_no_memory_ends_with_a_reply(url, engine, monkeypatch, place):
    take_in, is_short = getattr(StrictConnection, place), [True]

    def without_memory(self: StrictConnection, *data: bytes) -> object:
        if is_short and (data or self.their_state is h11.SEND_BODY):
            is_short.clear()
            raise MemoryError
        return take_in(self, *data)

    monkeypatch.setattr(StrictConnection, place, without_memory)
    reader, writer = await post(url, "/v1/completions", {**PROMPTS, "max_tokens": 2})
    refusal = await reader.read()
    writer.close()
    assert refusal.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"low_memory"' in refusal
    assert engine.requests == []
    reader, writer = await post(url, "/v1/completions", {**PROMPTS, "max_tokens": 2})
    await reader.readuntil(b'"usage"')
    writer.close()


async def test_a_whole_reply_is_not_an_abort(url, engine):
    for stream in (False, True):
        reader, writer = await post(url, "/v1/completions", {**PROMPTS, "max_tokens": 2, "stream": stream})
        await reader.readuntil(b"\r\n0\r\n\r\n" if stream else b'"usage"')
        writer.close()
    await eventually(lambda: count(engine, "/v1/completions", "200") == 2)
    assert engine.aborted == []


async def test_a_storm_of_hang_ups_leaves_nothing_behind(url, engine):
    engine.stall_after = 1
    num_tasks = len(asyncio.all_tasks())
    connections = [await post(url, "/v1/completions", {**PROMPTS, "stream": i % 2 == 0}) for i in range(40)]
    await eventually(lambda: engine.num_running == 120)
    for _, writer in connections:
        writer.close()
    await eventually(lambda: engine.num_running == 0)
    await eventually(lambda: len(asyncio.all_tasks()) <= num_tasks)
    assert len(engine.aborted) == 120


def count(engine, route, status):
    labels = {"method": "POST", "route": route, "status": status, "limit": ""}
    return engine.metrics.registry.get_sample_value("tokenyard:http_requests_total", labels)


async def test_a_reader_that_stops_loses_its_request_although_its_socket_stays_open(engine):
    engine.texts = ("x" * 65536,)  # more than the buffers of both ends hold
    async with serving(impatient(engine, send_timeout_s=0.05)) as url:
        address = urlsplit(url)
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect((address.hostname, address.port))
        raw = json.dumps({"prompt": "x", "max_tokens": 127, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(raw)}\r\n\r\n"
        stalled.sendall(head.encode() + raw)
        await eventually(lambda: len(engine.aborted) == 1)
        stalled.close()
    assert engine.metrics.registry.get_sample_value("tokenyard:slow_client_aborts_total") == 1
