"""A full queue under the priority policy: who gives up a place for whom, and how they are told."""

import asyncio
import os
import signal
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

import httpx
import pytest

from engine.errors import Overloaded
from engine.frontend.active_requests import ActiveRequests
from engine.frontend.metrics import EngineMetrics
from engine.frontend.queue_limits import Desk
from engine.frontend.waiting_calls import CallTerms, WaitingCalls
from engine.journal import Journal
from engine.options.engine_config import resolve
from engine.options.options import Options
from engine.process_messages import AddRequest, EndSequences
from engine.text.tokenizer import Tokenizer
from engine.types import GenerationRequest, SamplingParams, ServiceTerms
from scheduler.config import Displacement, Fairness, SchedulerOptions, SchedulingPolicy
from scheduler.messages import FinishReason, SequenceOutput, SequenceStart
from tests.e2e.serving import running_server
from tests.fakes import make_sequence
from tests.world import World, small_config


def journal_of(reply_id: str) -> Journal:
    journal = Journal()
    journal.reply_id = reply_id
    return journal


class Door:
    """ActiveRequests with a queue of four sequences, and everything that it sends."""

    def __init__(self, folder: Path, desk: Desk | None = None, **options) -> None:
        asked = replace(Options(), model=str(folder), max_queued_requests=4, **options)
        config, _ = resolve(asked, environment={})
        self.desk = desk or Desk(config)
        self.metrics = EngineMetrics("tiny")
        self.sent: list = []
        self.in_flight = ActiveRequests(
            config,
            Tokenizer.load(folder),
            self.metrics,
            lambda _, message: self.sent.append(message),
            self.desk,
        )

    def ask(self, name: str, priority: int, *, n: int = 1, others: tuple[str, ...] = (), num_tokens: int = 3):
        """Raises Overloaded."""
        journal = journal_of(name)
        requests = [
            GenerationRequest(
                request_id=each,
                prompt_token_ids=(5,) * num_tokens,
                params=SamplingParams(max_tokens=5),
                n=n,
                terms=ServiceTerms(priority=priority),
                journal=journal,
            )
            for each in (name, *others)
        ]
        return self.in_flight.admit(requests, asyncio.Event())

    def begin(self, live, place: int = 0) -> None:
        """The engine process has begun with one of its sequences."""
        sequence_id = tuple(live.choices)[place]
        output = SequenceOutput(
            sequence_id, (7,), None, start=SequenceStart(queue_s=0.0, num_cached_tokens=0)
        )
        self.in_flight.take_outputs([output], (), 0.0)

    def waiting(self) -> set[str]:
        return {name for name in "abcdefgh" if name in self.in_flight._by_id}

    def num_refused(self, reason: str) -> float:
        value = self.metrics.registry.get_sample_value(
            "tokenyard:admission_rejections_total", {"reason": reason}
        )
        assert value is not None
        return value


@pytest.fixture
def door(tiny_model: Path) -> Door:
    return Door(tiny_model, scheduling_policy="priority")


async def test_the_last_of_the_least_urgent_gives_way_and_is_told_when_to_come_back(door) -> None:
    lives = {name: door.ask(name, priority)[0] for name, priority in zip("abcd", (5, 9, 9, 0), strict=True)}
    door.ask("e", 1)
    assert door.waiting() == {"a", "b", "d", "e"}
    with pytest.raises(Overloaded, match="more urgent") as told:
        lives["c"].take()
    assert told.value.retry_after_s >= 1
    assert EndSequences(sequence_ids=tuple(lives["c"].choices), reason=FinishReason.ABORTED) in door.sent
    assert door.num_refused("displaced") == 1
    finished = door.metrics.registry.get_sample_value(
        "tokenyard:request_success_total", {"finished_reason": "rejected"}
    )
    assert finished == 1


async def test_equals_do_not_give_way_to_each_other(door) -> None:
    for name in "abcd":
        door.ask(name, 3)
    for priority in (3, 4):
        with pytest.raises(Overloaded, match="have not started"):
            door.ask("e", priority)
    assert door.waiting() == set("abcd")
    assert door.num_refused("displaced") == 0
    assert door.num_refused("requests") == 2


