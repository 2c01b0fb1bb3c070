"""Random histories of the whole loop, over a device that tells late what came of a step.

Whatever arrives, leaves, breaks or finds too little memory, and whenever: while a plan is made, while one or
two steps are under way, or between a result and what is learnt of it.
"""

from collections import deque
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.loop import EngineLoop, WorkerBroken
from engine.process_messages import AddRequest, EndSequences, Outputs, ResetPrefixCache, ToClient, ToEngine
from scheduler import scheduler as scheduler_module
from scheduler.config import Batching, PreemptionMode, PrefixCaching, SchedulerConfig, SchedulingPolicy
from scheduler.messages import FinishReason, SamplingParams, SequenceId, SequenceOutput, ServiceTerms
from scheduler.scheduler import Scheduler
from tests.fakes import FakeWorker, OutOfMemory, continuation
from tests.invariants import check_invariants
from tests.properties.lengths import histories
from tests.world import small_config, windows_of

HISTORIES = histories(20)
_STOPS = tuple(range(0, 97, 9))


@dataclass(frozen=True)
class Arrive:
    length: int
    family: int  # prompts of one family begin alike
    max_tokens: int
    may_stop: bool
    priority: int

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple((self.family * 31 + i * i) % 89 for i in range(self.length))

    @property
    def stops(self) -> tuple[int, ...]:
        return _STOPS if self.may_stop else ()

    def expected(self) -> list[int]:
        token_ids = continuation(list(self.prompt), self.max_tokens)
        ends = [place for place, token in enumerate(token_ids, 1) if token in self.stops]
        return token_ids[: min(ends, default=len(token_ids))]


@dataclass(frozen=True)
class Abort:
    which: int


@dataclass(frozen=True)
class Reset:
    """Forget every prefix that was cached so far."""


@dataclass(frozen=True)
class Pause:
    """Pause of the mailbox: it is empty for so many looks of the loop."""

    times: int


@dataclass(frozen=True)
class RunOut:
    when: OutOfMemory


@dataclass(frozen=True)
class Explode:
    """The next step fails."""


@dataclass(frozen=True)
class Poison:
    which: int


Event = Arrive | Abort | Reset | Pause | RunOut | Explode | Poison

ARRIVALS = st.builds(
    Arrive,
    length=st.sampled_from([1, 3, 4, 5, 8, 9, 13, 20]),
    family=st.integers(0, 2),
    max_tokens=st.sampled_from([1, 3, 8, 12]),
    may_stop=st.booleans(),
    priority=st.integers(0, 2),
)
PAUSES = st.builds(Pause, times=st.integers(1, 4))
RUN_OUTS = st.builds(RunOut, when=st.sampled_from(OutOfMemory))
HARMLESS = st.one_of(ARRIVALS, ARRIVALS, PAUSES, PAUSES, RUN_OUTS, st.builds(Reset))
EVENTS = st.one_of(
    *(ARRIVALS, ARRIVALS, PAUSES, PAUSES, RUN_OUTS, st.builds(Reset), st.builds(Explode)),
    st.builds(Abort, which=st.integers(1, 20)),
    st.builds(Poison, which=st.integers(1, 20)),
)
CONFIGS = st.builds(
    small_config,
    num_blocks=st.integers(5, 12),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(5, 20),
    max_model_len=st.sampled_from([20, 64]),
    policy=st.sampled_from(SchedulingPolicy),
    prefix_caching=st.sampled_from(PrefixCaching),
    batching=st.sampled_from(Batching),
    preemption_mode=st.sampled_from(PreemptionMode),
    num_host_blocks=st.sampled_from([0, 3, 20]),
    groups=st.sampled_from([None, None, 7]).map(windows_of),
)


