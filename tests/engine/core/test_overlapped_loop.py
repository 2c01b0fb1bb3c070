"""The loop with two steps under way, as on a device that works by itself."""

import logging
from pathlib import Path

import msgspec
import orjson
import pytest

from engine.core.interfaces import BesideSteps
from engine.core.loop import EngineLoop, WorkerBroken
from engine.core.scheduler_start import scheduler_config
from engine.core.step_trace import StepTrace
from engine.core.worker_start import from_now_on
from engine.core.worker_steps import CheckedWorker
from engine.options.engine_config import resolve
from engine.options.sources import read_options
from engine.process_messages import AdapterAnswer, AddRequest, EndSequences, LoadAdapter, Shutdown
from scheduler.input_messages import EncoderInput
from scheduler.messages import FinishReason, ModelRunnerOutput, SchedulerOutput, SequenceId
from scheduler.scheduler import Scheduler
from scheduler.step import planner
from tests.engine.core.test_loop import PROMPT, Desk, request
from tests.engine.model_facts import facts
from tests.fakes import FakeStep, FakeWorker, OutOfMemory, continuation
from tests.world import small_config


class Device(FakeWorker):
    """Takes a second for each step, and notes what was asked of it and when."""

    def __init__(self, desk: Desk) -> None:
        super().__init__(4)
        self.desk = desk
        self.calls: list[str] = []
        self.free_s = 0.0
        self.refuse_next = False

    def launch(self, plan: SchedulerOutput) -> "TimedStep":  # type: ignore[override]
        self.calls.append(f"launch {plan.step}")
        if self.refuse_next:
            self.refuse_next = False
            raise RuntimeError("the launch failed")
        self.free_s = max(self.free_s, self.desk.now_s) + 1.0
        return TimedStep(self, super().launch(plan), plan.step, self.free_s)


class TimedStep:
    def __init__(self, device: Device, step: FakeStep, number: int, done_s: float) -> None:
        self._device, self._step, self._number, self._done_s = device, step, number, done_s

    def result(self) -> ModelRunnerOutput:
        self._device.calls.append(f"result {self._number}")
        self._device.desk.now_s = max(self._device.desk.now_s, self._done_s)
        return self._step.result()


def overlapped(desk: Desk, **changes: object) -> tuple[EngineLoop, Device]:
    device = Device(desk)
    settings = {"max_plans_in_flight": 2, "num_blocks": 32}
    scheduler = Scheduler(small_config(**(settings | changes)))
    return EngineLoop(scheduler, device, desk, lambda: desk.now_s), device


def tokens_of(desk: Desk, sequence_id: int) -> list[int]:
    return [token for news in desk.news() if news.sequence_id == sequence_id for token in news.token_ids]


def ends(desk: Desk) -> dict[int, FinishReason]:
    told = [news for news in desk.news() if news.finish_reason is not None]
    assert len(told) == len({news.sequence_id for news in told}), "one end for each"
    return {news.sequence_id: news.finish_reason for news in told if news.finish_reason is not None}


def test_the_next_step_is_launched_before_the_result_of_the_last_one_is_taken_in() -> None:
    desk = Desk()
    desk.letters.append([request(1)])
    loop, device = overlapped(desk)
    for _ in range(6):
        loop.turn()
    assert device.calls == ["launch 1", "launch 2", "result 1", "launch 3", "result 2", "result 3"]
    assert tokens_of(desk, 1) == continuation(PROMPT, 3)
    assert ends(desk) == {1: FinishReason.LENGTH}


