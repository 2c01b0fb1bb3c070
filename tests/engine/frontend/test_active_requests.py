"""The accounts of requests between admission and their end, whatever happens to them and in any order."""

import asyncio
import gc
import time
import weakref
from math import inf
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import DeadlineExceeded, EngineDiedTwice, EngineUnavailable, Overloaded
from engine.options.options import Options
from engine.process_messages import Begun
from engine.types import GenerationRequest, SamplingParams, ServiceTerms, TimeLimits
from scheduler.messages import FinishReason, SequenceOutput, SequenceStart, TimeLimitKind
from scheduler.step.admission import TOO_LATE
from tests.engine.frontend.test_giving_way import Door, journal_of

EOS: tuple[int, ...] = ()
START = SequenceStart(queue_s=0.0, num_cached_tokens=0)
HISTORIES = settings(
    max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)
_WHO = st.integers(0, 30)
_OPERATIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 3), st.integers(1, 3)),
    st.tuples(st.just("ask"), st.integers(0, 3), st.integers(1, 3)),
    st.tuples(st.just("begin"), _WHO, st.integers(0, 2)),
    st.tuples(st.just("end"), _WHO, st.integers(0, 2)),
    st.tuples(st.just("expire"), _WHO, st.integers(0, 2)),
    st.tuples(st.just("leave"), _WHO, st.just(0)),
    st.tuples(st.just("die"), st.just(0), st.just(0)),
    st.tuples(st.just("replay"), st.just(0), st.just(0)),
)


@pytest.fixture
def door(tiny_model: Path) -> Door:
    return Door(tiny_model, scheduling_policy="priority")


def finish(door: Door, live, reason: FinishReason, place: int = 0, **news: object) -> None:
    """News from the engine process: one of its sequences has ended."""
    output = SequenceOutput(tuple(live.choices)[place], (), reason, **news)  # type: ignore[arg-type]
    door.in_flight.take_outputs([output], EOS, 0.0)


class Hall:
    """A door, and everybody who came through it and has not left."""

    def __init__(self, folder: Path) -> None:
        self.door = Door(folder, scheduling_policy="priority")
        self.in_flight = self.door.in_flight
        self.lives: list = []

    def play(self, operation: str, first: int, second: int) -> None:
        if operation == "ask":
            self._ask(priority=first, n=second)
        elif operation == "die":
            self.in_flight.engine_died(0)
        elif operation == "replay":
            self.in_flight.engine_ready(0, num_blocks=100, block_size=16)
        elif self.lives:
            self._happen(operation, self.lives[first % len(self.lives)], second)

    def close(self) -> None:
        """Everybody leaves."""
        for live in self.lives:
            self.in_flight.leave(live)

    def _ask(self, *, priority: int, n: int) -> None:
        names = [f"{len(self.lives)} {index}" for index in range(1 + priority % 2)]
        try:
            self.in_flight.require_room(priority, journal_of(names[0]))
            self.lives += self.door.ask(names[0], priority, n=n, others=tuple(names[1:]))
        except Overloaded:
            pass

    def _happen(self, operation: str, live, place: int) -> None:
        choices = list(live.choices.items())
        sequence_id, choice = choices[place % len(choices)]
        if operation == "leave":
            self.in_flight.leave(live)
        elif choice.finish_reason is None and live.error is None:
            has_begun = choice.last_token_s is not None
            start = None if has_begun or operation == "expire" else START
            reason = {"end": FinishReason.LENGTH, "expire": FinishReason.EXPIRED}.get(operation)
            output = SequenceOutput(sequence_id, (7,) if reason is None else (), reason, start=start)
            self.in_flight.take_outputs([output], EOS, 0.0)


async def test_no_place_in_the_queue_is_lost_or_given_twice(tiny_model: Path) -> None:
    @HISTORIES
    @given(st.lists(_OPERATIONS, min_size=5, max_size=40))
    def check(history: list[tuple[str, int, int]]) -> None:
        hall = Hall(tiny_model)
        for operation in history:
            hall.play(*operation)
            assert hall.in_flight._desk.limits.num_queued >= 0
            assert hall.in_flight._desk.limits.num_queued_tokens >= 0
        hall.close()
        assert hall.in_flight._desk.limits.num_queued == 0
        assert hall.in_flight._desk.limits.num_queued_tokens == 0
        assert not hall.in_flight._desk.tenant_tokens._num_queued
        assert not hall.in_flight._desk.waiting._line
        assert not hall.in_flight._by_sequence
        assert hall.in_flight.is_empty.is_set()

    check()


