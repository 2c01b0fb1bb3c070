"""Batches of several keys: each has its turn, and no refusal is answered by asking at once again."""

import asyncio
import json
import time
from itertools import pairwise

import orjson
import pytest

from server.api.batches import places
from server.api.batches.access import StateAccess
from server.api.batches.lines import answer_line
from server.api.batches.places import FairPlaces
from server.api.batches.queue import BatchQueue
from server.edge.http.http_client import Reply
from tests.server.api.batches.test_faults_of_batches import (
    MANY,
    Working,
    answers,
    begin,
    desk,
    line,
    short_pauses,
    until_ended,
)

__all__ = ["desk", "short_pauses"]
REFUSED = Reply(status=429, headers={"retry-after-ms": "1"}, body=b"{}")
LATE = Reply(status=504, headers={"x-should-retry": "false"}, body=b"{}")


class Turns:
    """A client whose replies are made up, with the lines that it was sent."""

    def __init__(self, reply_to) -> None:
        self._reply_to = reply_to
        self.sent: list[bytes] = []

    async def post(self, path: str, body: bytes) -> Reply:
        self.sent.append(body)
        await asyncio.sleep(0)
        return self._reply_to(body)


def good(body: bytes) -> Reply:
    return Reply(status=200, headers={}, body=b"{}")


async def test_a_line_whose_own_time_limit_runs_out_is_sent_once(desk):
    body = '{"prompt":"hi","first_token_timeout":0.000001}'
    begin(desk, "a", *(line(f"{number}", body) for number in range(20)))
    client = Turns(lambda _: LATE)
    async with Working(desk, client):
        assert await until_ended(desk, "a") == ["completed"]
    assert len(client.sent) == 20
    assert {each["response"]["status_code"] for each in answers(desk, "a", "error_file_id")} == {504}