def test_a_request_that_comes_while_a_stage_is_idle_is_launched_before_the_result() -> None:
    desk = Desk()
    desk.letters.append([request(1)])
    asked: list[float] = []

    def has_result(wait_s: float) -> bool:
        asked.append(wait_s)
        if len(asked) == 3:
            desk.letters.append([request(2)])
        return len(asked) > 5

    device = Device(desk)
    scheduler = Scheduler(small_config(max_plans_in_flight=3, num_blocks=32, num_stages=2))
    loop = EngineLoop(scheduler, device, desk, lambda: desk.now_s, beside=BesideSteps(has_result=has_result))
    loop.turn()
    num_beats = len(desk.beats())
    loop.turn()
    assert device.calls == ["launch 1", "launch 2"]
    loop.turn()
    assert device.calls == ["launch 1", "launch 2", "result 1"]
    assert len(asked) == 6
    assert len(desk.beats()) <= num_beats + 2, "none while it waited"


def test_with_one_plan_in_flight_each_result_is_taken_in_before_the_next_plan() -> None:
    desk = Desk()
    desk.letters.append([request(1)])
    loop, device = overlapped(desk, max_plans_in_flight=1)
    for _ in range(3):
        loop.turn()
    assert device.calls == ["launch 1", "result 1", "launch 2", "result 2", "launch 3", "result 3"]


def test_a_step_is_timed_from_the_result_before_it_and_not_from_its_launch() -> None:
    desk = Desk()
    seen: list[float] = []
    desk.letters.append([request(1, max_tokens=6)])
    loop, _ = overlapped(desk)
    waits: list[float] = []

    def observe(plan: object, seconds: float, passes: object, *, waited_s: float) -> None:
        seen.append(seconds)
        waits.append(waited_s)

    loop._scheduler.observe_step = observe  # type: ignore[method-assign, assignment]
    for _ in range(8):
        loop.turn()
    assert seen == [1.0] * 6, "each waited for a second behind the one before"
    assert waits == [0.0] * 6, "and the device for none of them"
    assert desk.beats()[-1].times.execute_s == pytest.approx(6.0)


@pytest.mark.parametrize("slices_s", [(0.25,) * 4, (4.0, 4.0, 0.0, 4.0)], ids=["alike", "others"])
def test_encoding_before_a_launch_is_no_time_of_a_step(
    monkeypatch: pytest.MonkeyPatch, slices_s: tuple[float, ...]
) -> None:
    desk = Desk()
    seen: list[float] = []
    picture, rest = EncoderInput(2, 2, "a cat"), iter(slices_s)
    monkeypatch.setattr(planner, "encoder_slice_s", lambda *_: (next(rest, 0.0), 0.0))
    desk.letters.append([request(1, max_tokens=12)])
    desk.letters.extend([[], [], [msgspec.structs.replace(request(2), encoder_inputs=(picture,))]])
    loop, device = overlapped(desk, encoder_cache_tokens=4)
    device.encodes_every = 6
    device.encoder_cache_tokens, device.inputs[SequenceId(2)] = 4, (picture,)
    launch = device.launch

    def encode_and_launch(plan: SchedulerOutput) -> TimedStep:
        if plan.encoder_slice_s:
            desk.now_s = max(desk.now_s, device.free_s) + plan.encoder_slice_s
        return launch(plan)

    def observe(plan: object, seconds: float, passes: object, *, waited_s: float) -> None:
        seen.append(seconds)

    device.launch = encode_and_launch  # type: ignore[method-assign]
    loop._scheduler.observe_step = observe  # type: ignore[method-assign, assignment]
    for _ in range(14):
        loop.turn()
    assert set(ends(desk)) == {1, 2}
    num_unknown = 1 + slices_s.count(0.0)
    assert seen == [1.0] * (len(device.plans) - num_unknown), "not of steps before the first that encode"


def test_the_time_for_which_the_worker_waits_for_a_plan_is_told_apart_from_the_step() -> None:
    desk = Desk()
    desk.letters.append([request(1)])
    loop, _ = overlapped(desk, max_plans_in_flight=1)
    seen: list[tuple[float, float]] = []

    def observe(plan: object, seconds: float, passes: object, *, waited_s: float) -> None:
        seen.append((seconds, waited_s))
        desk.now_s += 0.25  # to take in the result and to plan

    loop._scheduler.observe_step = observe  # type: ignore[method-assign, assignment]
    for _ in range(4):
        loop.turn()
    assert seen == [(1.0, 0.0), (1.0, 0.25), (1.0, 0.25)]
    desk.now_s += 100.0
    desk.letters.append([request(2)])
    loop.turn()
    assert seen[3:] == [(1.0, 0.0)], "before it the worker waited for a request"


