"""Faults that the reader of streams must notice, each planted in a stream."""

import orjson
import pytest

from campaigns.soak.streams import StreamText


def chunk(text: str, num_tokens: int, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return orjson.dumps({"choices": [choice], "usage": {"completion_tokens": num_tokens}})


GOOD = [chunk("a", 1), chunk("b", 2), chunk("c", 3, "length"), orjson.dumps({"choices": []}), b"[DONE]"]
ERROR = orjson.dumps({"error": {"code": "engine_restarted"}})


def read(*events: bytes) -> StreamText:
    seen = StreamText()
    for event in events:
        seen.take(event, 0.0)
    return seen


def test_a_whole_stream_is_without_fault() -> None:
    seen = read(*GOOD)
    assert seen.check() == []
    assert (seen.text, seen.num_tokens, seen.finish_reason) == ("abc", 3, "length")


def test_an_error_is_an_end_too() -> None:
    seen = read(GOOD[0], ERROR, b"[DONE]")
    assert seen.check() == []
    assert seen.error_code == "engine_restarted"


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        (GOOD[:-1], "no end"),
        ([*GOOD[:2], b"[DONE]"], "neither a finish reason nor an error"),
        ([*GOOD, b"[DONE]"], "an event after the end"),
        ([*GOOD, GOOD[0]], "an event after the end"),
        ([GOOD[0], GOOD[0], *GOOD[1:]], "token 1 after token 1"),
        ([GOOD[1], GOOD[0], *GOOD[2:]], "token 1 after token 2"),
        ([*GOOD[:3], chunk("d", 4), *GOOD[3:]], "a piece after the finish reason"),
        ([*GOOD[:3], ERROR, b"[DONE]"], "both ends"),
    ],
)
def test_what_is_lost_repeated_or_mixed_up_is_a_fault(events: list[bytes], fault: str) -> None:
    assert fault in read(*events).check()
