"""Right ends of an act, by ends that are planted."""

import random
from dataclasses import replace

import orjson
import pytest

from campaigns.soak.acts import Act, Acts, Ends, Events, _judge
from server.edge.http.http_client import Reply

ACT = Act(name="act", path="/v1/completions", body=b"{}", num_choices=2)
JSON = {"content-type": "application/json"}
STREAM = {"content-type": "text/event-stream; charset=utf-8"}


def error(code: str, status: int) -> Reply:
    return Reply(status=status, body=orjson.dumps({"error": {"code": code}}), headers=JSON)


def whole(*texts: str) -> Reply:
    return Reply(status=200, body=orjson.dumps({"choices": [{"text": text} for text in texts]}), headers=JSON)


def piece(index: int, finish_reason: str | None = None) -> bytes:
    return orjson.dumps({"choices": [{"index": index, "text": "a", "finish_reason": finish_reason}]})


BOTH = [piece(0), piece(1, "stop"), piece(0, "length"), b"[DONE]"]


def judged(act: Act, reply: Reply, *events: bytes, is_engine_gone: bool = False) -> Ends:
    ends, seen = Ends(is_engine_gone=is_engine_gone), Events()
    for event in events:
        seen.take(event, 0.0)
    _judge(act, reply, seen, ends)
    return ends


@pytest.mark.parametrize(
    "ends",
    [
        judged(ACT, whole("a", "b")),
        judged(replace(ACT, choices=b'[{"text":"a"},{"text":"b"}]'), whole("a", "b")),
        judged(ACT, error("server_overloaded", 429)),
        judged(ACT, Reply(status=200, body=b"", headers=STREAM), *BOTH),
        judged(ACT, error("engine_restarted", 500), is_engine_gone=True),
        judged(replace(ACT, must_fail=True, codes=frozenset({"invalid_json"})), error("invalid_json", 400)),
    ],
)
def test_these_are_right(ends: Ends) -> None:
    assert not ends.faults
    assert ends.num_acts == 1


@pytest.mark.parametrize(
    "ends",
    [
        judged(ACT, whole("a")),
        judged(replace(ACT, choices=b'[{"text":"a"},{"text":"b"}]'), whole("a", "c")),
        judged(ACT, error("internal_error", 500)),
        judged(ACT, error("engine_restarted", 500)),
        judged(ACT, Reply(status=502, body=b"bad gateway", headers={})),
        judged(ACT, Reply(status=200, body=b"", headers=STREAM), *BOTH[:-1]),
        judged(ACT, Reply(status=200, body=b"", headers=STREAM), *BOTH, b"[DONE]"),
        judged(ACT, Reply(status=200, body=b"", headers=STREAM), BOTH[1], *BOTH),
        judged(ACT, Reply(status=200, body=b"", headers=STREAM), *BOTH[:2], b"[DONE]"),
        judged(replace(ACT, must_fail=True), whole("a", "b")),
    ],
)
def test_these_are_faults(ends: Ends) -> None:
    assert sum(ends.faults.values()) == 1
    assert ends.num_acts == 1
    assert ends.examples


def test_every_kind_of_act_is_drawn_and_the_same_for_the_same_seed() -> None:
    known = [(b"{}", b"[]")]
    drawn = [Acts(random.Random(3), known, max_model_len=256) for _ in range(2)]
    first, second = ([acts.draw() for _ in range(400)] for acts in drawn)
    assert first == second
    assert len({act.name for act in first}) == 16