def test_the_time_in_which_an_adapter_is_loaded_is_no_wait_for_a_plan() -> None:
    desk = Desk()
    desk.letters.append([request(1, max_tokens=9)])
    loop, _ = overlapped(desk, max_plans_in_flight=1)
    waits: list[float] = []

    def load(asked: LoadAdapter) -> AdapterAnswer:
        desk.now_s += 5.0
        return AdapterAnswer(question=asked.question, refusal="too large")

    def observe(plan: object, seconds: float, passes: object, *, waited_s: float) -> None:
        waits.append(waited_s)
        desk.now_s += 0.25

    loop._adapters.load = load  # type: ignore[method-assign]
    loop._scheduler.observe_step = observe  # type: ignore[method-assign, assignment]
    loop.turn()
    desk.letters += [[LoadAdapter(question=1, name="a", folder="b")]] * 2  # before a step, and during it
    for _ in range(3):
        loop.turn()
    assert waits == [0.0, 0.0, 0.0, 0.25]


def test_of_steps_during_which_an_adapter_is_loaded_no_time_is_learnt() -> None:
    desk = Desk()
    desk.letters.append([request(1, max_tokens=9)])
    loop, device = overlapped(desk)
    seen: list[float] = []

    def load(asked: LoadAdapter) -> AdapterAnswer:
        desk.now_s += 5.0
        return AdapterAnswer(question=asked.question, refusal="too large")

    def observe(plan: SchedulerOutput, seconds: float, *_: object, **__: object) -> None:
        seen.append(seconds)

    loop._adapters.load = load  # type: ignore[method-assign]
    loop._scheduler.observe_step = observe  # type: ignore[method-assign]
    for _ in range(3):
        loop.turn()
    num_before = len(seen)
    desk.letters.append([LoadAdapter(question=1, name="a", folder="b")])
    for _ in range(20):
        loop.turn()
    assert ends(desk) == {1: FinishReason.LENGTH}
    num_steps = sum(call.startswith("launch") for call in device.calls)
    assert seen == [1.0] * len(seen)
    assert num_before < len(seen) < num_steps


def test_the_times_of_ranks_begin_when_they_have_loaded() -> None:
    so_far = [3.0, 40.0]
    times = from_now_on(lambda: (so_far[0], so_far[1]))
    assert times() == (0.0, 0.0)
    so_far[:] = 3.5, 42.0
    assert times() == (0.5, 2.0)


def test_the_loop_does_not_wait_for_messages_while_a_step_is_under_way() -> None:
    desk = Desk()
    desk.letters.append([request(1, max_tokens=9)])
    loop, device = overlapped(desk)
    loop.turn()
    desk.letters.extend([[], [EndSequences(sequence_ids=(SequenceId(1),), reason=FinishReason.ABORTED)]])
    loop.turn()
    assert device.calls == ["launch 1", "launch 2", "result 1"]
    waits: list[float] = []
    receive = desk.receive

    def note(*, wait_s: float) -> list:  # type: ignore[type-arg]
        waits.append(wait_s)
        return receive(wait_s=wait_s)

    desk.receive = note  # type: ignore[method-assign]
    loop.turn()
    assert device.calls[-1] == "result 2"
    assert set(waits) == {0.0}
    loop.turn()
    assert waits[-1] > 0.0, "now there is nothing left"
    assert ends(desk) == {1: FinishReason.ABORTED}


