"""Preempted sequences whose KV waits in host memory."""

from collections import Counter

import pytest

from scheduler.config import PreemptionMode, PrefixCaching, SchedulingPolicy
from scheduler.messages import FinishReason, SequenceId, TimeLimits
from tests.fakes import continuation, make_sequence
from tests.invariants import free_blocks
from tests.world import World, small_config


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt * 13 + i * 7 + 1) % 89 for i in range(length)]


def crowded(**changes: object) -> World:
    """Two sequences of seven tokens in four blocks of four: in the third step one has to go."""
    settings = {"num_blocks": 4, "preemption_mode": PreemptionMode.SWAP, "num_host_blocks": 8}
    world = World(small_config(**(settings | changes)))
    world.add(make_sequence(1, prompt(7, 1), max_tokens=8), make_sequence(2, prompt(7, 2), max_tokens=6))
    while not world.num_preemptions():
        world.step()
    return world


def test_a_swapped_sequence_returns_without_computing_anything_again() -> None:
    world = crowded()
    assert world.num_swaps() == 1
    assert world.scheduler.get_request_counts() == (1, 0, 1)
    world.run()
    assert world.tokens[SequenceId(2)] == continuation(prompt(7, 2), 6)
    positions = [s.start for plan in world.worker.plans for s in plan.scheduled if s.sequence_id == 2]
    assert len(positions) == len(set(positions)), "no position was computed twice"
    assert world.scheduler.stats().num_recomputed_tokens == 0
    assert world.scheduler.kv.swap_space.num_used == 0


def test_blocks_that_the_prefix_cache_still_holds_are_not_copied_in() -> None:
    world = crowded()
    out = [copy for plan in world.worker.plans for copy in plan.swap_out]
    world.abort(1)
    world.run()
    back = [copy for plan in world.worker.plans for copy in plan.swap_in]
    assert len(out) == 2
    assert len(back) == 1, "its first block was found, though nobody held it"


def test_without_room_in_the_swap_space_it_recomputes_and_that_is_counted() -> None:
    world = crowded(num_host_blocks=1)
    assert world.num_swaps() == 0
    assert world.scheduler.stats().num_swap_space_full == 1
    world.run()
    assert world.tokens[SequenceId(2)] == continuation(prompt(7, 2), 6)


@pytest.mark.parametrize(("copy_s_per_block", "num_swaps"), [(0.0001, 1), (100.0, 0)])
def test_auto_takes_whatever_costs_less(copy_s_per_block: float, num_swaps: int) -> None:
    world = World(
        small_config(
            num_blocks=8,
            max_num_batched_tokens=64,
            preemption_mode=PreemptionMode.AUTO,
            num_host_blocks=8,
            copy_s_per_block=copy_s_per_block,
        )
    )
    for number in range(12):  # steps of many sizes, from which the cost of a token is learnt
        world.add(make_sequence(100 + number, prompt(3 * (number % 7) + 1, number), max_tokens=2))
        world.run()
    world.add(make_sequence(1, prompt(15, 30), max_tokens=8), make_sequence(2, prompt(15, 31), max_tokens=6))
    while not world.num_preemptions():
        world.step()
    assert world.num_swaps() == num_swaps
    world.run()
    assert world.tokens[SequenceId(2)] == continuation(prompt(15, 31), 6)


def test_an_abort_while_swapped_frees_the_host_blocks() -> None:
    world = crowded()
    world.abort(2)
    assert world.scheduler.kv.swap_space.num_used == 0
    assert world.reason(2) is FinishReason.ABORTED


def test_a_deadline_while_swapped_frees_the_host_blocks() -> None:
    world = World(
        small_config(num_blocks=4, preemption_mode=PreemptionMode.SWAP, num_host_blocks=8, max_num_seqs=2)
    )
    limits = TimeLimits(total_s=4.0)
    world.add(make_sequence(1, prompt(7, 1), max_tokens=9))
    world.add(make_sequence(2, prompt(7, 2), max_tokens=9, time_limits=limits))
    world.run()
    assert world.reason(2) is FinishReason.EXPIRED
    assert world.num_swaps() == 1
    assert world.scheduler.kv.swap_space.num_used == 0


