"""Steps for which the device has too little memory: taken back, and made again in parts."""

import pytest

from scheduler import scheduler as scheduler_module
from scheduler.config import PreemptionMode, PrefixCaching
from scheduler.messages import (
    FinishReason,
    PoolingParams,
    PoolingTask,
    PromptComputation,
    SequenceId,
)
from scheduler.sequence import Sequence
from scheduler.step import budget
from scheduler.step.budget import StepLimit
from tests.fakes import OutOfMemory, continuation, make_sequence, pooled
from tests.world import World, shares, small_config


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt * 13 + i * 7 + 1) % 89 for i in range(length)]


def roomy(depth: int = 2, **changes: object) -> World:
    settings = {"num_blocks": 64, "max_num_batched_tokens": 256, "max_model_len": 256}
    return World(small_config(**(settings | {"max_plans_in_flight": depth} | changes)))


@pytest.fixture
def chunks_may_be_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "SMALLEST_CHUNK_TOKENS", 1)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("when", OutOfMemory)
def test_a_step_that_ran_out_of_memory_costs_nobody_a_token(when: OutOfMemory, depth: int) -> None:
    world = roomy(depth)
    world.add(*(make_sequence(i, prompt(70, i), max_tokens=6) for i in (1, 2, 3)))
    world.worker.out_of_memory = when
    world.run()
    assert all(world.tokens[SequenceId(i)] == continuation(prompt(70, i), 6) for i in (1, 2, 3))
    assert world.scheduler.stats().num_out_of_memory == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_step_has_half_as_many_tokens(depth: int) -> None:
    world = roomy(depth)
    world.add(make_sequence(1, prompt(100, 1)), make_sequence(2, prompt(100, 2)))
    world.worker.out_of_memory = OutOfMemory.AFTER_RELEASE
    while not world.scheduler.stats().num_out_of_memory:
        world.step()
    assert sum(shares(world.worker.plans[0]).values()) == 200
    assert shares(world.step()) == {1: 100}


@pytest.mark.parametrize("most_tokens", [3, 20, 90])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.usefixtures("chunks_may_be_tiny")
def test_a_device_with_memory_for_small_steps_only_serves_everybody(depth: int, most_tokens: int) -> None:
    world = roomy(depth)
    world.worker.most_tokens = most_tokens
    world.add(*(make_sequence(i, prompt(60, i), max_tokens=8) for i in (1, 2, 3, 4)))
    world.run()
    assert all(world.tokens[SequenceId(i)] == continuation(prompt(60, i), 8) for i in (1, 2, 3, 4))


def test_the_tokens_that_were_told_are_kept_and_earlier_blocks_are_found_again() -> None:
    world = roomy(1)
    world.add(make_sequence(1, prompt(70, 1), max_tokens=12), make_sequence(2, prompt(70, 2), max_tokens=12))
    for _ in range(8):
        world.step()
    world.worker.out_of_memory = OutOfMemory.AT_THE_END
    world.step()
    again = world.step()
    assert again.new_sequences[0].token_ids == (*prompt(70, 1), *continuation(prompt(70, 1), 8))
    assert again.scheduled[0].start == 76, "all blocks that earlier steps have filled"
    world.run()
    assert world.tokens[SequenceId(1)] == continuation(prompt(70, 1), 12)


def test_without_a_prefix_cache_everything_is_computed_again() -> None:
    world = roomy(2, prefix_caching=PrefixCaching.OFF)
    world.add(make_sequence(1, prompt(70, 1), max_tokens=12), make_sequence(2, prompt(70, 2), max_tokens=12))
    for _ in range(5):
        world.step()
    world.worker.out_of_memory = OutOfMemory.AT_THE_END
    world.run()
    assert all(world.tokens[SequenceId(i)] == continuation(prompt(70, i), 12) for i in (1, 2))


def test_what_a_plan_that_was_taken_back_should_have_written_is_not_found() -> None:
    world = roomy(1)
    world.add(make_sequence(1, prompt(70, 1)), make_sequence(2, prompt(70, 2)))
    world.worker.out_of_memory = OutOfMemory.AFTER_RELEASE
    world.step()
    assert world.scheduler.get_request_counts() == (0, 2, 0)
    world.abort(1, 2)
    world.add(make_sequence(3, prompt(70, 1)))
    assert world.step().scheduled[0].start == 0


def test_one_that_is_alone_in_the_smallest_step_fails_alone_and_says_why() -> None:
    world = roomy(2)
    world.worker.most_tokens = 30
    world.add(make_sequence(1, prompt(200, 1)), make_sequence(2, prompt(30, 2)))
    world.run()
    assert world.reason(1) is FinishReason.FAILED
    assert world.ended[SequenceId(1)].message == "too little memory"
    assert world.reason(2) is FinishReason.LENGTH


def test_one_whose_end_was_seen_too_late_is_not_told_twice() -> None:
    tokens = continuation(prompt(10, 1), 3)
    world = roomy(2)
    world.add(make_sequence(1, prompt(10, 1), max_tokens=9, stop_token_ids=(tokens[1],)))
    world.step()
    world.step()
    world.worker.out_of_memory = OutOfMemory.AT_THE_END
    world.run()
    assert world.tokens[SequenceId(1)] == tokens[:2]
    assert world.reason(1) is FinishReason.STOP


def test_one_that_was_swapped_out_by_a_plan_that_was_taken_back_is_computed_again() -> None:
    world = World(
        small_config(
            num_blocks=4, max_plans_in_flight=2, preemption_mode=PreemptionMode.SWAP, num_host_blocks=8
        )
    )
    world.add(make_sequence(1, prompt(7, 1), max_tokens=8), make_sequence(2, prompt(7, 2), max_tokens=6))
    while not world.num_swaps():
        world.worker.out_of_memory = OutOfMemory.AFTER_RELEASE if len(world.worker.plans) == 2 else None
        world.step()
    world.learn_all()
    assert world.scheduler.get_request_counts().swapped == 0
    world.run()
    assert world.tokens[SequenceId(2)] == continuation(prompt(7, 2), 6)


def at_once(number: int, length: int) -> Sequence:
    pooling = PoolingParams(task=PoolingTask.EMBED, prompt=PromptComputation.AT_ONCE)
    return make_sequence(number, prompt(length, number), pooling=pooling)


def test_prompts_that_must_be_computed_at_once_are_computed_one_by_one_then() -> None:
    world = roomy(1)
    world.worker.most_tokens = 110
    world.add(at_once(1, 100), at_once(2, 20), at_once(3, 110), at_once(4, 120), at_once(5, 9))
    world.run()
    assert world.reason(4) is FinishReason.FAILED, "there is no smaller step for it"
    for number, length in ((1, 100), (2, 20), (3, 110), (5, 9)):
        assert world.ended[SequenceId(number)].pooled == pooled(prompt(length, number))


def test_the_limit_is_halved_at_once_and_doubled_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_STEPS_UNTIL_DOUBLED", 3)
    limit = StepLimit(1000)
    limit.did_not_fit(300)
    assert limit.max_tokens == 150
    seen = []
    for _ in range(12):
        limit.fitted()
        seen.append(limit.max_tokens)
    assert seen == [150, 150, 300, 300, 300, 600, 600, 600, 1000, 1000, 1000, 1000]
    for _ in range(20):
        limit.did_not_fit(1000)
    assert limit.max_tokens == 1
