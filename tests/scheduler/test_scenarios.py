"""The sequence diagrams that people know of other schedulers, step by step, and the traps found in those."""

import pytest

from scheduler.config import PrefixCaching, SchedulingPolicy
from scheduler.messages import (
    FinishReason,
    PoolingParams,
    PoolingTask,
    PromptComputation,
    SequenceId,
    WaitReason,
)
from scheduler.prefix_keys import root_key
from scheduler.step import budget
from tests.fakes import continuation, make_sequence
from tests.world import World, shares, small_config


def prompt(length: int, salt: int = 0) -> list[int]:
    """Different for each salt from the first token on, so that nothing is shared by chance."""
    return [(salt * 13 + i * 7 + 1) % 89 for i in range(length)]


# The five scenarios.


def test_a_new_request_gets_all_its_blocks_is_computed_and_joins_the_line_in_one_step() -> None:
    world = World(small_config())
    world.add(make_sequence(1, prompt(6)))
    assert world.scheduler.get_request_counts() == (0, 1, 0)
    plan = world.step()
    (new,) = plan.new_sequences
    assert (len(new.tables[0].block_ids), shares(plan)) == (2, {1: 6})
    assert world.scheduler.get_request_counts() == (1, 0, 0)
    assert len(world.tokens[SequenceId(1)]) == 1


def test_a_decode_takes_a_block_whenever_its_last_one_is_full_and_gives_all_back_at_its_end() -> None:
    world = World(small_config())
    world.add(make_sequence(1, prompt(6), max_tokens=8))
    plans = [world.step() for _ in range(8)]
    assert [len(plan.new_blocks.get(SequenceId(1), ((),))[0]) for plan in plans] == [0, 0, 0, 1, 0, 0, 0, 1]
    assert world.scheduler.kv.pool.num_used == 0
    assert world.scheduler.schedule(now_s=9.0).is_empty


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_whoever_is_last_in_line_and_lacks_a_block_goes_itself_and_does_not_come_back_in_the_same_step(
    policy: SchedulingPolicy,
) -> None:
    world = World(small_config(num_blocks=4, policy=policy))
    world.add(make_sequence(1, prompt(9, 1), max_tokens=3), make_sequence(2, prompt(4, 2), max_tokens=3))
    world.step()
    plan = world.step()
    (preemption,) = plan.preemptions
    assert (preemption.sequence_id, preemption.beneficiary) == (2, 2)
    assert shares(plan) == {1: 1}
    assert not plan.new_sequences
    world.run()
    assert world.tokens[SequenceId(2)] == continuation(prompt(4, 2), 3)


def test_a_long_prompt_is_computed_in_equal_chunks_and_draws_with_the_last() -> None:
    world = World(small_config(num_blocks=300, max_num_batched_tokens=256, max_model_len=2048))
    world.add(make_sequence(1, [i % 89 for i in range(1024)], max_tokens=2))
    plans = [world.step() for _ in range(5)]
    assert [(s.start, s.num_tokens, s.samples) for plan in plans for s in plan.scheduled] == [
        (0, 256, False),
        (256, 256, False),
        (512, 256, False),
        (768, 256, True),
        (1024, 1, True),
    ]


# Order.


def test_several_prompts_may_be_under_way_and_the_earlier_is_always_further() -> None:
    world = World(small_config(num_blocks=64, max_num_batched_tokens=12, max_chunk_tokens=5))
    world.add(*(make_sequence(i, prompt(11, i), max_tokens=1) for i in (1, 2, 3)))
    assert [shares(world.step()) for _ in range(3)] == [
        {1: 5, 2: 5, 3: 2},
        {1: 5, 2: 5, 3: 2},
        {1: 1, 2: 1, 3: 7},
    ]


def test_a_short_prompt_does_not_overtake_an_indivisible_one_for_which_the_step_is_too_full() -> None:
    at_once = PoolingParams(task=PoolingTask.EMBED, prompt=PromptComputation.AT_ONCE)
    world = World(small_config(num_blocks=64, max_bypasses=9))
    world.add(*(make_sequence(i, prompt(9, i), pooling=at_once) for i in (1, 2)))
    world.add(make_sequence(3, prompt(2, 3), max_tokens=1))
    assert shares(world.step()) == {1: 9}
    assert world.scheduler.stats().wait_reason is WaitReason.TOKENS
    assert shares(world.step()) == {2: 9, 3: 2}


def test_one_that_is_too_long_to_be_looked_up_beside_the_head_passes_it_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget, "_MOST_HASHED_TOKENS", 100)
    world = World(small_config(num_blocks=40, max_num_batched_tokens=200, max_model_len=200, max_bypasses=8))
    world.add(make_sequence(1, prompt(100), max_tokens=50))
    world.step()
    world.add(make_sequence(2, prompt(80, 2)), make_sequence(3, prompt(98)))
    assert shares(world.step()) == {1: 1}
    assert shares(world.step()) == {1: 1, 3: 2}


def test_preempting_one_that_stands_elsewhere_in_the_line_skips_nobody_of_it() -> None:
    """The oldest is the least urgent; the one who arrived last must have its share all the same."""
    world = World(small_config(num_blocks=6, policy=SchedulingPolicy.PRIORITY))
    world.add(make_sequence(1, prompt(8, 1), max_tokens=9, priority=9))
    world.step()
    world.add(
        make_sequence(2, prompt(7, 2), max_tokens=9, priority=0),
        make_sequence(3, prompt(3, 3), max_tokens=9, priority=1),
    )
    world.step()
    while not world.num_preemptions():
        plan = world.step()
    assert [preemption.sequence_id for preemption in plan.preemptions] == [1]
    assert shares(plan) == {2: 1, 3: 1}