async def test_one_that_is_complete_is_read_to_its_end_whatever_becomes_of_the_engine(door: Door) -> None:
    done, cut = (door.ask(name, 0)[0] for name in "ab")
    for live in (done, cut):
        door.begin(live)
    finish(door, done, FinishReason.LENGTH)
    door.in_flight.engine_died(0)
    door.in_flight.fail_all(EngineUnavailable("the server is shutting down", code="shutting_down"))
    (output,) = done.take()
    assert output.finish_reason is FinishReason.LENGTH
    with pytest.raises(EngineUnavailable):
        cut.take()
    assert door.in_flight.num_cut_off == 1


async def test_one_that_had_begun_goes_on_in_the_next_process_with_its_tokens_and_one_start(
    door: Door,
) -> None:
    (live,) = door.ask("a", 0, n=2)
    one, other = live.choices
    start, again = SequenceStart(queue_s=0.5, num_cached_tokens=1), SequenceStart(9.0, 0)
    for tokens in ((7, 8), (9,)):
        door.in_flight.take_outputs([SequenceOutput(one, tokens, None, start=start)], EOS, 0.0)
        start = None
    door.sent.clear()
    door.in_flight.engine_died(0)
    door.in_flight.engine_ready(0, num_blocks=100, block_size=16)
    (message,) = door.sent
    assert message.sequence_ids == (one, other)
    assert message.begun == (Begun(0, (7, 8, 9)), Begun(1, ()))
    door.in_flight.take_outputs([SequenceOutput(one, (5,), None, start=again)], EOS, 0.0)
    finish(door, live, FinishReason.LENGTH)
    finish(door, live, FinishReason.LENGTH, place=1, start=again)
    first, _ = live.take()
    assert first.token_ids == (7, 8, 9, 5)
    assert first.num_cached_tokens == 1
    assert live.started_s == live.arrived_s + 0.5
    assert door.desk.limits.num_queued == 0


async def test_first_tokens_are_foreseen_and_the_error_is_told(tiny_model: Path) -> None:
    """Two places; each prompt takes a second, and the third waits for the first."""
    door = Door(tiny_model, max_num_seqs=2)
    get = door.metrics.registry.get_sample_value
    name = "tokenyard:predicted_first_token"

    def take(live, *, after_s: float) -> None:
        start = SequenceStart(queue_s=after_s - 1.0, num_cached_tokens=0)
        output = SequenceOutput(live.first_id, (7,), None, start=start)
        door.in_flight.take_outputs([output], EOS, live.arrived_s + after_s)

    (first,) = door.ask("a", 0)
    assert get(f"{name}_seconds_count") == 0, "nothing is known yet"
    take(first, after_s=1.0)
    (second,) = door.ask("b", 0)
    assert get(f"{name}_seconds_sum") == pytest.approx(1.0)
    take(second, after_s=4.0)
    assert get(f"{name}_error_seconds_count") == 1
    assert get(f"{name}_error_seconds_bucket", {"le": "-2.5"}) == 1, "three seconds later than foreseen"
    (third,) = door.ask("c", 0)
    assert third.expected_first_token_s is None, "all places are taken, and no pace is known"


async def test_only_the_unfinished_choices_go_on(door: Door) -> None:
    (live,) = door.ask("a", 0, n=2)
    door.begin(live)
    finish(door, live, FinishReason.LENGTH)
    door.sent.clear()
    door.in_flight.engine_died(0)
    door.in_flight.engine_ready(0, num_blocks=100, block_size=16)
    (message,) = door.sent
    assert message.sequence_ids == tuple(live.choices)[1:]
    assert [each.index for each in message.begun] == [1]
    door.in_flight.engine_died(0)
    with pytest.raises(EngineDiedTwice):
        live.take()


async def test_one_that_had_left_the_queue_is_not_held_to_its_time_there(tiny_model: Path) -> None:
    door = Door(tiny_model, queue_timeout=0.01)
    (live,) = door.ask("a", 0)
    start = SequenceStart(queue_s=0.0, num_cached_tokens=0)
    door.in_flight.take_outputs([SequenceOutput(live.first_id, (), None, start=start)], EOS, 0.0)
    await asyncio.sleep(0.03)
    door.in_flight.engine_died(0)
    await asyncio.sleep(0.03)
    assert not live.is_over
    door.sent.clear()
    door.in_flight.engine_ready(0, num_blocks=100, block_size=16)
    assert door.sent[0].terms.time_limits.queue_s == inf


async def test_deaths_that_lie_far_apart_are_no_ones_doing(door: Door, monkeypatch) -> None:
    (live,) = door.ask("a", 0)
    for wait_s, is_over in ((0.0, False), (400.0, False), (10.0, True)):
        later_s = time.monotonic() + wait_s
        monkeypatch.setattr("engine.frontend.active_requests.time.monotonic", lambda now_s=later_s: now_s)
        door.in_flight.engine_died(0)
        assert live.is_over is is_over
        door.in_flight.engine_ready(0, num_blocks=100, block_size=16)


