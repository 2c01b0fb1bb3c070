"""Share of prompts in a step: the first of a crowd do not wait for the last."""

import pytest

from scheduler.config import SchedulingPolicy
from scheduler.messages import FinishReason, PoolingParams, PoolingTask, PromptComputation, WaitReason
from tests.fakes import make_sequence
from tests.world import World, shares, small_config

AT_ONCE = PoolingParams(task=PoolingTask.EMBED, prompt=PromptComputation.AT_ONCE)


def prompt(length: int, salt: int) -> list[int]:
    return [(salt * 13 + i * 7 + 1) % 89 for i in range(length)]


def limited(max_prefill_tokens: int) -> World:
    return World(small_config(num_blocks=64, max_prefill_tokens=max_prefill_tokens))


def test_of_a_crowd_each_has_its_first_token_as_soon_as_its_own_prompt_is_computed() -> None:
    world = limited(4)
    world.add(*(make_sequence(i, prompt(4, i), max_tokens=9) for i in (1, 2, 3)))
    assert shares(world.step()) == {1: 4}
    assert world.scheduler.stats().wait_reason is WaitReason.TOKENS
    assert shares(world.step()) == {1: 1, 2: 4}
    assert shares(world.step()) == {1: 1, 2: 1, 3: 4}


def test_prompts_share_their_part_of_a_step_in_order_of_rank() -> None:
    world = limited(6)
    world.add(*(make_sequence(i, prompt(5, i), max_tokens=9) for i in (1, 2)))
    assert shares(world.step()) == {1: 5, 2: 1}
    assert shares(world.step()) == {1: 1, 2: 4}


def test_an_urgent_prompt_takes_its_share_out_of_the_same_part() -> None:
    strict = SchedulingPolicy.PRIORITY
    world = World(small_config(num_blocks=64, policy=strict, max_num_seqs=1, max_prefill_tokens=4))
    world.add(make_sequence(1, prompt(4, 1), max_tokens=9, priority=1))
    world.step()
    world.add(make_sequence(2, prompt(9, 2), max_tokens=2))
    assert [shares(world.step()) for _ in range(3)] == [{2: 4}, {2: 4}, {2: 1}]


@pytest.mark.parametrize("max_prefill_tokens", [0, 16])
def test_without_a_limit_all_prompts_share_a_step(max_prefill_tokens: int) -> None:
    world = limited(max_prefill_tokens)
    world.add(*(make_sequence(i, prompt(5, i)) for i in (1, 2, 3)))
    assert shares(world.step()) == {1: 5, 2: 5, 3: 5}


def test_beside_a_reply_a_prompt_whose_log_probabilities_are_reported_gets_few_tokens_of_a_step() -> None:
    world = World(small_config(num_blocks=64, max_scored_tokens=3))
    world.add(make_sequence(1, prompt(8, 1), max_tokens=9, num_prompt_logprobs=2))
    world.add(make_sequence(4, prompt(8, 4), max_tokens=1, num_prompt_logprobs=2))
    assert shares(world.step()) == {1: 8, 4: 8}, "nobody waits for a token"
    world.add(make_sequence(2, prompt(8, 2), max_tokens=9, num_prompt_logprobs=2))
    world.add(make_sequence(3, prompt(8, 3), max_tokens=9))
    assert shares(world.step()) == {1: 1, 2: 3, 3: 8}
    assert [shares(world.step())[2] for _ in range(3)] == [3, 2, 1]


def test_a_prompt_that_is_computed_at_once_may_be_longer_than_the_part_of_prompts() -> None:
    world = limited(4)
    world.add(
        *(make_sequence(i, prompt(length, i), pooling=AT_ONCE) for i, length in ((1, 3), (2, 9), (3, 2)))
    )
    assert [shares(world.step()) for _ in range(3)] == [{1: 3}, {2: 9}, {3: 2}]
    world.run()
    assert {world.reason(i) for i in (1, 2, 3)} == {FinishReason.STOP}


def test_urgent_prompts_that_keep_coming_do_not_stop_an_earlier_one_of_their_priority() -> None:
    world = World(
        small_config(num_blocks=99, policy=SchedulingPolicy.PRIORITY, max_num_seqs=9, max_prefill_tokens=4)
    )
    world.add(make_sequence(1, prompt(4, 1), max_tokens=40, priority=5))
    world.step()
    world.add(make_sequence(2, prompt(12, 2), max_tokens=9))
    given = []
    for late in range(10, 15):
        given.append(shares(world.step()))
        world.add(make_sequence(late, prompt(4, late), max_tokens=9))
    assert [share.get(2) for share in given] == [4, 4, 4, 1, 1]
    assert [given[step].get(10) for step in (3, 4)] == [4, 1]


def test_an_urgent_prompt_displaces_at_once_where_the_part_of_prompts_is_enough_for_it_too() -> None:
    world = World(
        small_config(
            policy=SchedulingPolicy.PRIORITY, max_num_seqs=2, max_prefill_tokens=6, max_chunk_tokens=2
        )
    )
    world.add(make_sequence(1, prompt(2, 1), max_tokens=9, priority=5))
    world.add(make_sequence(2, prompt(12, 2), max_tokens=9))
    world.step()
    world.add(make_sequence(3, prompt(4, 3), max_tokens=9))
    assert shares(world.step()) == {2: 4, 3: 2}


def test_what_a_limit_for_one_prompt_leaves_is_shared_by_those_that_are_there() -> None:
    world = World(
        small_config(num_blocks=200, max_model_len=400, max_num_batched_tokens=64, max_chunk_tokens=8)
    )
    world.add(*(make_sequence(i, prompt(100, i)) for i in (1, 2)))
    assert shares(world.step()) == {1: 32, 2: 32}
    world.add(make_sequence(3, prompt(3, 3)), make_sequence(4, prompt(100, 4)))
    assert shares(world.step()) == {1: 16, 2: 16, 3: 3, 4: 29}
