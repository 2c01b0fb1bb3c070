"""The wire: replies in any pieces, targets from URLs."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.edge.http.http_client import ExchangeFailed, Target
from server.edge.http.reply_parser import EventParser, ReplyParser

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


def test_an_early_hint_is_not_the_reply() -> None:
    reply = ReplyParser()
    hint = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    assert reply.feed(hint + b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc") == b"abc"
    assert (reply.status, reply.headers) == (200, {"content-length": "3"})


def test_numbers_are_of_plain_digits_and_of_a_few() -> None:
    for status in (b"2\xb20", b"20", b"2000", b"9" * 5000):
        with pytest.raises(ExchangeFailed):
            ReplyParser().feed(b"HTTP/1.1 " + status + b" OK\r\n\r\n")
    for length in (b"\xb2", b"9" * 5000):  # no length at all
        reply = ReplyParser()
        assert reply.feed(b"HTTP/1.1 200 OK\r\ncontent-length: " + length + b"\r\n\r\nabc") == b"abc"
        assert not reply.is_complete


def test_only_a_success_is_a_stream_of_events() -> None:
    found = []
    for status in (b"200 OK", b"503 No"):
        reply = ReplyParser()
        reply.feed(b"HTTP/1.1 " + status + b"\r\ncontent-type: text/event-stream; charset=utf-8\r\n\r\n")
        found.append(reply.is_event_stream)
    assert found == [True, False]


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
        *(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + size
            for size in (b"zz\r\n", b"-5\r\n", b"1_0\r\n", b"\r\n", b"5;" + b"x" * 5000)
        ),
    ],
)
def test_what_is_not_http_is_a_failure(wire: bytes) -> None:
    with pytest.raises(ExchangeFailed) as caught:
        ReplyParser().feed(wire)
    assert caught.value.kind == "not HTTP"


@pytest.mark.parametrize("size", [b"fffffffff\r\n", b"11000000\r\nabc"])
def test_a_chunk_that_would_fill_the_memory_is_refused_by_its_first_line(size: bytes) -> None:
    with pytest.raises(ExchangeFailed) as caught:
        ReplyParser().feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + size)
    assert caught.value.kind == "reply too long"


def test_an_event_without_end_is_refused() -> None:
    events = EventParser()
    assert events.feed(b"x" * (1 << 24)) == []
    with pytest.raises(ExchangeFailed, match="an event is longer"):
        events.feed(b"x")


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
    target = Target.parse("http://127.0.0.1:1", api_key="secret")
    assert b"Authorization: Bearer secret\r\n" in target.request("GET", "/v1/models")
    assert "secret" not in repr(target) + target.url
