"""Cached prefixes that the device had to give up, and that the host still keeps."""

import pytest

from scheduler.blocks.swap_space import SwapSpace
from scheduler.config import HostTier, PreemptionMode, SchedulingPolicy
from scheduler.messages import PreemptionCause, SequenceId
from tests.fakes import continuation, make_sequence
from tests.invariants import free_blocks, published
from tests.world import World, small_config

SHARED = list(range(1, 13))  # three blocks of four


def prompt(length: int, salt: int) -> list[int]:
    return [(salt * 13 + i * 7 + 1) % 89 for i in range(length)]


def with_host(**changes: object) -> World:
    return World(
        small_config(**({"num_blocks": 5, "num_host_blocks": 8, "copy_s_per_block": 1e-4} | changes))
    )


def evict(world: World, *, number: int) -> None:
    """Let somebody who needs all of the device's blocks come and go."""
    num_tokens = world.config.num_blocks * world.config.block_size - 1
    world.add(make_sequence(number, prompt(num_tokens, number), max_tokens=1))
    world.run()


def start_of(world: World, number: int, tokens: list[int], **terms: object) -> int:
    """Position at which the first share of a new sequence begins."""
    world.add(make_sequence(number, tokens, max_tokens=3, **terms))
    return next(share.start for share in world.step().scheduled if share.sequence_id == number)


def test_a_prefix_that_the_device_gave_up_comes_back_from_the_host() -> None:
    world = with_host()
    world.add(make_sequence(1, [*SHARED, 50], max_tokens=1))
    world.run()
    evict(world, number=2)
    assert start_of(world, 3, [*SHARED, 60, 61]) == 12
    assert len(world.worker.plans[-1].swap_in) == 3
    world.run()
    assert world.tokens[SequenceId(3)] == continuation([*SHARED, 60, 61], 3)
    stats = world.scheduler.stats()
    assert (stats.num_prefix_hits, stats.num_prefix_host_hits) == (12, 12)
    assert stats.num_kept_host_blocks >= 3
    assert stats.num_used_host_blocks == 0, "what only keeps a prefix is not in use"


def test_a_prefix_of_which_the_device_has_the_head_and_the_host_the_rest_is_one_prefix() -> None:
    world = with_host(num_blocks=6)
    world.add(make_sequence(1, [*SHARED, 50], max_tokens=1))
    world.run()
    world.add(make_sequence(2, prompt(17, 2), max_tokens=1))  # five blocks: three unused, two of the prefix
    world.run()
    assert start_of(world, 3, [*SHARED, 60]) == 12
    assert len(world.worker.plans[-1].swap_in) == 2
    assert world.scheduler.stats().num_prefix_host_hits == 8


def test_what_the_host_keeps_already_is_not_copied_again() -> None:
    world = with_host()
    for number in (1, 3, 5):
        world.add(make_sequence(number, [*SHARED, number], max_tokens=1))
        world.run()
        evict(world, number=number + 1)
    out = [copy for plan in world.worker.plans for copy in plan.swap_out]
    assert len(out) == 3 + 4 + 4, "the prefix once, and the first two of those who evicted it"


def test_another_salt_finds_nothing_on_the_host() -> None:
    world = with_host(num_host_blocks=20)
    world.add(make_sequence(1, [*SHARED, 50], max_tokens=1, cache_salt="a"))
    world.run()
    evict(world, number=2)
    assert start_of(world, 3, [*SHARED, 50], cache_salt="b") == 0
    world.run()
    evict(world, number=4)
    assert start_of(world, 5, [*SHARED, 50], cache_salt="a") == 12


def test_a_reset_empties_both_sides() -> None:
    world = with_host()
    world.add(make_sequence(1, [*SHARED, 50], max_tokens=1))
    world.run()
    evict(world, number=2)
    world.scheduler.reset_prefix_cache()
    assert start_of(world, 3, [*SHARED, 50]) == 0


@pytest.mark.parametrize("changes", [{"host_tier": HostTier.OFF}, {"num_host_blocks": 0}])
def test_switched_off_or_without_swap_space_nothing_is_kept(changes: dict[str, object]) -> None:
    world = with_host(**changes)
    world.add(make_sequence(1, [*SHARED, 50], max_tokens=1))
    world.run()
    evict(world, number=2)
    assert start_of(world, 3, [*SHARED, 50]) == 0
    assert not any(plan.swap_out for plan in world.worker.plans)


def test_the_host_gives_up_what_was_asked_for_longest_ago() -> None:
    world = with_host(num_blocks=4, num_host_blocks=4)
    old, asked_again = [1] * 8, [2] * 8
    for number, tokens in ((1, old), (2, asked_again)):
        world.add(make_sequence(number, [*tokens, 9], max_tokens=1))
        world.run()
    evict(world, number=3)  # the host keeps two blocks of each
    assert start_of(world, 4, [*old, 9]) == 8
    world.run()
    evict(world, number=5)  # keeps old again, and evicts the three of 3: the last two go first
    assert start_of(world, 6, [*old, 9]) == 8
    world.run()
    assert start_of(world, 7, [*asked_again, 9]) == 0


def test_what_is_given_up_by_the_device_again_is_the_last_to_go_from_the_host() -> None:
    space = SwapSpace(2)
    first, second = space.keep(0, b"first", 1), space.keep(0, b"second", 1)
    assert space.keep(0, b"first", 1) == (), "it is there already"
    assert space.keep(0, b"third", 1) == second
    assert (space.find(0, b"first"), space.find(0, b"second")) == (first, None)