async def test_two_models_share_one_queue_and_an_urgent_request_of_one_displaces_the_last_of_the_other(
    door, tiny_model: Path
) -> None:
    beside = Door(tiny_model, door.desk, scheduling_policy="priority")
    first, last = [door.ask(name, 9)[0] for name in "af"]
    others = [beside.ask(name, 3)[0] for name in "bc"]
    assert len({*first.choices, *last.choices, *(number for each in others for number in each.choices)}) == 4
    with pytest.raises(Overloaded, match="have not started"):
        beside.in_flight.require_room(9, Journal())
    beside.ask("e", 1)
    assert door.waiting() == set("a")
    assert beside.waiting() == set("bce")
    with pytest.raises(Overloaded, match="more urgent"):
        last.take()
    assert EndSequences(sequence_ids=tuple(last.choices), reason=FinishReason.ABORTED) in door.sent
    door.in_flight.leave(first)
    assert door.in_flight.is_empty.is_set()
    for name in "bce":
        beside.in_flight.leave(beside.in_flight._by_id[name])
    assert (
        door.desk.limits.num_queued,
        door.desk.limits.num_queued_tokens,
        len(door.desk.waiting._line),
    ) == (
        0,
        0,
        0,
    )


@pytest.mark.parametrize(("num_others", "others_priority"), [(2, 9), (3, 9), (2, 1)])
async def test_urgent_requests_displace_no_more_than_they_gain_and_none_of_places_that_are_kept(
    tiny_model: Path, num_others: int, others_priority: int
) -> None:
    """Two of eight places are kept for each model."""
    config, _ = resolve(
        replace(Options(), model=str(tiny_model), max_queued_requests=8, scheduling_policy="priority"),
        environment={},
    )
    desk = Desk(config)
    crowded, quiet = (Door(tiny_model, desk, scheduling_policy="priority") for _ in range(2))
    for number in range(8 - num_others):
        crowded.ask("abcdef"[number], 5)
    for number in range(num_others):
        quiet.ask("abc"[number], others_priority)
    for number in range(4):
        num_before = desk.limits.num_queued
        crowded.in_flight.require_any_room(0)
        crowded.ask("wxyz"[number], 0)
        assert desk.limits.num_queued == num_before == 8
    assert [len(quiet.waiting()), len(crowded.waiting())] == [2, 2]
    if others_priority == 9:
        quiet.in_flight.require_any_room(8)
        quiet.ask("h", 8)
        assert len(quiet.waiting()) == 2


async def test_whoever_has_begun_keeps_its_place_with_all_that_came_with_it(door) -> None:
    first, second = door.ask("a", 9, others=("b",))
    (choices,) = door.ask("c", 9, n=2)
    door.begin(first)
    door.begin(choices, place=1)  # two of four wait
    door.ask("d", 9, n=2)
    door.ask("e", 0, n=2)
    assert door.waiting() == {"a", "b", "c", "e"}
    with pytest.raises(Overloaded):
        door.ask("f", -1, n=3)
    assert second.error is None


async def test_a_call_gives_way_whole(door) -> None:
    calls = door.ask("a", 9, others=("b", "c"))
    door.ask("d", 1)
    door.ask("e", 0)
    assert door.waiting() == {"d", "e"}
    assert all(isinstance(live.error, Overloaded) for live in calls)
    assert door.num_refused("displaced") == 1


async def test_nobody_gives_way_to_one_that_would_not_fit_even_so(door) -> None:
    door.ask("a", 0, n=3)
    door.ask("b", 9)
    with pytest.raises(Overloaded):
        door.ask("c", 5, n=2)
    assert door.waiting() == {"a", "b"}


async def test_one_that_has_left_frees_nothing_more(door) -> None:
    for name in "abcd":
        door.ask(name, 9)
    door.in_flight.leave(door.in_flight._by_id["d"])
    door.ask("e", 0)
    with pytest.raises(Overloaded):
        door.ask("f", 5, n=4)
    assert door.waiting() == {"a", "b", "c", "e"}


async def test_tokens_make_a_queue_full_too(tiny_model) -> None:
    door = Door(tiny_model, scheduling_policy="priority", max_queued_tokens=100)
    door.ask("a", 9, num_tokens=60)
    door.ask("b", 9, num_tokens=30)
    door.ask("c", 0, num_tokens=50)
    assert door.waiting() == {"c"}
    door.ask("d", 9, num_tokens=40)
    with pytest.raises(Overloaded):
        door.ask("e", 9, num_tokens=20)


async def test_a_place_is_free_again_after_a_displaced_request_has_gone(door) -> None:
    for name in "abcd":
        door.ask(name, 9)
    door.ask("e", 0)
    door.in_flight.leave(door.in_flight._by_id["e"])
    door.ask("f", 9)
    for name in "abcf":
        door.in_flight.leave(door.in_flight._by_id[name])
    assert not len(door.in_flight)
    assert door.in_flight.is_empty.is_set()
    assert sum(isinstance(message, AddRequest) for message in door.sent) == 6


