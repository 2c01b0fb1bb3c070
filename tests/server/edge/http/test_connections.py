"""Limits of a connection before and after its requests. Over real sockets, with little patience."""

import asyncio
import contextlib
import dataclasses
import socket
import struct
from urllib.parse import urlsplit

import orjson
import pytest

from engine.types import EngineState
from server.edge.http.connections import ClientConnection
from server.edge.http.endpoint import ErrorReplyBody
from server.edge.http.listening import listen, num_connections_allowed
from server.edge.sockets.places import RESERVED_PLACES
from server.reply.generate.sse import KEEP_ALIVE, EventStream
from tests.server.conftest import eventually, impatient, serving
from tests.server.fake_engine import READY

HEALTH = b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: t\r\n\r\n"


async def connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(url)
    return await asyncio.open_connection(address.hostname, address.port)


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """Up to the end, which is a reset if something was still on its way to who hung up."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := await reader.read(1 << 16):
            answer += piece
    return answer


async def said(url: str, *words: bytes, pause_s: float = 0.0) -> bytes:
    """Reply of the server until it hangs up, which it must do within a second."""
    reader, writer = await connected(url)
    answer = asyncio.create_task(all_of(reader))
    try:
        for word in words:
            if answer.done():  # to go on would turn its end into a reset
                break
            writer.write(word)
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(30):
            return await answer
    finally:
        writer.close()


def parsed(reply: bytes) -> tuple[int, dict[str, str], str]:
    """Status, headers and error code, after checking OpenAI's shape."""
    head, _, body = reply.partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    headers = dict(field.split(": ", 1) for field in fields)
    assert int(headers["content-length"]) == len(body)
    error = ErrorReplyBody.model_validate(orjson.loads(body)).error
    return int(status.split()[1]), headers, error.code


async def test_a_silent_connection_is_closed(engine):
    async with serving(impatient(engine, head_timeout_s=0.05)) as url:
        assert await said(url) == b""


async def test_half_a_head_is_answered_with_408(engine):
    async with serving(impatient(engine, head_timeout_s=0.05)) as url:
        status, headers, code = parsed(await said(url, HEALTH[:-2]))
    assert (status, code) == (408, "request_timeout")
    assert headers["connection"] == "close"
    assert headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("before", [b"", MODELS])
async def test_a_trickle_does_not_gain_time(engine, before):
    async with serving(impatient(engine, head_timeout_s=0.15)) as url:
        trickle = [b"x-%d: y\r\n" % place for place in range(1000)]
        async with asyncio.timeout(30):
            reply = await said(url, before, HEALTH[:-2], *trickle, pause_s=0.04)
    assert b"HTTP/1.1 408" in reply


async def test_a_body_that_trickles_after_its_refusal_does_not_hold_the_connection(engine):
    head = b"POST /nothing HTTP/1.1\r\nHost: t\r\nContent-Length: 1000\r\n\r\n"
    async with serving(impatient(engine, head_timeout_s=0.1)) as url:
        async with asyncio.timeout(30):
            reply = await said(url, head, *[b"x"] * 900, pause_s=0.04)
    assert reply.startswith(b"HTTP/1.1 404")


async def test_a_kept_connection_and_a_slow_reply_outlive_the_time_for_a_head(engine):
    engine.pause_s = 0.1
    body = b'{"prompt": "x", "max_tokens": 2}'
    post = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    async with serving(impatient(engine, head_timeout_s=0.05)) as url:
        reader, writer = await connected(url)
        for request in (post, HEALTH):
            writer.write(request)
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            await reader.readuntil(b'"degraded":[]}' if request is HEALTH else b'"cached_tokens":4}}}')
            await asyncio.sleep(0.1)
        writer.close()


def unchunked(body: bytes) -> bytes:
    """Body without its chunks, each of the length that it claims; the last is empty."""
    pieces = []
    while body != b"0\r\n\r\n":
        size, _, rest = body.partition(b"\r\n")
        piece, end, body = rest[: int(size, 16)], rest[int(size, 16) :][:2], rest[int(size, 16) + 2 :]
        assert end == b"\r\n"
        pieces.append(piece)
    return b"".join(pieces)


