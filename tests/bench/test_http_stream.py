"""The wire: replies in any pieces, targets from URLs."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.http_stream import EventParser, ExchangeFailed, ReplyParser, Target

EVENTS = b': hello\r\n\r\ndata: {"a":1}\r\n\r\ndata:x\ndata: y\n\nid: 3\n\ndata: [DONE]\n\n'
DATA = [b'{"a":1}', b"x\ny", b"[DONE]"]


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    framed = b"".join(f"{len(piece):x};ext=1\r\n".encode() + piece + b"\r\n" for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


@given(st.lists(st.integers(0, 400), max_size=12), st.integers(1, 60))
def test_a_stream_reads_the_same_in_any_pieces(cuts: list[int], chunk_size: int) -> None:
    wire, reply, events, data = chunked(EVENTS, chunk_size), ReplyParser(), EventParser(), []
    borders = [0, *sorted(min(cut, len(wire)) for cut in cuts), len(wire)]
    for start, end in pairwise(borders):
        data += events.feed(reply.feed(wire[start:end]))
    reply.end()
    assert (reply.status, data) == (200, DATA)


def test_a_body_of_known_length_ends_there() -> None:
    reply = ReplyParser()
    assert reply.feed(b"HTTP/1.1 404 Not Found\r\ncontent-LENGTH: 3\r\n\r\nabc") == b"abc"
    assert reply.is_complete


def test_a_body_of_unknown_length_ends_with_the_connection() -> None:
    reply = ReplyParser()
    assert reply.feed(b"HTTP/1.0 200 OK\r\n\r\nabc") == b"abc"
    assert not reply.is_complete
    reply.end()
    assert reply.is_complete


@pytest.mark.parametrize("wire", [b"", b"HTTP/1.1 200 OK\r\n", chunked(EVENTS, 9)[:-5]])
def test_a_reply_cut_off_is_a_failure(wire: bytes) -> None:
    reply = ReplyParser()
    reply.feed(wire)
    with pytest.raises(ExchangeFailed) as caught:
        reply.end()
    assert caught.value.kind == "connection closed"


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1\r\n\r\n",
        b"x" * 70_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_not_http_is_a_failure(wire: bytes) -> None:
    with pytest.raises(ExchangeFailed) as caught:
        ReplyParser().feed(wire)
    assert caught.value.kind == "not HTTP"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("https://host/llm/v1", "https://host:443/llm"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_a_target_is_the_server_with_or_without_v1(url: str, expected: str) -> None:
    assert Target.parse(url).url == expected


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port"])
def test_a_target_that_is_no_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected|Port"):
        Target.parse(url)


def test_the_key_is_sent_and_never_shown() -> None:
    target = Target.parse("http://127.0.0.1:1").with_key("secret")
    assert b"Authorization: Bearer secret\r\n" in target.request("GET", "/v1/models")
    assert "secret" not in repr(target) + target.url