def test_an_abort_that_arrives_while_two_steps_are_under_way_wins_over_both() -> None:
    desk = Desk()
    desk.letters.append([request(1, 2, max_tokens=6)])
    loop, _ = overlapped(desk)
    loop.turn()
    desk.letters.extend([[], [EndSequences(sequence_ids=(SequenceId(1),), reason=FinishReason.ABORTED)]])
    for _ in range(10):
        loop.turn()
    assert tokens_of(desk, 1) == []
    assert ends(desk) == {1: FinishReason.ABORTED, 2: FinishReason.LENGTH}
    assert tokens_of(desk, 2) == continuation(PROMPT, 6)


def test_a_launch_that_fails_is_told_after_the_results_of_the_steps_before_it() -> None:
    desk = Desk()
    desk.letters.append([request(1, max_tokens=3)])
    loop, device = overlapped(desk)
    loop.turn()
    device.refuse_next = True
    desk.letters.append([request(2, max_tokens=3)])
    loop.turn()
    assert device.calls == ["launch 1", "launch 2", "result 1"]
    assert tokens_of(desk, 1) == continuation(PROMPT, 1), "what was computed before counts"
    assert ends(desk) == {1: FinishReason.FAILED, 2: FinishReason.FAILED}
    desk.letters.append([request(3)])
    for _ in range(5):
        loop.turn()
    assert tokens_of(desk, 3) == continuation(PROMPT, 3)


def test_a_result_that_fails_fails_its_step_and_the_one_behind_it_is_still_taken_in() -> None:
    desk = Desk()
    loop, device = overlapped(desk, batching="separate")
    desk.letters.append([request(1, max_tokens=4)])
    loop.turn()
    loop.turn()
    device.explode_next = True
    desk.letters.append([request(2, prompt=[9, 8, 7, 6, 5])])
    for _ in range(9):
        loop.turn()
    assert ends(desk)[2] is FinishReason.FAILED
    assert [call for call in device.calls if call.startswith("result")] == sorted(
        call.replace("launch", "result") for call in device.calls if call.startswith("launch")
    )


def test_three_steps_that_fail_in_a_row_end_the_process_after_everybody_was_told() -> None:
    desk = Desk()
    loop, device = overlapped(desk)

    def fail_steps() -> None:
        for number in range(1, 20):
            device.explode_next = True
            desk.letters.append([request(number)])
            loop.turn()

    with pytest.raises(WorkerBroken):
        fail_steps()
    assert len(ends(desk)) >= 3
    assert set(ends(desk).values()) == {FinishReason.FAILED}


@pytest.mark.parametrize("when", OutOfMemory)
def test_a_step_without_memory_is_made_again_and_told_in_one_line_of_the_log(
    when: OutOfMemory, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk()
    loop, device = overlapped(desk)
    desk.letters.append([request(1, 2, 3, max_tokens=6)])
    loop.turn()
    loop.turn()
    device.out_of_memory = when
    with caplog.at_level(logging.WARNING):
        for _ in range(25):
            loop.turn()
    assert all(tokens_of(desk, i) == continuation(PROMPT, 6) for i in (1, 2, 3))
    assert set(ends(desk).values()) == {FinishReason.LENGTH}
    assert [record.message for record in caplog.records if "too little memory" in record.message] == [
        "too little memory for step 3, with 3 tokens of 3 sequences: it is made again in parts"
    ]
    assert desk.beats()[-1].stats.num_out_of_memory == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_a_device_without_memory_for_anything_ends_the_process_after_three_were_told(depth: int) -> None:
    desk = Desk()
    loop, device = overlapped(desk, max_plans_in_flight=depth)
    device.most_tokens = 0
    desk.letters.extend([[request(1, 2, 3, 4)], *[[]] * 60, [Shutdown()]])
    with pytest.raises(WorkerBroken):
        loop.run()
    assert list(ends(desk).values()) == 3 * [FinishReason.FAILED]


def test_one_that_is_too_large_by_itself_does_not_count_among_steps_that_fail() -> None:
    desk = Desk()
    loop, device = overlapped(desk)
    for number in range(1, 6):
        device.most_tokens = 0
        desk.letters.append([request(number)])
        while number not in ends(desk):
            loop.turn()
        device.most_tokens = None
        desk.letters.append([request(100 + number)])
        while 100 + number not in ends(desk):
            loop.turn()
    reasons = [reason for _, reason in sorted(ends(desk).items())]
    assert reasons == [*5 * [FinishReason.FAILED], *5 * [FinishReason.LENGTH]]


def test_shutdown_ends_the_loop_although_a_step_is_under_way() -> None:
    desk = Desk()
    loop, _ = overlapped(desk)
    desk.letters.extend([[request(1, max_tokens=20)], [], [Shutdown()]])
    loop.run()


def test_the_trace_has_a_line_for_each_step_in_its_order_with_the_time_it_was_planned_at(
    tmp_path: Path,
) -> None:
    desk = Desk()
    path = tmp_path / "steps.jsonl"
    scheduler = Scheduler(small_config(max_plans_in_flight=2, num_blocks=32))
    loop = EngineLoop(scheduler, Device(desk), desk, lambda: desk.now_s, trace=StepTrace(path))
    desk.letters.extend([[request(1, max_tokens=3)], *[[]] * 6, [Shutdown()]])
    loop.run()
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["time_s"] for line in lines] == [0.0, 0.0, 1.0]
    assert [line["execute_s"] for line in lines] == [1.0, 1.0, 1.0]