async def test_time_that_runs_out_between_two_processes_ends_a_reply_with_what_there_is(
    tiny_model: Path,
) -> None:
    door = Door(tiny_model, request_timeout=0.05)
    (live,) = door.ask("a", 0)
    door.begin(live)
    door.in_flight.engine_died(0)
    while not live.is_over:
        await asyncio.sleep(0.01)
    (output,) = live.take()
    assert output.finish_reason is FinishReason.EXPIRED


async def test_one_that_has_left_is_freed_without_the_collector(door: Door) -> None:
    (live,) = door.ask("a", 0)
    door.begin(live)
    finish(door, live, FinishReason.LENGTH)
    door.in_flight.leave(live)
    door.sent.clear()
    left = weakref.ref(live)
    gc.disable()
    try:
        del live
        assert left() is None
    finally:
        gc.enable()


QUEUE, FIRST_TOKEN, TOTAL = (kind.value for kind in TimeLimitKind)


@pytest.mark.parametrize(
    ("asked", "ran_out", "is_own"),
    [
        (TimeLimits(), TOTAL, False),
        (TimeLimits(total_s=1e6), TOTAL, False),
        (TimeLimits(first_token_s=1e-6), FIRST_TOKEN, True),
        # What ran out decides, not what is nearest: it may have been the operator's.
        (TimeLimits(queue_s=1.0), FIRST_TOKEN, False),
        (TimeLimits(total_s=6.0), TOTAL, True),
        (TimeLimits(queue_s=1.0), QUEUE, True),
        # The operator's own would have run out soon after, so that the server is slow.
        (TimeLimits(queue_s=2.5), QUEUE, True),
        (TimeLimits(queue_s=2.6), QUEUE, False),
        (TimeLimits(total_s=599.0), TOTAL, False),
        # A message without a kind is of a prompt that would take too long; its wait was in time.
        (TimeLimits(queue_s=1.0, first_token_s=3.0), TOO_LATE, True),
        (TimeLimits(queue_s=1.0), TOO_LATE, False),
    ],
)
async def test_a_limit_that_runs_out_is_the_requests_own_if_it_asked_for_far_less_than_the_operator_allows(
    tiny_model: Path, asked: TimeLimits, ran_out: str, is_own: bool
) -> None:
    door = Door(tiny_model, queue_timeout=5.0, first_token_timeout=8.0)
    live = ask_within(door, asked)
    assert not live.request.journal.own_limit_ran_out
    finish(door, live, FinishReason.EXPIRED, message=ran_out)
    with pytest.raises(DeadlineExceeded):
        live.take()
    assert live.request.journal.own_limit_ran_out is is_own


@pytest.mark.parametrize(("asked_s", "is_own"), [(300.0, True), (400.0, False)])
async def test_where_the_operator_sets_no_limit_the_default_of_the_whole_stands_for_it(
    tiny_model: Path, asked_s: float, is_own: bool
) -> None:
    door = Door(tiny_model, request_timeout=0.0)
    live = ask_within(door, TimeLimits(queue_s=asked_s))
    finish(door, live, FinishReason.EXPIRED, message=QUEUE)
    assert live.request.journal.own_limit_ran_out is is_own
    assert Options().request_timeout == 600.0


@pytest.mark.parametrize(("asked", "is_own"), [(TimeLimits(total_s=0.01), True), (TimeLimits(), False)])
async def test_a_limit_that_runs_out_before_an_engine_has_the_request_is_told_apart_too(
    tiny_model: Path, asked: TimeLimits, is_own: bool
) -> None:
    door = Door(tiny_model, queue_timeout=0.05)
    live = ask_within(door, asked)
    door.in_flight.engine_died(0)
    await asyncio.wait_for(door.in_flight.is_empty.wait(), 60)
    assert live.request.journal.own_limit_ran_out is is_own


def test_no_start_at_once_is_foreseen_while_every_place_is_taken(tiny_model) -> None:
    door = Door(tiny_model, max_num_seqs=1)
    assert door.in_flight.forecast(ServiceTerms())[:2] == (0, 0.0)
    (live,) = door.ask("a", 0)
    door.begin(live)
    assert door.in_flight.forecast(ServiceTerms()) == (0, None, "places")
    finish(door, live, FinishReason.LENGTH)
    assert door.in_flight.forecast(ServiceTerms())[:2] == (0, 0.0)


def ask_within(door: Door, limits: TimeLimits):
    """A request of these limits, admitted."""
    request = GenerationRequest(
        request_id="a",
        prompt_token_ids=(5,),
        params=SamplingParams(max_tokens=5),
        terms=ServiceTerms(time_limits=limits),
    )
    return door.in_flight.admit([request], asyncio.Event())[0]