def test_what_is_kept_of_one_group_is_found_of_that_one_and_whole_or_not_at_all() -> None:
    space = SwapSpace(4, num_groups=2)
    row = space.keep(1, b"state", 3)
    assert (len(row), space.find(0, b"state"), space.find(1, b"state")) == (3, None, row)
    assert space.keep(0, b"place", 1) != ()
    assert space.keep(0, b"more", 1) != ()
    assert space.find(1, b"state") is None, "one of its blocks was needed"


def test_with_every_host_block_held_nothing_is_kept() -> None:
    space = SwapSpace(2)
    held = space.take(2)
    assert space.keep(0, b"a", 1) == ()
    space.publish(0, b"held", (held[0],))
    space.give_back(held)
    assert space.find(0, b"held") == (held[0],)
    assert free_blocks(space._pool) == [held[1], held[0]], "what can be found is reused last"


def test_a_preempted_sequence_takes_the_place_of_kept_prefixes() -> None:
    world = with_host(num_blocks=4, num_host_blocks=3, preemption_mode=PreemptionMode.SWAP)
    world.add(make_sequence(1, [*SHARED, 50], max_tokens=1))
    world.run()
    evict(world, number=2)
    assert len(published(world.scheduler.kv.swap_space._kept[0])) == 3
    world.add(make_sequence(3, prompt(7, 3), max_tokens=8), make_sequence(4, prompt(7, 4), max_tokens=6))
    while not world.num_preemptions():
        world.step()
    assert world.num_swaps() == 1
    assert world.scheduler.stats().num_swap_space_full == 0
    world.run()
    assert world.tokens[SequenceId(4)] == continuation(prompt(7, 4), 6)


def test_a_step_keeps_no_more_than_what_takes_a_hundredth_of_a_second() -> None:
    world = with_host(copy_s_per_block=0.004)  # two blocks
    world.add(make_sequence(1, [*SHARED, 50], max_tokens=1))
    world.run()
    evict(world, number=2)
    assert max(len(plan.swap_out) for plan in world.worker.plans) == 2
    assert start_of(world, 3, [*SHARED, 60]) == 8, "the head of the prefix, which was used last"


def test_what_a_failed_step_was_to_copy_out_is_not_found() -> None:
    world = with_host()
    world.add(make_sequence(1, [*SHARED, 50], max_tokens=1))
    world.run()
    world.add(make_sequence(2, prompt(19, 2), max_tokens=1))
    world.worker.explode_next = True
    world.step()
    world.run()
    assert start_of(world, 3, [*SHARED, 60]) == 0
    world.run()
    assert world.tokens[SequenceId(3)] == continuation([*SHARED, 60], 3)


def test_what_a_failed_sequence_computed_is_not_found_on_the_host_either() -> None:
    world = with_host(num_blocks=6)
    world.add(make_sequence(1, [*SHARED, 50], max_tokens=1))
    world.run()
    evict(world, number=2)
    assert start_of(world, 3, [*SHARED, 60]) == 12
    world.worker.poisoned.add(SequenceId(3))
    world.run()
    assert start_of(world, 4, [*SHARED, 60]) == 0


def test_a_host_block_that_is_copied_in_is_not_copied_out_to_by_the_same_plan() -> None:
    world = with_host(num_blocks=4, num_host_blocks=3)
    world.add(make_sequence(1, [*SHARED, 50], max_tokens=1))
    world.run()
    evict(world, number=2)  # the host is full now
    assert start_of(world, 3, [*SHARED, 60]) == 12
    plan = world.worker.plans[-1]
    assert len(plan.swap_in) == 3
    assert not {copy.source for copy in plan.swap_in} & {copy.target for copy in plan.swap_out}
    world.run()
    assert world.tokens[SequenceId(3)] == continuation([*SHARED, 60], 3)


def test_a_swapped_sequence_leaves_its_prefix_to_others_when_it_is_gone() -> None:
    world = with_host(num_blocks=4, preemption_mode=PreemptionMode.SWAP)
    world.add(make_sequence(1, prompt(7, 1), max_tokens=8), make_sequence(2, prompt(7, 2), max_tokens=6))
    while not world.num_preemptions(PreemptionCause.GROWTH):
        world.step()
    world.abort(2)
    world.run()
    evict(world, number=3)
    assert start_of(world, 4, prompt(7, 2)) == 4


def test_what_a_plan_writes_over_is_copied_out_before_what_a_preempted_sequence_leaves() -> None:
    world = with_host(
        num_blocks=8,
        policy=SchedulingPolicy.PRIORITY,
        preemption_mode=PreemptionMode.SWAP,
        num_host_blocks=20,
    )
    world.add(make_sequence(1, prompt(12, 1), max_tokens=1))
    world.run()
    world.add(make_sequence(2, prompt(15, 2), max_tokens=9, priority=5))
    world.step()
    world.add(make_sequence(3, prompt(22, 3), max_tokens=1, priority=0))
    plan = world.step()
    num_kept = world.scheduler.stats().num_kept_host_blocks
    assert 0 < num_kept < len(plan.swap_out), "somebody was displaced, and cached blocks were taken as well"
    [new] = plan.new_sequences
    assert {copy.source for copy in plan.swap_out[:num_kept]} <= set(new.tables[0].block_ids)
