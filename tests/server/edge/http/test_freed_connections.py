"""Connections that have ended are freed at once, with their requests: no collection of cycles is needed."""

import asyncio
import gc
import socket
import ssl
import struct
import weakref
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from engine.options.edge_config import TlsFiles
from server.app import build_app
from server.edge.access.credentials import LiveTls
from server.edge.http.connections import ClientConnection
from server.edge.sockets.early_refusal import FirstLook
from server.edge.sockets.lingering_close import LingeringTransport
from server.edge.sockets.places import Place
from tests.server.certificates import needs_openssl, self_signed
from tests.server.conftest import Settings, eventually, impatient, serving
from tests.server.edge.http.test_connections import HEALTH, MODELS, all_of, connected, said
from tests.server.edge.http.test_disconnects import CHAT, PROMPTS, post
from tests.server.edge.http.test_half_closed import answer_to, asking

_KINDS = (ClientConnection, LingeringTransport, RequestResponseCycle, Place, FirstLook)
Held = Callable[[], int]


@pytest.fixture(autouse=True, scope="module")
def _others_out_of_sight() -> Iterator[None]:
    """Leave out what other modules have made: looking through all of it takes half a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def held() -> Iterator[Held]:
    """Number of connections, and of what belongs to one, that a test has left in memory so far."""
    gc.collect()
    num_before = _num_held()
    gc.disable()
    yield lambda: _num_held() - num_before
    gc.enable()


def _num_held() -> int:
    # Not isinstance, which asks a proxy for the class of what it stands for: that may be gone.
    return sum(issubclass(type(each), _KINDS) for each in gc.get_objects())


async def test_one_that_was_silent(engine, held):
    async with serving(impatient(engine, head_timeout_s=0.05)) as url:
        assert await said(url) == b""
        await eventually(lambda: held() == 0)


@pytest.mark.parametrize("words", [HEALTH, HEALTH + MODELS, b"no HTTP\r\n\r\n"])
async def test_one_that_was_answered(url, held, words):
    reader, writer = await connected(url)
    writer.write(words)
    assert b"HTTP/1.1 " in await reader.read(1 << 16)
    writer.close()
    await eventually(lambda: held() == 0)


@needs_openssl
async def test_one_of_tls_that_was_answered(engine, held, tmp_path):
    pair = self_signed(tmp_path, "server")
    context = LiveTls(TlsFiles(cert=str(pair.cert), key=str(pair.key), client_ca=None)).context
    async with serving(build_app(engine, Settings()), context=context) as url:
        address = urlsplit(url)
        trusting = ssl.create_default_context(cafile=str(pair.cert))
        reader, writer = await asyncio.open_connection(address.hostname, address.port, ssl=trusting)
        writer.write(HEALTH)
        assert b"HTTP/1.1 200" in await reader.read(1 << 16)
        writer.close()
        await eventually(lambda: held() == 0)


async def test_a_kept_one_that_its_client_reset(url, held):
    reader, writer = await connected(url)
    writer.write(HEALTH)
    assert b"HTTP/1.1 200" in await reader.read(1 << 16)
    at_once = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    writer.transport.abort()
    await eventually(lambda: held() == 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_one_whose_client_left_in_the_middle(url, engine, held, path, stream):
    engine.stall_after = 1
    _, writer = await post(url, path, {**(PROMPTS if path == "/v1/completions" else CHAT), "stream": stream})
    await eventually(lambda: engine.num_running > 0)
    writer.close()
    await eventually(lambda: engine.num_running == 0)
    await eventually(lambda: held() == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_whose_client_closed_its_half(url, engine, held, stream):
    engine.pause_s = 0.01
    words = asking("/v1/chat/completions", {**CHAT, "max_tokens": 3, "stream": stream}, "1.1")
    assert b"HTTP/1.1 200" in await answer_to(url, words)
    await eventually(lambda: held() == 0)


async def test_one_whose_request_was_wrong(url, held):
    reader, writer = await post(url, "/v1/completions", {**PROMPTS, "max_tokens": -1})
    assert b"HTTP/1.1 400" in await reader.read(1 << 16)
    writer.close()
    await all_of(reader)
    await eventually(lambda: held() == 0)


async def test_the_transport_of_asyncio_goes_too(url, monkeypatch):
    transports: list[weakref.ref] = []
    connection_made = ClientConnection.connection_made

    def note(connection: ClientConnection, transport: asyncio.Transport) -> None:
        transports.append(weakref.ref(transport))
        connection_made(connection, transport)

    monkeypatch.setattr(ClientConnection, "connection_made", note)
    _, writer = await connected(url)
    await eventually(lambda: len(transports) == 1)
    writer.close()
    await eventually(lambda: transports[0]() is None)
