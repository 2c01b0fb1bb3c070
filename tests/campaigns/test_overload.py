"""Faults that the measurement of an overload reports, each planted in a round."""

import asyncio
from collections import Counter
from dataclasses import replace

import orjson
import pytest

from campaigns.overload import Cores, Crowd, Rounds, Seen
from server.edge.http.http_client import Target


def seen(*, ttft_s: float = 0.1, refused_s: float = 0.01, retry_after_s: int = 2) -> Seen:
    return Seen(
        ttft_s=[ttft_s] * 100,
        e2e_s=[ttft_s * 2] * 100,
        refused_s=[refused_s] * 100,
        retry_after_s=[retry_after_s] * 100,
        late_s=[0.0],
        took_s=10.0,
    )


GOOD = Rounds(
    alone=seen(ttft_s=0.01),
    full_queue=seen(),
    overload=seen(),
    factor=10.0,
    grown_bytes=0,
    cores_alone=Cores(client=0.1, api=0.19, engine=0.9),
    cores=Cores(client=0.1, api=0.2, engine=0.9),
)


def test_a_good_round_has_no_fault_and_says_what_it_measured() -> None:
    assert GOOD.faults() == []
    table = GOOD.table()
    assert "capacity 10.0 requests/s; offered 10 times that, 100/s" in table
    assert "429 after ms: p50 10.0, p99 10.0" in table
    assert "a refusal takes 1000 us of the API process" in table
    assert "FAULT" not in table
    assert orjson.loads(orjson.dumps(GOOD))["factor"] == 10


@pytest.mark.parametrize(
    ("overload", "fault"),
    [
        (seen(refused_s=0.06), "99th percentile of the 429s"),
        (seen(ttft_s=0.13), "1.30 times as late"),
        (replace(seen(), took_s=12.0), "leaves 0.83 of those"),
        (seen(retry_after_s=0), "Retry-After was from 0 to 0 s"),
        (seen(retry_after_s=61), "Retry-After"),
        (replace(seen(), others=Counter({"HTTP 500": 3})), "3 times HTTP 500"),
    ],
)
def test_what_should_not_happen_is_a_fault(overload: Seen, fault: str) -> None:
    (found,) = replace(GOOD, overload=overload).faults()
    assert fault in found


def test_refusals_that_take_the_machine_from_those_who_are_served_are_a_fault() -> None:
    (found,) = replace(GOOD, cores=Cores(client=0.1, api=0.3, engine=0.9)).faults()
    assert found == "refusals take 11.0% of one core"


@pytest.mark.parametrize("empty", ["alone", "full_queue", "overload"])
def test_a_round_in_which_nobody_is_served_is_a_fault_with_a_table(empty: str) -> None:
    rounds = replace(GOOD, **{empty: Seen(took_s=10.0, late_s=[0.0])})
    assert "FAULT: nobody was served" in rounds.table()


def test_the_turns_of_a_round_are_judged_together() -> None:
    both = seen(ttft_s=0.1)
    both.add(replace(seen(ttft_s=0.5), others=Counter({"HTTP 500": 1})))
    assert both.ttft_s == [0.1] * 100 + [0.5] * 100
    assert both.took_s == 20.0
    assert replace(GOOD, overload=both).faults() == [
        "1 times HTTP 500",
        "the crowd outside makes the first token 5.00 times as late",
    ]
    for name in ("e2e_s", "refused_s", "retry_after_s", "late_s"):
        assert len(getattr(both, name)) == 2 * len(getattr(seen(), name)), name


async def test_who_is_refused_is_told_from_who_is_served() -> None:
    refusal = b"HTTP/1.1 429 X\r\nretry-after: 7\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
    stream = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\ndata: {}\n\n"
    answers = [refusal, stream, b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n"]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0) if answers else refusal)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        crowd = Crowd(Target.parse(f"http://127.0.0.1:{port}"), output_len=4, seed=0)
        round_seen = await crowd.open_loop(200.0, 0.1)
    assert (len(round_seen.ttft_s), round_seen.others) == (1, Counter({"HTTP 500": 1}))
    assert set(round_seen.retry_after_s) == {7}
    assert len(round_seen.refused_s) == len(round_seen.late_s) - 2