class Play:
    """A mailbox that follows a history: one event each time the loop looks."""

    def __init__(self, config: SchedulerConfig, history: list[Event]) -> None:
        self.scheduler = Scheduler(config)
        self.worker = FakeWorker(config.block_size, config.groups)
        self.history = deque(history)
        self.asked: dict[SequenceId, Arrive] = {}
        self.tokens: dict[SequenceId, list[int]] = {}
        self.ended: dict[SequenceId, SequenceOutput] = {}
        self.now_s = 0.0
        self.loop = EngineLoop(self.scheduler, self.worker, self, lambda: self.now_s)

    def run(self) -> "Play":
        for _ in range(3000):
            self.loop.turn()
            check_invariants(self.scheduler)
            if not self.history and not self.scheduler.has_unfinished_requests:
                break
        else:
            raise AssertionError("somebody never ends")
        for _ in list(self.scheduler._in_flight):
            self.loop.turn()
        assert not list(self.scheduler._in_flight)
        return self

    def receive(self, *, wait_s: float) -> list[ToEngine]:
        self.now_s += wait_s
        if not self.history:
            return []
        event = self.history.popleft()
        match event:
            case Arrive():
                return [self._request(event)]
            case Abort(which):
                return [EndSequences(sequence_ids=(SequenceId(which),), reason=FinishReason.ABORTED)]
            case Reset():
                return [ResetPrefixCache()]
            case Pause(times) if times > 1:
                self.history.appendleft(Pause(times - 1))
            case RunOut(when):
                self.worker.out_of_memory = when
            case Explode():
                self.worker.explode_next = True
            case Poison(which):
                self.worker.poisoned.add(SequenceId(which))
        return []

    def send(self, message: ToClient) -> None:
        for news in message.outputs if isinstance(message, Outputs) else ():
            assert news.sequence_id not in self.ended, "news of a sequence that has ended"
            self.tokens[news.sequence_id] += news.token_ids
            if news.finish_reason is not None:
                self.ended[news.sequence_id] = news

    def _request(self, arrival: Arrive) -> AddRequest:
        sequence_id = SequenceId(len(self.asked) + 1)
        self.asked[sequence_id] = arrival
        self.tokens[sequence_id] = []
        return AddRequest(
            sequence_ids=(sequence_id,),
            prompt_token_ids=arrival.prompt,
            params=SamplingParams(max_tokens=arrival.max_tokens, stop_token_ids=arrival.stops),
            terms=ServiceTerms(priority=arrival.priority),
        )


@pytest.fixture(autouse=True)
def chunks_may_be_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "SMALLEST_CHUNK_TOKENS", 0)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_sequence_ends_once_with_its_own_tokens_and_nothing_is_left(depth: int) -> None:
    @HISTORIES
    @given(CONFIGS, st.lists(EVENTS, min_size=8, max_size=40))
    def check(config: SchedulerConfig, history: list[Event]) -> None:
        play = Play(replace(config, max_plans_in_flight=depth), history)
        try:
            play.run()
        except WorkerBroken:
            return
        assert play.ended.keys() == play.asked.keys()
        for sequence_id, arrival in play.asked.items():
            tokens = play.tokens[sequence_id]
            assert tokens == arrival.expected()[: len(tokens)]
            if play.ended[sequence_id].finish_reason is FinishReason.STOP:
                assert tokens == arrival.expected()
        assert play.scheduler.kv.pool.num_used == 0
        assert play.scheduler.kv.swap_space.num_used == 0
        assert play.scheduler.get_request_counts() == (0, 0, 0)

    check()


def test_the_texts_are_the_same_however_far_the_loop_runs_ahead() -> None:
    @HISTORIES
    @given(CONFIGS, st.lists(HARMLESS, min_size=8, max_size=40))
    def check(config: SchedulerConfig, history: list[Event]) -> None:
        plays = [Play(replace(config, max_plans_in_flight=depth), history).run() for depth in (1, 2)]
        one, two = (
            {id_: (play.tokens[id_], end.finish_reason) for id_, end in play.ended.items()} for play in plays
        )
        assert one == two

    check()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_device_with_memory_for_a_few_tokens_a_step_still_serves_everybody(depth: int) -> None:
    @HISTORIES
    @given(CONFIGS, st.integers(1, 12), st.lists(st.one_of(ARRIVALS, PAUSES), min_size=4, max_size=20))
    def check(config: SchedulerConfig, most_tokens: int, history: list[Event]) -> None:
        play = Play(replace(config, max_plans_in_flight=depth), history)
        play.worker.most_tokens = most_tokens
        play.run()
        assert FinishReason.FAILED not in {end.finish_reason for end in play.ended.values()}

    check()
