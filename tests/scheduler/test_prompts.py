"""Sequences of which more is asked than the next token: pooled vectors, and the prompt's own logprobs."""

import pytest

from scheduler.config import SchedulingPolicy
from scheduler.messages import FinishReason, PoolingParams, PoolingTask, PromptComputation, SequenceId
from scheduler.scheduler import NeverFits
from tests.fakes import continuation, make_sequence, pooled, prompt_logprobs
from tests.world import World, shares, small_config


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt * 13 + i * 7 + 1) % 89 for i in range(length)]


def pooling(computation: PromptComputation = PromptComputation.EVERY_POSITION) -> PoolingParams:
    return PoolingParams(task=PoolingTask.EMBED, prompt=computation)


def starts(world: World, sequence_id: int) -> list[int]:
    """Positions at which its shares began, in order."""
    return [s.start for plan in world.worker.plans for s in plan.scheduled if s.sequence_id == sequence_id]


def test_a_pooling_sequence_ends_with_its_vector_when_its_prompt_is_computed() -> None:
    world = World(small_config(max_num_batched_tokens=8))
    world.add(make_sequence(1, prompt(19), pooling=pooling()))
    assert world.run() == 3
    end = world.ended[SequenceId(1)]
    assert (end.finish_reason, end.token_ids, end.pooled) == (FinishReason.STOP, (), pooled(prompt(19)))
    assert end.start is not None
    assert world.scheduler.kv.pool.num_used == 0


def test_pooling_and_generating_sequences_share_a_step() -> None:
    world = World(small_config())
    world.add(make_sequence(1, prompt(5, 1), max_tokens=3), make_sequence(2, prompt(6, 2), pooling=pooling()))
    assert shares(world.step()) == {1: 5, 2: 6}
    world.run()
    assert world.tokens[SequenceId(1)] == continuation(prompt(5, 1), 3)


def test_a_pooling_prompt_may_fill_the_whole_context_window() -> None:
    world = World(small_config(max_model_len=16))
    world.add(make_sequence(1, prompt(16), pooling=pooling()))
    world.run()
    assert world.ended[SequenceId(1)].pooled == pooled(prompt(16))
    with pytest.raises(NeverFits, match="17 tokens; at most 16 fit the context window"):
        world.add(make_sequence(2, prompt(17), pooling=pooling()))


def test_a_worker_that_returns_no_vector_fails_the_sequence_rather_than_hang_it() -> None:
    world = World(small_config())
    world.add(make_sequence(1, prompt(5), pooling=pooling()))
    world.worker.silent.add(SequenceId(1))
    world.run()
    assert world.reason(1) is FinishReason.FAILED


@pytest.mark.parametrize(
    ("computation", "start"), [(PromptComputation.REUSING, 8), (PromptComputation.EVERY_POSITION, 0)]
)
def test_whether_a_cached_prefix_is_used_depends_on_what_the_pooling_reads(
    computation: PromptComputation, start: int
) -> None:
    world = World(small_config())
    world.add(make_sequence(1, prompt(9), max_tokens=1))
    world.run()
    world.add(make_sequence(2, prompt(9), pooling=pooling(computation)))
    world.run()
    assert starts(world, 2) == [start]


def test_what_a_pooling_sequence_computed_position_by_position_is_found_by_others() -> None:
    world = World(small_config())
    world.add(make_sequence(1, prompt(9), pooling=pooling()))
    world.run()
    world.add(make_sequence(2, prompt(9), max_tokens=1))
    world.run()
    assert starts(world, 2) == [8]


def test_an_indivisible_prompt_waits_for_a_step_that_has_room_for_all_of_it() -> None:
    world = World(small_config(num_blocks=32, max_num_batched_tokens=16, max_chunk_tokens=4))
    at_once = pooling(PromptComputation.AT_ONCE)
    world.add(*(make_sequence(i, prompt(10, i), pooling=at_once) for i in (1, 2, 3)))
    assert [shares(world.step()) for _ in range(3)] == [{1: 10}, {2: 10}, {3: 10}]
    assert [world.ended[SequenceId(i)].pooled for i in (1, 2, 3)] == [
        pooled(prompt(10, i)) for i in (1, 2, 3)
    ]