async def test_a_line_that_found_no_turn_comes_again_after_a_pause_and_behind_the_others(desk, monkeypatch):
    monkeypatch.setattr("server.api.batches.places.MIN_REST_S", 0.01)
    monkeypatch.setattr("server.api.batches.queue.MIN_REST_S", 0.01)
    begin(desk, "a", line("1", '{"prompt":"late"}'), *(line(f"{number}") for number in range(2, 9)))
    num_late, times = 0, []

    def reply_to(body: bytes) -> Reply:
        nonlocal num_late
        if b"late" not in body:
            return good(body)
        num_late += 1
        times.append(time.monotonic())
        return LATE if num_late < 4 else good(body)

    client = Turns(reply_to)
    async with Working(desk, client):
        assert await until_ended(desk, "a") == ["completed"]
    assert desk.store.batch("a", "batch_a")["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
    assert [b"late" in body for body in client.sent[-3:]] == [True] * 3
    gaps = [after - before for before, after in pairwise(times)]
    assert min(gaps) >= 0.01
    assert gaps[2] > gaps[1]  # passes without an answer come more and more slowly


async def test_a_key_that_is_refused_rests_and_the_batch_of_another_ends_meanwhile(desk):
    begin(desk, "a", *(line(f"{number}") for number in range(200)))
    begin(desk, "b", *(line(f"{number}") for number in range(3)))
    refused, taken = Turns(lambda _: REFUSED), Turns(good)
    queue = BatchQueue(desk, lambda owner: refused if owner == "a" else taken, FairPlaces(2))
    working = asyncio.create_task(queue.run())
    assert await until_ended(desk, "b") == ["completed"]
    num_sent = len(refused.sent)
    await asyncio.sleep(0.3)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    assert num_sent <= 2
    assert len(refused.sent) <= 2 + 2  # a rest is a second at least


async def test_the_next_place_is_for_the_owner_that_has_the_fewest():
    places, order, gate = FairPlaces(2), [], asyncio.Event()

    async def work(owner: str) -> None:
        async with places.held_by(owner):
            order.append(owner)
            await gate.wait()

    works = [asyncio.create_task(work("many")) for _ in range(6)]
    await asyncio.sleep(0)
    works += [asyncio.create_task(work(owner)) for owner in ("one", "two")]
    works[2].cancel()
    await asyncio.sleep(0.01)
    assert order == ["many", "many"]
    gate.set()
    await asyncio.gather(*works, return_exceptions=True)
    assert order[2:4] == ["one", "two"]
    assert len(order) == 7
    async with asyncio.timeout(1), places.held_by("many"), places.held_by("many"):
        pass


async def test_a_large_answer_is_kept_without_being_parsed(desk, monkeypatch):
    """The reply is JSON already: beyond a copy, its size costs the event loop nothing."""
    body = orjson.dumps({"choices": [{"text": "x" * 40, "at": [0.5] * 20}] * 50_000})
    begin(desk, "a", line("one"))
    async with Working(desk, Turns(lambda _: Reply(status=200, headers={"x-request-id": "r"}, body=body))):
        assert await until_ended(desk, "a") == ["completed"]
    (answer,) = answers(desk, "a", "output_file_id")
    assert (answer["custom_id"], answer["response"]["request_id"]) == ("one", "r")
    assert orjson.dumps(answer["response"]["body"]) == body
    reply, began_s = Reply(status=200, headers={}, body=body), time.thread_time()
    orjson.dumps(orjson.loads(body))
    parsed_s, began_s = time.thread_time() - began_s, time.thread_time()
    answer_line("one", reply)
    assert time.thread_time() - began_s < parsed_s / 4


async def test_a_clock_that_jumps_ends_no_batch(desk, monkeypatch):
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    gate = asyncio.Event()

    class Slow(Turns):
        async def post(self, path: str, body: bytes) -> Reply:
            await gate.wait()
            return await super().post(path, body)

    begin(desk, "a", line("one"), line("two"))
    async with Working(desk, Slow(good)):
        while desk.store.batch("a", "batch_a")["status"] != "in_progress":
            await asyncio.sleep(0.002)
        now_s += 2 * 86_400
        begin(desk, "b", line("three"))  # the queue looks at all batches again
        desk.wake()
        await asyncio.sleep(0.05)
        now_s -= 2 * 86_400
        gate.set()
        assert await until_ended(desk, "a", "b") == ["completed", "completed"]


async def test_a_batch_expires_by_the_time_that_passes(desk, monkeypatch):
    monkeypatch.setattr("server.api.batches.queue._LEFT_AT_START_S", 0.05)
    monkeypatch.setattr("server.api.batches.queue.WINDOW_S", 0.05)
    monkeypatch.setattr("server.api.batches.places.MIN_REST_S", 0.02)
    begin(desk, "a", line("one"), line("two", '{"prompt":"never"}'))
    async with Working(desk, Turns(lambda body: REFUSED if b"never" in body else good(body))):
        assert await until_ended(desk, "a") == ["expired"]
    assert [each["custom_id"] for each in answers(desk, "a", "output_file_id")] == ["one"]


async def test_a_request_that_the_engine_died_of_is_sent_again_once(desk, monkeypatch):
    monkeypatch.setattr("server.api.batches.places.MIN_REST_S", 0.01)
    monkeypatch.setattr("server.api.batches.queue.MIN_REST_S", 0.01)
    begin(desk, "a", line("one"))
    client = Turns(lambda _: Reply(status=500, headers={"x-should-retry": "true"}, body=b"{}"))
    async with Working(desk, client):
        assert await until_ended(desk, "a") == ["completed"]
    assert len(client.sent) == 2


async def test_a_line_for_a_model_that_cannot_be_loaded_is_an_error_of_that_line(desk):
    begin(desk, "a", line("one"), line("two", '{"prompt":"broken"}'))
    broken = Reply(status=503, headers={"x-should-retry": "false"}, body=b"{}")
    client = Turns(lambda body: broken if b"broken" in body else good(body))
    async with Working(desk, client):
        assert await until_ended(desk, "a") == ["completed"]
    assert len(client.sent) == 2
    assert [each["custom_id"] for each in answers(desk, "a", "error_file_id")] == ["two"]


async def test_the_first_line_that_cannot_be_read_is_named(desk):
    begin(desk, "a", line("a"), "{bad\n")
    async with Working(desk):
        assert await until_ended(desk, "a") == ["failed"]
    (fault,) = desk.store.batch("a", "batch_a")["errors"]["data"]
    assert (fault["line"], fault["code"]) == (2, "invalid_file")


@pytest.mark.parametrize("piece_bytes", [1, 100, 10_000])
async def test_a_file_in_pieces_of_any_size_is_read_line_by_line(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr("server.api.batches.store.PIECE_BYTES", piece_bytes)
    desk = StateAccess(str(tmp_path / "state"), max_bytes=MANY)
    lines = [line(f"{number}", json.dumps({"prompt": "x" * (number * 7 % 150)})) for number in range(30)]
    begin(desk, "a", *lines[:9], "\n\n", *lines[9:-1], lines[-1].rstrip())
    async with Working(desk):
        assert await until_ended(desk, "a") == ["completed"]
    found = answers(desk, "a", "output_file_id")
    assert [each["custom_id"] for each in found] == [f"{number}" for number in range(30)]
    desk.close()


async def test_no_refusal_makes_an_owner_rest_for_long(monkeypatch):
    """A model that cannot be loaded asks for 16 minutes, and the owner has work for others."""
    monkeypatch.setattr(places, "MIN_REST_S", 0.0)
    monkeypatch.setattr(places, "MAX_REST_S", 0.01)
    fair = FairPlaces(1)
    fair.rest("a", 960.0)
    async with asyncio.timeout(30), fair.held_by("a"):
        pass