async def test_a_stream_is_the_same_with_and_without_chunks(engine):
    engine.texts = ("Für", " ", "\n\n", "😀" * 2000, "")
    engine.pause_s = 0.002  # so that each piece is written by itself
    body = b'{"prompt": "x", "max_tokens": 20, "stream": true}'
    heads = [
        b"POST /v1/completions HTTP/%b\r\nHost: t\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        % (version, len(body))
        for version in (b"1.1", b"1.0")
    ]
    async with serving(impatient(engine)) as url:
        replies = [await said(url, head + body) for head in heads]
    (chunked_head, chunked), (plain_head, plain) = (reply.split(b"\r\n\r\n", 1) for reply in replies)
    assert b"transfer-encoding: chunked" in chunked_head.lower()
    assert b"transfer-encoding" not in plain_head.lower()
    texts = [
        [orjson.loads(event[6:])["choices"] for event in stream.split(b"\n\n") if b"choices" in event]
        for stream in (unchunked(chunked), plain)
    ]
    assert len(texts[0]) > 10
    assert texts[0] == texts[1]
    assert unchunked(chunked).endswith(b"\n\ndata: [DONE]\n\n")


async def read_by_fits_and_starts(url: str, request: bytes) -> bytes:
    """Up to the end of the connection, with so small a window that the server's socket is full in between."""
    address = urlsplit(url)
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, (address.hostname, address.port))
        await loop.sock_sendall(client, request)
        answer, num_until_pause = b"", 0
        while piece := await loop.sock_recv(client, 1 << 16):
            answer += piece
            num_until_pause -= len(piece)
            if num_until_pause < 0:
                await asyncio.sleep(0.06)
                num_until_pause = 1 << 18
    return answer


async def test_a_stream_whose_socket_is_full_now_and_then_is_whole_and_in_order(engine, monkeypatch):
    ways = []
    sent_at_once = EventStream._sent_at_once

    def watched(stream: EventStream, body: bytes) -> bool:
        ways.append(sent_at_once(stream, body))
        return ways[-1]

    def with_little_room(connection: ClientConnection, transport: asyncio.Transport) -> None:
        # Else the kernel would take over the whole stream.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection_made(connection, transport)

    connection_made = ClientConnection.connection_made
    monkeypatch.setattr(ClientConnection, "connection_made", with_little_room)
    monkeypatch.setattr(EventStream, "_sent_at_once", watched)
    engine.texts = tuple(f"{place}" + "." * (40_000 if place % 20 < 10 else 3) for place in range(100))
    body = b'{"prompt": "x", "max_tokens": 100, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    engine.pause_s = 0.004
    async with serving(impatient(engine, keep_alive_s=0.002)) as url, asyncio.timeout(20):
        reply = await read_by_fits_and_starts(url, head % len(body) + body)
    *events, done, rest = unchunked(reply.split(b"\r\n\r\n", 1)[1]).split(b"\n\n")
    texts = [orjson.loads(event[6:])["choices"][0]["text"] for event in events if event[:1] != b":"]
    assert (done, rest) == (b"data: [DONE]", b"")
    assert "".join(texts) == "".join(engine.texts)
    assert min(ways.count(True), ways.count(False)) > 5, "both ways were taken"
    assert KEEP_ALIVE.strip() in events, "something came between them"