def test_blocks_of_an_indivisible_prompt_are_shared_with_nobody() -> None:
    world = World(small_config(num_blocks=32))
    at_once = pooling(PromptComputation.AT_ONCE)
    for number in (1, 2):
        world.add(make_sequence(number, prompt(9), pooling=at_once))
        world.run()
    assert starts(world, 2) == [0]
    assert len(world.scheduler.kv.index.main_cache) == 0


def test_an_indivisible_prompt_longer_than_a_step_is_refused_at_once() -> None:
    world = World(small_config(max_num_batched_tokens=16))
    at_once = pooling(PromptComputation.AT_ONCE)
    with pytest.raises(NeverFits, match=r"17 tokens; this model computes a prompt in one step.* at most 16"):
        world.add(make_sequence(1, prompt(17), pooling=at_once))
    world.add(make_sequence(1, prompt(16), pooling=at_once))
    world.run()


def test_an_urgent_indivisible_prompt_displaces_nobody_for_a_step_that_is_too_small_for_it() -> None:
    world = World(
        small_config(
            max_num_seqs=2, policy=SchedulingPolicy.PRIORITY, num_blocks=32, max_num_batched_tokens=10
        )
    )
    world.add(*(make_sequence(i, prompt(2, i), max_tokens=6, priority=5) for i in (1, 2)))
    world.step()
    world.add(make_sequence(3, prompt(10, 3), priority=0, pooling=pooling(PromptComputation.AT_ONCE)))
    world.step()
    assert world.num_preemptions() == 0, "one decode would remain, and 10 tokens are not left beside it"
    world.run()
    assert world.ended[SequenceId(3)].pooled == pooled(prompt(10, 3))


def test_prompt_logprobs_are_told_once_and_in_order_whatever_the_chunks() -> None:
    world = World(small_config(max_num_batched_tokens=8))
    world.add(make_sequence(1, prompt(19), num_prompt_logprobs=0))
    world.step()
    assert world.prompt_logprobs[SequenceId(1)] == prompt_logprobs(prompt(19))[:8], (
        "told with the first chunk"
    )
    world.run()
    assert world.prompt_logprobs[SequenceId(1)] == prompt_logprobs(prompt(19))
    assert world.tokens[SequenceId(1)] == continuation(prompt(19), 4)


def test_prompt_logprobs_do_not_read_the_prefix_cache_but_fill_it() -> None:
    world = World(small_config())
    for number in (1, 2):
        world.add(make_sequence(number, prompt(9), max_tokens=1, num_prompt_logprobs=2))
        world.run()
        assert world.prompt_logprobs[SequenceId(number)] == prompt_logprobs(prompt(9))
    world.add(make_sequence(3, prompt(9), max_tokens=1))
    world.run()
    assert [starts(world, i) for i in (1, 2, 3)] == [[0], [0], [8]]
    assert world.scheduler.stats().num_prefix_queries == 9, "only the third was looked up"


def test_a_preempted_prompt_tells_only_what_it_had_not_told() -> None:
    world = World(
        small_config(
            num_blocks=10, max_num_seqs=1, max_num_batched_tokens=8, policy=SchedulingPolicy.PRIORITY
        )
    )
    world.add(make_sequence(1, prompt(24, 1), priority=9, num_prompt_logprobs=0))
    world.step()
    world.add(make_sequence(2, prompt(8, 2), priority=0, max_tokens=1))
    world.run()
    assert world.num_preemptions() == 1
    assert starts(world, 1).count(0) == 2, "all of it is computed again"
    assert world.prompt_logprobs[SequenceId(1)] == prompt_logprobs(prompt(24, 1))


def test_a_preempted_decode_that_told_all_of_its_prompt_reads_the_cache_like_anybody() -> None:
    world = World(small_config(num_blocks=10, max_num_seqs=1, policy=SchedulingPolicy.PRIORITY))
    world.add(make_sequence(1, prompt(9, 1), priority=9, num_prompt_logprobs=0, max_tokens=8))
    for _ in range(3):
        world.step()
    world.add(make_sequence(2, prompt(8, 2), priority=0, max_tokens=1))
    world.run()
    assert starts(world, 1).count(0) == 1
    assert world.prompt_logprobs[SequenceId(1)] == prompt_logprobs(prompt(9, 1))