async def test_in_order_of_arrival_there_is_nobody_more_urgent(tiny_model) -> None:
    door = Door(tiny_model)
    for name in "abcd":
        door.ask(name, 9)
    with pytest.raises(Overloaded):
        door.ask("e", 0)
    assert door.waiting() == set("abcd")


class Item:
    def __init__(self, first_id: int) -> None:
        self.first_id, self.num_unstarted, self.num_prompt_tokens = first_id, 1, 10


def queue_of(*calls: tuple[int, CallTerms], **options: object) -> WaitingCalls[Item]:
    """A queue of calls of one request each, by number; added in the order given."""
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": 8, "policy": SchedulingPolicy.PRIORITY} | options
    waiting: WaitingCalls[Item] = WaitingCalls(SchedulerOptions(**settings))
    for number, terms in calls:
        waiting.add([Item(number)], terms, lambda item, error: None)
    return waiting


def terms_of(priority: int, *, arrived_s: float = 0.0, tenant: str = "a") -> CallTerms:
    return CallTerms(priority=priority, tenant=tenant, arrived_s=arrived_s)


def leaving(calls: WaitingCalls[Item], newcomer: CallTerms | None = None) -> list[int]:
    return [call.lives[0].first_id for call in calls.displaceable(newcomer, next_id=100)]


def test_waiting_makes_up_for_priority_as_it_does_in_the_scheduler() -> None:
    arrivals = [(3, 0.0), (1, 25.0), (3, 6.0)]  # ranks 30, 35, 36
    calls = queue_of(
        *((n, terms_of(priority, arrived_s=at_s)) for n, (priority, at_s) in enumerate(arrivals)),
        priority_aging_s=10.0,
    )
    assert leaving(calls) == [2, 1, 0]
    assert leaving(calls, terms_of(0, arrived_s=35.5)) == [2]
    for number in range(3):
        calls.discard(Item(number))
        calls.discard(Item(number))
    assert not calls._line


def test_among_equals_the_last_gives_way_first_and_none_displaces_another() -> None:
    calls = [(number, terms_of(3)) for number in (1, 2, 3, 4)]
    assert leaving(queue_of(*calls)) == [4, 3, 2, 1]
    assert leaving(queue_of(*calls), terms_of(3)) == []
    assert leaving(queue_of(*calls[:1]), terms_of(2)) == [1]


def test_under_fairness_the_tenant_with_most_to_be_served_gives_way_first() -> None:
    tenants = ["small", "large", "large", "large", "small"]
    calls = [(number, terms_of(9, tenant=tenant)) for number, tenant in enumerate(tenants)]
    calls.append((5, terms_of(4, tenant="large")))
    assert leaving(queue_of(*calls)) == [4, 3, 2, 1, 0, 5]
    assert leaving(queue_of(*calls, fairness=Fairness.TENANT)) == [3, 4, 2, 1, 0, 5]
    weighed = queue_of(*calls, fairness=Fairness.TENANT, tenant_weights=(("large", 9.0),))
    assert leaving(weighed) == [4, 0, 3, 2, 1, 5]


@pytest.mark.parametrize("aging_s", [inf, 10.0])
def test_the_queue_gives_way_in_the_reverse_of_the_order_in_which_the_scheduler_serves(
    aging_s: float,
) -> None:
    options = {"policy": SchedulingPolicy.PRIORITY, "priority_aging_s": aging_s}
    world = World(small_config(max_num_seqs=1, displacement=Displacement.OFF, num_blocks=64, **options))
    calls = []
    for number, priority in enumerate([3, 1, 3, 0, 1, 3, 0, 2], start=1):
        world.add(make_sequence(number, [1], max_tokens=1, priority=priority))
        calls.append((number, terms_of(priority, arrived_s=world.now_s)))
        world.now_s += 30.0
    world.run()
    assert leaving(queue_of(*calls, **options)) == list(reversed(world.ended))


@pytest.mark.night
async def test_over_http_the_displaced_gets_its_own_429_and_the_urgent_is_served(
    tiny_model: Path, tmp_path: Path
) -> None:
    options = ("--scheduling-policy", "priority")
    limits = ("--max-num-seqs", "1", "--max-queued-requests", "2")
    with running_server(tmp_path, str(tiny_model), *options, *limits) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:

            async def ask(priority: int, max_tokens: int) -> httpx.Response:
                body = {"prompt": "Once", "max_tokens": max_tokens, "priority": priority, "ignore_eos": True}
                return await client.post("/v1/completions", json=body)

            assert (await ask(0, 4)).status_code == 200
            os.kill(server.engine_pid, signal.SIGSTOP)  # nothing begins until we let it
            waiting = [asyncio.create_task(ask(9, 4)) for _ in range(2)]
            while server.metric("tokenyard:request_prompt_tokens_count") < 3:
                await asyncio.sleep(0.02)
            urgent = asyncio.create_task(ask(-1, 4))
            (displaced,), _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            os.kill(server.engine_pid, signal.SIGCONT)
            (served,) = set(waiting) - {displaced}
            assert [(await served).status_code, (await urgent).status_code] == [200, 200]
    refused = displaced.result()
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "server_overloaded"
    assert int(refused.headers["retry-after"]) >= 1


