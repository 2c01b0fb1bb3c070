"""The tail of a prompt, for siblings that come in a later step: a copy of the block it is in."""

import pytest

from scheduler.blocks.kv_cache_manager import KVCacheManager
from scheduler.config import PrefixCaching
from scheduler.messages import BlockCopy, SequenceId
from scheduler.sequence import Sequence
from tests.fakes import continuation, make_sequence
from tests.invariants import free_blocks
from tests.world import World, shares, small_config

PROMPT = list(range(1, 12))  # two full blocks of four, and a tail of two tokens before the last


def siblings(*numbers: int, prompt: list[int] = PROMPT, max_tokens: int = 6) -> list[Sequence]:
    return [make_sequence(number, prompt, max_tokens=max_tokens, seed=number) for number in numbers]


def test_a_sibling_of_a_later_step_computes_one_token() -> None:
    world = World(small_config())
    world.add(*siblings(1))
    world.step()
    world.add(*siblings(2))
    plan = world.step()
    assert shares(plan) == {1: 1, 2: 1}
    (copy,) = plan.copies
    first, second = world.scheduler.running_sequences()
    assert copy == BlockCopy(first.tables[0].block_ids[2], second.tables[0].block_ids[2])
    assert first.tables[0].block_ids[:2] == second.tables[0].block_ids[:2], (
        "full blocks are shared, not copied"
    )
    world.run()
    for number in (1, 2):
        assert world.tokens[SequenceId(number)] == continuation(PROMPT, 6)
    assert world.scheduler.stats().num_prefix_hits == 10


def test_a_sibling_of_the_same_step_computes_the_tail_itself() -> None:
    world = World(small_config())
    world.add(*siblings(1, 2))
    plan = world.step()
    assert shares(plan) == {1: 11, 2: 3}
    assert not plan.copies


@pytest.mark.parametrize(("length", "num_copies"), [(9, 0), (10, 1), (12, 1), (2, 1), (1, 0)])
def test_a_tail_is_what_lies_between_full_blocks_and_the_last_token(length: int, num_copies: int) -> None:
    world = World(small_config())
    prompt = [*PROMPT[:9], 70, 71, 72] if length > 9 else PROMPT
    world.add(*siblings(1, prompt=prompt[:length]))
    world.step()
    world.add(*siblings(2, prompt=prompt[:length]))
    plan = world.step()
    assert len(plan.copies) == num_copies
    assert shares(plan)[2] == 1
    world.run()
    assert world.tokens[SequenceId(2)] == continuation(prompt[:length], 6)


def test_whoever_got_a_copy_passes_it_on() -> None:
    world = World(small_config(max_num_seqs=2))
    world.add(*siblings(1, max_tokens=2))
    world.step()
    world.add(*siblings(2, 3, max_tokens=8))
    copies = [copy for _ in range(4) for copy in world.step().copies]
    assert len(copies) == 2
    assert copies[1].source == copies[0].target, "the first one has ended"
    world.run()
    assert world.tokens[SequenceId(3)] == continuation(PROMPT, 8)


def test_a_prompt_that_differs_in_its_last_token_only_has_the_same_tail() -> None:
    world = World(small_config())
    world.add(*siblings(1))
    world.step()
    world.add(*siblings(2, prompt=[*PROMPT[:-1], 80]))
    assert shares(world.step())[2] == 1
    world.run()
    assert world.tokens[SequenceId(2)] == continuation([*PROMPT[:-1], 80], 6)


@pytest.mark.parametrize(
    ("changes", "salt"), [({}, "another"), ({"prefix_caching": PrefixCaching.OFF}, ""), ({}, "")]
)
def test_salt_and_switch_hold_for_tails_too(changes: dict[str, object], salt: str) -> None:
    world = World(small_config(**changes))
    world.add(*siblings(1))
    world.step()
    world.add(make_sequence(2, PROMPT, cache_salt=salt))
    assert bool(world.step().copies) == (not changes and not salt)


def test_a_reset_makes_tails_unfindable() -> None:
    world = World(small_config())
    world.add(*siblings(1))
    world.step()
    world.scheduler.reset_prefix_cache()
    world.add(*siblings(2))
    assert not world.step().copies


def test_the_tail_of_a_failed_step_is_not_found() -> None:
    world = World(small_config())
    world.add(*siblings(1))
    world.worker.explode_next = True
    world.step()
    world.add(*siblings(2))
    assert not world.step().copies


def test_a_tail_that_nobody_holds_any_more_is_computed_again() -> None:
    world = World(small_config())
    world.add(*siblings(1))
    world.step()
    world.abort(1)
    world.add(*siblings(2))
    plan = world.step()
    assert not plan.copies
    assert shares(plan) == {2: 3}


def test_the_source_of_a_copy_is_given_to_nobody_before_the_plan_is_complete() -> None:
    """Else what is copied in for another one would come before it was read."""
    kv = KVCacheManager(small_config(num_blocks=7))
    first, second = siblings(1, 2)
    kv.allocate(first, kv.demand(first))
    kv.index.publish(first, 0, 11)
    kv.complete_plan()
    source = first.tables[0].block_ids[2]
    arrivals = kv.allocate(second, kv.demand(second))
    assert arrivals.copies == [BlockCopy(source, second.tables[0].block_ids[2])]
    kv.free(first)
    third = make_sequence(3, list(range(40, 52)))
    kv.allocate(third, kv.demand(third))
    assert source not in third.tables[0].block_ids
    kv.complete_plan()
    assert free_blocks(kv.pool)[0] == source
