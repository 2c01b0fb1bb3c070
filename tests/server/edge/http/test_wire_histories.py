"""Connections on which anything lawful happens in any order, and then something that is not.

Each request has the answer that it would have by itself, so the whole answer of a connection is known
before: however the bytes are cut, bodies framed and requests pipelined, and whatever went wrong before on
the same connection. Only the status lines are compared.
"""

import asyncio
import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.conftest import impatient, serving
from tests.server.fake_engine import FakeEngine

PAUSE_S = 0.002
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [A-Z][^\r\n]*\r\n(?:[\w-]+:|\r\n)")
BODIES = {
    200: (b'{"prompt": "ab", "max_tokens": 2}', b'{"prompt": "ab", "max_tokens": 3, "stream": true}'),
    400: (b'{"prompt": ', b'{"prompt": "ab", "max_tokens": -1}', b'{"n": NaN}', b"\xff\xfe", b""),
}
NOT_HTTP = (
    b"GET /health HTTP/1.1\r\n\r\n",  # no host
    b"GET /health HTTP/1.1\r\nHost: t\r\nHost: u\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost : t\r\n\r\n",
    b"GET  /health HTTP/1.1\r\nHost: t\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /nothing HTTP/1.1\r\nHost: t\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\xfc\r\n\r\n",
)


@dataclass(frozen=True)
class Wire:
    """One request as bytes, and the status that it must get."""

    data: bytes
    status: int
    is_last: bool = False
    """The server hangs up after it."""


def framed(draw, body: bytes) -> tuple[bytes, bytes]:
    """A header and the bytes that follow the head."""
    if draw(st.booleans()):
        return b"Content-Length: %d\r\n" % len(body), body
    chunks, rest = [], body
    while rest:
        size = draw(st.integers(1, len(rest)))
        number = draw(st.sampled_from((b"%x", b"%X", b"000%x"))) % size
        extension = draw(st.sampled_from((b"", b";a=b", b';name="va;lue"')))
        chunks.append(number + extension + b"\r\n" + rest[:size] + b"\r\n")
        rest = rest[size:]
    trailer = draw(st.sampled_from((b"", b"X-Sum: 1\r\n")))
    return b"Transfer-Encoding: chunked\r\n", b"".join(chunks) + b"0\r\n" + trailer + b"\r\n"


@st.composite
def requests(draw) -> Wire:
    is_old = draw(st.integers(0, 7)) == 0
    is_last = is_old or draw(st.integers(0, 7)) == 0
    version = b"1.0" if is_old else b"1.1"
    hang_up = b"Connection: close\r\n" if is_last and not is_old else b""
    target, status, body = draw(
        st.sampled_from(
            [
                (b"GET /health", 200, None),
                (b"PUT /health", 405, b"{}"),
                (b"GET /nothing", 404, None),
                (b"DELETE /v1/completions", 405, b"x"),
                (b"POST /nothing", 404, b"{}"),
                *((b"POST /v1/completions", status, body) for status in BODIES for body in BODIES[status]),
            ]
        )
    )
    header, rest = (b"", b"") if body is None else framed(draw, body)
    if is_old and header.startswith(b"Transfer"):  # HTTP/1.0 knows no chunks
        header, rest = b"Content-Length: %d\r\n" % len(body), body
    head = target + b" HTTP/%b\r\nHost: t\r\n" % version + header + hang_up + b"\r\n"
    return Wire(head + rest, status, is_last)


@st.composite
def histories(draw) -> tuple[list[Wire], list[int]]:
    """Requests, and the places where their bytes are cut."""
    wires = draw(st.lists(requests(), min_size=1, max_size=5))
    if draw(st.integers(0, 3)) == 0:
        wires.append(Wire(draw(st.sampled_from(NOT_HTTP)), 400, is_last=True))
    num_bytes = sum(len(wire.data) for wire in wires)
    cuts = draw(st.lists(st.integers(1, num_bytes), max_size=6))
    return wires, sorted(cuts)


def expected(wires: list[Wire]) -> list[int]:
    """Up to the first request after which the server hangs up."""
    statuses = []
    for wire in wires:
        statuses.append(wire.status)
        if wire.is_last:
            break
    return statuses


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    """Served by an event loop of its own thread, so that clients may be simple."""
    ready, over, found = threading.Event(), threading.Event(), []

    async def serve() -> None:
        async with serving(impatient(engine, head_timeout_s=1.0)) as base_url:
            found.append(base_url)
            ready.set()
            while not over.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    yield found[0]
    over.set()
    thread.join(10)


def talk(url: str, pieces: list[bytes], num_answers: int) -> bytes:
    """Replies until the server hangs up: by itself, or after so many answers at our end of file.

    Not before: who closes one half of a connection is taken for gone.
    """
    address = urlsplit(url)
    answer = b""
    with socket.create_connection((address.hostname, address.port), timeout=30) as client:
        with contextlib.suppress(ConnectionError):  # it may have hung up already, as it should
            for piece in pieces:
                client.sendall(piece)
                time.sleep(PAUSE_S)
        with contextlib.suppress(ConnectionError):
            while got := client.recv(65536):
                answer += got
                if len(STATUS.findall(answer)) == num_answers and has_ended(answer):
                    with contextlib.suppress(OSError):  # it was quicker
                        client.shutdown(socket.SHUT_WR)
    return answer


def has_ended(answer: bytes) -> bool:
    """Whether the last reply in it is whole, as far as its length was told."""
    head, _, body = answer[answer.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    if length is not None:
        return len(body) >= int(length[1])
    return b"chunked" not in head or body.endswith(b"0\r\n\r\n")


def reset(url: str, pieces: list[bytes]) -> None:
    """Leave without a farewell, with whatever is under way."""
    address = urlsplit(url)
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection((address.hostname, address.port), timeout=30) as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for piece in pieces:
            client.sendall(piece)
            time.sleep(PAUSE_S)


def pieces_of(wires: list[Wire], cuts: list[int]) -> list[bytes]:
    data = b"".join(wire.data for wire in wires)
    return [data[start:end] for start, end in pairwise([0, *cuts, len(data)]) if start < end]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(histories())
def test_every_request_gets_its_own_answer_however_it_is_cut_and_framed(url, engine, history) -> None:
    wires, cuts = history
    statuses = expected(wires)
    answer = talk(url, pieces_of(wires, cuts), len(statuses))
    assert [int(status) for status in STATUS.findall(answer)] == statuses, answer


@pytest.mark.parametrize("words", NOT_HTTP)
def test_what_is_not_http_gets_400_and_an_end_after_the_answers_before_it(url, words) -> None:
    before = b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n"
    answer = talk(url, [before, words + before], num_answers=10)  # waits for the server to hang up
    assert [int(status) for status in STATUS.findall(answer)] == [200, 400], answer


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(histories(), st.integers(0, 6))
def test_a_reset_anywhere_leaves_nothing(url, engine, history, num_sent) -> None:
    reset(url, pieces_of(*history)[:num_sent])
    ends_s = time.monotonic() + 3
    while engine.num_running and time.monotonic() < ends_s:
        time.sleep(0.002)
    assert engine.num_running == 0
    assert httpx.get(f"{url}/health").status_code == 200