def test_the_trace_has_the_steps_that_were_taken_back_too(tmp_path: Path) -> None:
    desk = Desk()
    path = tmp_path / "steps.jsonl"
    scheduler = Scheduler(small_config(max_plans_in_flight=2, num_blocks=32))
    device = Device(desk)
    loop = EngineLoop(scheduler, device, desk, lambda: desk.now_s, trace=StepTrace(path))
    device.out_of_memory = OutOfMemory.AT_THE_END
    desk.letters.extend([[request(1, 2, max_tokens=3)], *[[]] * 30, [Shutdown()]])
    loop.run()
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [plan.step for plan in device.plans]
    assert desk.beats()[-1].stats.num_out_of_memory == 1


def test_a_token_outside_of_the_vocabulary_is_seen_when_the_result_is_taken_in() -> None:
    class Wild(FakeWorker):
        def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
            super().execute(plan)
            drawn = {share.sequence_id: (97,) for share in plan.scheduled}
            return ModelRunnerOutput(token_ids=drawn, logprobs={}, failures={})

    desk = Desk()
    desk.letters.append([request(1)])
    scheduler = Scheduler(small_config(max_plans_in_flight=2))
    loop = EngineLoop(scheduler, CheckedWorker(Wild(4), vocab_size=97), desk, lambda: desk.now_s)
    for _ in range(4):
        loop.turn()
    assert ends(desk) == {1: FinishReason.FAILED}


def test_requests_that_come_and_go_at_any_time_get_what_they_get_one_step_at_a_time() -> None:
    def texts(depth: int) -> dict[int, list[int]]:
        desk = Desk()
        loop, _ = overlapped(desk, max_plans_in_flight=depth, num_blocks=7)
        for number in range(1, 9):
            prompt = [number, 2, 3, 4, 5, 6][: 2 + number % 5]
            desk.letters.append([_request(number, prompt, max_tokens=3 + number)])
        for _ in range(200):
            loop.turn()
        assert len(ends(desk)) == 8
        return {number: tokens_of(desk, number) for number in range(1, 9)}

    assert texts(1) == texts(2)


def _request(number: int, prompt: list[int], *, max_tokens: int) -> AddRequest:
    return request(number, prompt=prompt, max_tokens=max_tokens)


@pytest.mark.parametrize(
    ("runs_ahead", "depth"),
    [(True, 2), (False, 1)],
)
def test_two_plans_are_in_flight_where_the_device_works_by_itself(
    tiny_model: Path, runs_ahead: bool, depth: int
) -> None:
    config, _ = resolve(read_options({"model": str(tiny_model)}, {}), environment={})
    assert scheduler_config(config.scheduler, facts(runs_ahead=runs_ahead)).max_plans_in_flight == depth