def test_if_the_step_fails_that_was_to_copy_out_the_sequence_recomputes() -> None:
    world = World(small_config(num_blocks=4, preemption_mode=PreemptionMode.SWAP, num_host_blocks=8))
    world.add(make_sequence(1, prompt(7, 1), max_tokens=8), make_sequence(2, prompt(7, 2), max_tokens=6))
    for _ in range(2):
        world.step()
    assert not world.num_swaps()
    world.worker.explode_next = True
    world.step()
    assert world.num_swaps() == 1
    assert world.reason(1) is FinishReason.FAILED
    assert world.scheduler.kv.swap_space.num_used == 0
    world.run()
    assert world.tokens[SequenceId(2)] == continuation(prompt(7, 2), 6)


def test_a_swapped_sequence_returns_before_later_ones_of_its_priority() -> None:
    world = crowded()
    world.add(make_sequence(3, prompt(2, 3), max_tokens=1))
    num_plans = len(world.worker.plans)
    world.run()
    admitted = [new.sequence_id for plan in world.worker.plans[num_plans:] for new in plan.new_sequences]
    assert admitted == [2, 3]


def test_an_urgent_one_may_be_swapped_in_by_displacing_another_in_the_same_step() -> None:
    world = World(
        small_config(
            num_blocks=6,
            max_num_seqs=2,
            policy=SchedulingPolicy.PRIORITY,
            preemption_mode=PreemptionMode.SWAP,
            num_host_blocks=7,
        )
    )
    world.add(*(make_sequence(i, prompt(9, i), max_tokens=30, priority=i) for i in (1, 2, 3)))
    for number in range(10, 60):
        world.step()
        if number % 7 == 0:
            world.add(make_sequence(number, prompt(9, number), max_tokens=3, priority=0))
    world.run()
    for i in (1, 2, 3):
        tokens = world.tokens[SequenceId(i)]
        assert tokens == continuation(prompt(9, i), 30)[: len(tokens)]
    assert world.num_swaps() >= 3


@pytest.mark.parametrize("caching", PrefixCaching)
def test_only_tokens_that_are_computed_again_count_as_recomputed(caching: PrefixCaching) -> None:
    """With a prefix cache most of what was thrown away is found again."""
    world = crowded(preemption_mode=PreemptionMode.RECOMPUTE, prefix_caching=caching)
    world.run()
    computed = Counter(
        (share.sequence_id, position)
        for plan in world.worker.plans
        for share in plan.scheduled
        for position in range(share.start, share.start + share.num_tokens)
    )
    num_again = sum(num - 1 for num in computed.values())
    assert world.scheduler.stats().num_recomputed_tokens == num_again
    assert num_again > 0 or caching is PrefixCaching.ON


@pytest.mark.parametrize("caching", PrefixCaching)
def test_blocks_are_copied_out_in_the_order_in_which_others_get_them(caching: PrefixCaching) -> None:
    world = World(
        small_config(preemption_mode=PreemptionMode.SWAP, num_host_blocks=8, prefix_caching=caching)
    )
    world.add(make_sequence(1, prompt(14, 1), max_tokens=9), make_sequence(2, prompt(14, 2), max_tokens=9))
    while not world.num_swaps():
        plan = world.step()
    sources = [copy.source for copy in plan.swap_out]
    assert len(sources) == 4
    taken = [block for (blocks,) in plan.new_blocks.values() for block in blocks]
    assert sources[: len(taken)] == taken, "written by this very plan"
    left = [block for block in free_blocks(world.scheduler.kv.pool) if block in sources]
    assert sources[len(taken) :] == left