def test_a_priority_is_not_read_under_first_come_first_served() -> None:
    world = World(small_config(max_num_seqs=1))
    world.add(make_sequence(1, prompt(2, 1), priority=9), make_sequence(2, prompt(2, 2), priority=-9))
    world.run()
    assert list(world.ended) == [1, 2]
    assert world.num_preemptions() == 0


def test_nobody_is_preempted_where_all_have_room() -> None:
    world = World(small_config(num_blocks=64, policy=SchedulingPolicy.PRIORITY, max_num_seqs=4))
    world.add(*(make_sequence(i, prompt(5, i), max_tokens=20, priority=-i) for i in range(4)))
    world.run()
    assert world.num_preemptions() == 0


# Counts.


def test_counts_follow_every_arrival_and_every_end() -> None:
    world = World(small_config(num_blocks=64, max_num_seqs=3))
    seen = []
    world.add(*(make_sequence(i, prompt(2, i), max_tokens=i) for i in range(1, 6)))
    while world.scheduler.has_unfinished_requests:
        world.step()
        seen.append((world.scheduler.get_request_counts()[:2], len(world.ended)))
    assert seen == [((2, 2), 1), ((2, 1), 2), ((2, 0), 3), ((2, 0), 3), ((1, 0), 4), ((1, 0), 4), ((0, 0), 5)]


def test_who_waits_for_long_is_counted_as_looked_up_once_and_again_not_when_it_returns() -> None:
    world = World(small_config(num_blocks=4, max_num_seqs=2))
    world.add(make_sequence(1, prompt(7, 1), max_tokens=8), make_sequence(2, prompt(7, 2), max_tokens=4))
    world.add(make_sequence(3, prompt(9, 3), max_tokens=1))
    world.run()
    assert world.num_preemptions()
    assert world.scheduler.stats().num_prefix_queries == 7 + 7 + 9
    assert world.scheduler.stats().num_prefix_hits == 0


def test_without_a_prefix_cache_nobody_is_counted_as_looked_up() -> None:
    world = World(small_config(prefix_caching=PrefixCaching.OFF))
    world.add(make_sequence(1, prompt(9)))
    world.run()
    assert world.scheduler.stats().num_prefix_queries == 0


def test_an_adapter_of_one_that_runs_but_has_no_share_of_the_step_keeps_its_place() -> None:
    world = World(
        small_config(
            num_blocks=64, max_num_batched_tokens=8, max_adapters=1, policy=SchedulingPolicy.PRIORITY
        )
    )
    world.add(make_sequence(1, prompt(20, 1), adapter="x", priority=9))
    world.step()
    world.add(make_sequence(2, prompt(8, 2), priority=0))
    assert shares(world.step()) == {2: 8}
    world.add(make_sequence(3, prompt(2, 3), adapter="y", priority=0))
    assert 3 not in shares(world.step())
    world.run()


# What is left behind.


def test_a_reset_while_sequences_run_spares_their_blocks_and_hides_what_they_computed() -> None:
    world = World(small_config())
    world.add(make_sequence(1, prompt(9), max_tokens=6))
    world.step()
    world.scheduler.reset_prefix_cache()
    world.add(make_sequence(2, prompt(9), max_tokens=1))
    assert world.step().scheduled[-1].start == 0
    world.run()
    assert world.tokens[SequenceId(1)] == continuation(prompt(9), 6)


def test_a_block_is_not_found_under_what_it_held_before_it_was_reused() -> None:
    world = World(small_config(num_blocks=3))
    for number, salt in enumerate((1, 2, 1)):
        world.add(make_sequence(number, prompt(9, salt), max_tokens=1))
        assert world.step().scheduled[0].start == 0
        world.run()


@pytest.mark.parametrize("end", ["finish", "abort", "poison", "explode", "expire"])
def test_nothing_is_kept_of_whoever_has_ended_however_it_ended(end: str) -> None:
    world = World(small_config(num_blocks=5, max_plans_in_flight=2, num_host_blocks=4))
    world.add(*(make_sequence(i, prompt(7, i), max_tokens=6) for i in (1, 2, 3)))
    for _ in range(4):
        world.step()
    if end == "abort":
        world.abort(1, 2, 3)
    elif end == "poison":
        world.worker.poisoned.update(SequenceId(i) for i in (1, 2, 3))
    elif end == "explode":
        world.worker.explode_next = True
    elif end == "expire":
        world.scheduler.finish_requests([SequenceId(i) for i in (1, 2, 3)], FinishReason.EXPIRED)
        world._take(world.scheduler.take_outputs())
    world.run()
    scheduler = world.scheduler
    assert world.ended.keys() == {1, 2, 3}
    left = [scheduler._sequences, scheduler._outputs, list(scheduler._in_flight)]
    left += [scheduler.running_sequences(), scheduler.waiting_sequences()]
    left += [scheduler._drafts.offers, scheduler._shares.encoder_cache._held]
    assert not any(left)
    assert scheduler.kv.pool.num_used == scheduler.kv.swap_space.num_used == 0
    scheduler.schedule(now_s=99.0)
    assert not scheduler._failed_in_flight


def test_no_salt_can_be_made_to_look_like_an_adapter() -> None:
    assert len({root_key("ab", ""), root_key("a", "b"), root_key("", "ab"), root_key("b", "a")}) == 4