@pytest.mark.parametrize(
    "words",
    [
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /v1/models\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/2.0\r\nHost: t\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_refused_in_openais_shape(url, words):
    status, headers, code = parsed(await said(url, words))
    assert (status, code) == (400, "invalid_request")
    assert headers["content-type"] == "application/json"
    assert headers["x-should-retry"] == "false"


@pytest.mark.parametrize("before", [b"", MODELS])
@pytest.mark.parametrize(
    "words",
    [
        HEALTH.replace(b"\r\n", b"\n"),
        HEALTH[:-2] + b"\n",
        HEALTH[:-2] + b"x-a: b\n\r\n",
        HEALTH[:-2] + b"x-a: b\r\n c\r\n\r\n",
        HEALTH[:-2] + b"Transfer-Encoding:\r\n\tchunked\r\n\r\n",
    ],
)
async def test_lines_that_a_proxy_may_read_otherwise_are_refused(url, before, words):
    """Source: RFC 9112, sections 2.2 and 5.2."""
    reply = await said(url, before, words)
    status, headers, code = parsed(reply[reply.rindex(b"HTTP/1.1 400") :])
    assert (status, code) == (400, "invalid_request")
    assert headers["connection"] == "close"
    assert reply.count(b"HTTP/1.1 200") == bool(before)


@pytest.mark.parametrize("before", [b"", MODELS])
@pytest.mark.parametrize(
    "words",
    [
        b"GET /" + b"x" * 70_000,
        HEALTH[:-2] + b"x-a: " + b"y" * 70_000,
        HEALTH[:-2] + b"x: y\r\n" * 12_000,
        HEALTH[:-2] + b"x-a: " + b"y" * 65_530 + b"\r\n\r\n",
    ],
)
async def test_a_giant_head_is_refused(url, before, words):
    reply = await said(url, before, words)
    status, headers, code = parsed(reply[reply.rindex(b"HTTP/1.1") :])
    assert (status, code) == (431, "head_too_large")
    assert headers["connection"] == "close"


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nothing"])
async def test_a_body_that_stops_being_http_gets_one_reply(url, engine, caplog, path):
    head = b"POST %b HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n" % path
    assert parsed(await said(url, head + b"not a size\r\n"))[2] == "invalid_request"
    assert engine.requests == []
    assert not [record for record in caplog.records if record.exc_info]


async def test_beyond_the_limit_only_probes_are_answered_and_once(engine):
    async with serving(impatient(engine, max_connections=1)) as url:
        _, first = await connected(url)
        await asyncio.sleep(0.01)
        status, headers, code = parsed(await said(url, MODELS))
        assert (status, code) == (503, "too_many_connections")
        assert headers["retry-after"] == "1"
        assert headers["connection"] == "close"
        reply = await said(url, HEALTH)
        assert reply.startswith(b"HTTP/1.1 200")
        assert b"\r\nconnection: close\r\n" in reply
        first.close()
        await asyncio.sleep(0.01)
        reader, writer = await connected(url)
        writer.write(MODELS)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()


@pytest.mark.parametrize("path", [b"/v1/models", b"/nowhere", b"/health/ready"])
async def test_while_the_server_leaves_every_reply_ends_its_connection(engine, path):
    request = b"GET %b HTTP/1.1\r\nHost: t\r\n\r\n" % path
    async with serving(impatient(engine)) as url:
        reader, writer = await connected(url)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"\r\nconnection:" not in head
        engine.state = dataclasses.replace(READY, state=EngineState.DRAINING)
        writer.write(request)
        # Until the server hangs up. Through a load balancer that pins connections, who asks again is led on.
        async with asyncio.timeout(30):
            rest = await reader.read()
        assert rest.count(b"\r\nconnection: close\r\n") == 1
        writer.close()


def num_refused(engine) -> float:
    return engine.metrics.registry.get_sample_value("tokenyard:refused_connections_total")


async def test_a_crowd_of_silent_connections_gives_way_to_one_that_asks(engine, caplog):
    async with serving(impatient(engine, max_connections=1)) as url:
        silent = [await connected(url) for _ in range(2 * RESERVED_PLACES)]
        assert (await said(url, HEALTH)).startswith(b"HTTP/1.1 200")
        assert num_refused(engine) >= RESERVED_PLACES
        for _, writer in silent:
            writer.close()
    assert len(caplog.records) <= 1


async def test_beyond_the_reserve_requests_under_way_keep_their_places(engine, caplog):
    body = b'{"prompt": "x", "max_tokens": 2}'
    post = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with serving(impatient(engine, max_connections=1 + RESERVED_PLACES)) as url:
        asking = [await connected(url) for _ in range(1 + RESERVED_PLACES)]
        for _, writer in asking:
            writer.write(post)
        await asyncio.sleep(0.2)
        for _ in range(RESERVED_PLACES):
            asking.append(await connected(url))
            asking[-1][1].write(b"GET /health HTTP/1.1\r\n")
        # The newcomers gave way to each other, not those.
        assert (await said(url, HEALTH)).startswith(b"HTTP/1.1 200")
        for _, writer in asking[: 1 + RESERVED_PLACES]:
            writer.write(body)
        for reader, _ in asking[: 1 + RESERVED_PLACES]:
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        for _, writer in asking:
            writer.close()


async def test_when_all_are_busy_a_newcomer_is_refused_with_a_reason_and_holds_no_descriptor(
    engine, monkeypatch
):
    monkeypatch.setattr("server.edge.sockets.places.RESERVED_PLACES", 0)
    body = b'{"prompt": "x", "max_tokens": 2}'
    post = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with serving(impatient(engine, max_connections=1)) as url:
        reader, writer = await connected(url)
        writer.write(post)
        await asyncio.sleep(0.1)
        assert parsed(await said(url))[2] == "too_many_connections"
        assert num_refused(engine) == 1
        writer.write(body)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()


async def test_the_reserve_is_not_held_by_the_silent(engine, monkeypatch):
    monkeypatch.setattr("server.edge.http.connections.RESERVED_HEAD_TIMEOUT_S", 0.05)
    async with serving(impatient(engine, max_connections=1)) as url:
        _, patient = await connected(url)
        await asyncio.sleep(0.01)
        assert await said(url) == b""
        patient.close()


async def test_a_reader_that_stopped_is_cut_off_although_its_bytes_are_unsent(engine, caplog):
    engine.texts = ("x" * 65536,)
    body = b'{"prompt": "x", "max_tokens": 127, "stream": true}'
    post = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    async with serving(impatient(engine, send_timeout_s=0.05)) as url:
        address = urlsplit(url)
        with socket.socket() as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.connect((address.hostname, address.port))
            stalled.sendall(post)
            await eventually(lambda: len(engine.aborted) == 1)
            await eventually(lambda: _has_been_reset(stalled))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def _has_been_reset(client: socket.socket) -> bool:
    """Asked of the kernel, without reading: TCP_INFO begins with the state; 7 is CLOSE."""
    return struct.unpack("B", client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1))[0] == 7


def test_accepted_sockets_inherit_the_end_of_peers_that_do_not_read() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


@pytest.mark.parametrize(("soft", "allowed"), [(300, 108), (100, 1), (1_000_000, 4096), (-1, 4096)])
def test_connections_leave_descriptors_for_the_rest(monkeypatch, soft, allowed) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (soft, soft))
    assert num_connections_allowed() == allowed


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ((1024, 524_288), [(4288, 524_288)]),
        ((1024, 2048), [(2048, 2048)]),
        ((1024, -1), [(4288, -1)]),
        ((5000, 524_288), []),
        ((-1, -1), []),
    ],
)
def test_listening_raises_the_soft_limit_as_far_as_needed(monkeypatch, limits, raised) -> None:
    asked = []
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)
    monkeypatch.setattr("resource.setrlimit", lambda _, wanted: asked.append(wanted))
    listen("127.0.0.1", 0).close()
    assert asked == raised


async def test_a_large_body_is_read_in_pieces_that_are_not_mapped_each(url, monkeypatch):
    sizes, take = [], ClientConnection.data_received
    monkeypatch.setattr(
        ClientConnection, "data_received", lambda self, data: (sizes.append(len(data)), take(self, data))[1]
    )
    head = b"POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nConnection: close\r\n"
    answer = await said(url, head + b"Content-Length: 1000000\r\n\r\n" + b"x" * 1_000_000)
    assert answer.startswith(b"HTTP/1.1 413")
    assert max(sizes) <= 64 * 1024
