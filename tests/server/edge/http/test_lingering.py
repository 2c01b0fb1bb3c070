"""End of a connection: the last reply arrives, whatever the client says meanwhile."""

import asyncio
import socket
import time
from urllib.parse import urlsplit

import pytest

from tests.server.conftest import impatient, serving

LAST = b"GET /openapi.json HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"
MORE = b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n"


def connected(url: str) -> socket.socket:
    """With little room for what arrives, so that most of a reply has to wait on the server's side."""
    address = urlsplit(url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.settimeout(30)
    client.connect((address.hostname, address.port))
    return client


def read_to_the_end(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(1000), b""))


def talk_on(url: str) -> bytes:
    with connected(url) as client:
        client.sendall(LAST)
        for _ in range(5):
            time.sleep(0.02)
            client.sendall(MORE)
        return read_to_the_end(client)


def seconds_until_deaf(url: str, words: bytes) -> float:
    """From the end of what the server says until it does not listen any more either."""
    with connected(url) as client:
        client.sendall(words)
        read_to_the_end(client)
        began_s = time.monotonic()
        while time.monotonic() < began_s + 4:
            try:
                client.sendall(MORE)
            except ConnectionError:
                break
            time.sleep(0.02)
        return time.monotonic() - began_s


async def test_a_last_reply_arrives_whole_though_the_client_goes_on_talking(engine):
    async with serving(impatient(engine)) as url:
        reply = await asyncio.to_thread(talk_on, url)
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert f"content-length: {len(body)}".encode() in head
    assert len(body) > 10_000, "it did not fit into what the client had room for"


async def test_who_talks_on_for_long_is_cut_off(engine):
    async with serving(impatient(engine)) as url:
        assert await asyncio.to_thread(seconds_until_deaf, url, LAST) == pytest.approx(1.0, abs=0.7)


async def test_an_idle_connection_ends_at_once(engine):
    async with serving(impatient(engine, head_timeout_s=0.05)) as url:
        assert await asyncio.to_thread(seconds_until_deaf, url, b"") < 0.4