async def test_who_would_be_refused_however_small_is_refused_before_it_costs_anything(door) -> None:
    for name, priority in zip("abcd", (3, 3, 4, 3), strict=True):
        door.in_flight.require_room(9, Journal())
        door.ask(name, priority)
    for priority in (None, 3, -1):
        door.in_flight.require_room(priority, Journal())
    with pytest.raises(Overloaded) as told:
        door.in_flight.require_room(4, Journal())
    assert told.value.retry_after_s >= 1
    assert door.num_refused("requests") == 1
    door.begin(door.in_flight._by_id["a"])
    door.in_flight.require_room(9, Journal())


async def test_where_all_that_wait_have_begun_in_part_nobody_is_urgent_enough(door) -> None:
    (choices,) = door.ask("a", 9, n=6)  # larger than the queue, and alone in it
    door.in_flight.require_room(None, Journal())
    door.begin(choices)
    with pytest.raises(Overloaded):
        door.in_flight.require_room(None, Journal())


async def test_in_order_of_arrival_a_full_queue_is_full_for_any_priority(tiny_model) -> None:
    door = Door(tiny_model)
    for name in "abcd":
        door.ask(name, 9)
    for priority in (None, -5):
        with pytest.raises(Overloaded, match="have not started"):
            door.in_flight.require_room(priority, Journal())
    door.in_flight.leave(door.in_flight._by_id["a"])
    door.in_flight.require_room(None, Journal())


async def test_a_call_that_is_being_prepared_has_its_place_and_others_are_refused_at_once(tiny_model) -> None:
    door = Door(tiny_model)
    for name in "ab":
        door.ask(name, 0)
    for name in "cd":
        door.in_flight.require_room(None, journal_of(name))
    for is_full in (
        partial(door.in_flight.require_room, None, journal_of("e")),
        partial(door.in_flight.require_any_room, None),
    ):
        with pytest.raises(Overloaded):
            is_full()
    assert door.num_refused("requests") == 2
    door.ask("c", 0)
    door.in_flight.leave(door.in_flight._by_id["a"])
    door.in_flight.require_room(None, journal_of("e"))
    with pytest.raises(Overloaded):
        door.in_flight.require_room(None, journal_of("f"))
    door.ask("d", 0)
    door.ask("e", 0)
    assert door.waiting() == set("bcde")


async def test_a_crowd_on_an_idle_server_is_let_in_up_to_the_bound(tiny_model) -> None:
    first = Door(tiny_model)
    second = Door(tiny_model, first.desk)  # each has a part of one place
    for name in "abc":
        first.in_flight.require_room(None, journal_of(name))
    with pytest.raises(Overloaded, match="3 sequences"):
        first.in_flight.require_room(None, journal_of("d"))
    second.in_flight.require_any_room(None)
    second.in_flight.require_room(None, journal_of("e"))
    with pytest.raises(Overloaded):
        second.in_flight.require_any_room(None)
    with pytest.raises(Overloaded):  # two sequences, of which one would take the place of another call
        first.ask("a", 0, n=2)
    for name in "bc":
        first.ask(name, 0)
    second.ask("e", 0)


async def test_a_place_is_kept_for_a_moment_and_with_priorities_not_at_all(door, tiny_model) -> None:
    desk = Door(tiny_model).desk
    room, over = desk.join(), journal_of("c")
    desk.keep_place(journal_of("a"), room, now_s=0.0)
    desk.keep_place(journal_of("b"), room, now_s=0.2)
    desk.keep_place(over, room, now_s=0.2)
    over.is_over = True
    kept = [desk.kept_places(now_s=now_s)[0].total() for now_s in (0.2, 0.3, 0.5)]
    assert kept == [-2, -1, 0]
    door.desk.keep_place(journal_of("a"), room, now_s=0.0)
    assert not door.desk.kept


async def test_a_backlog_of_tokens_refuses_early_too(tiny_model) -> None:
    door = Door(tiny_model, max_queued_tokens=100)
    door.ask("a", 0, num_tokens=100)
    with pytest.raises(Overloaded):
        door.in_flight.require_room(None, Journal())
    assert door.num_refused("tokens") == 1
