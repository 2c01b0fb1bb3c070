"""Models whose layers all have a sliding window: a sequence holds what the window reaches, and no more."""

import pytest

from scheduler.config import (
    Batching,
    Displacement,
    HostTier,
    PreemptionMode,
    PrefixCaching,
    SchedulingPolicy,
)
from scheduler.group_places import most_blocks, places_of
from scheduler.messages import FinishReason, SequenceId
from scheduler.scheduler import NeverFits
from tests.fakes import continuation, make_sequence
from tests.invariants import published
from tests.world import World, small_config, windows_of


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt * 13 + i * 7 + 1) % 89 for i in range(length)]


def windowed(**changes: object) -> World:
    """A window of six tokens, steps of at most eight: 13 tokens touch at most four blocks of four."""
    settings = {"groups": windows_of(6), "max_num_batched_tokens": 8, "max_model_len": 200, "num_blocks": 8}
    return World(small_config(**(settings | changes)))


def most_used(world: World) -> int:
    """Steps until nothing is left; how many blocks were in use at once."""
    used = 0
    while world.scheduler.has_unfinished_requests:
        world.step()
        used = max(used, world.scheduler.kv.pool.num_used)
    return used


def test_a_sequence_far_longer_than_the_cache_is_served() -> None:
    world = windowed(num_blocks=4)
    world.add(make_sequence(1, prompt(60), max_tokens=40))
    assert most_used(world) == 4
    assert world.tokens[SequenceId(1)] == continuation(prompt(60), 40)
    assert world.reason(1) is FinishReason.LENGTH


def test_a_cache_that_cannot_hold_what_is_read_at_once_is_too_small() -> None:
    world = windowed(num_blocks=3)
    world.add(make_sequence(1, prompt(12), max_tokens=20))
    with pytest.raises(NeverFits):
        world.add(make_sequence(2, prompt(13), max_tokens=1))
    world.run()
    assert world.tokens[SequenceId(1)] == continuation(prompt(12), 20), "as it decodes, three are enough"


def test_a_decode_gives_back_what_the_window_has_passed() -> None:
    world = windowed()
    world.add(make_sequence(1, prompt(5), max_tokens=60))
    world.step()
    for _ in range(50):
        world.step()
        assert world.scheduler.kv.pool.num_used <= 3, "six tokens touch at most three blocks"
    (seq,) = world.scheduler.running_sequences()
    assert seq.tables[0].end > 12
    assert seq.tables[0].first >= 10


def test_two_long_prompts_run_where_one_would_not_fit_whole() -> None:
    world = windowed()
    world.add(*(make_sequence(i, prompt(50, i), max_tokens=20) for i in (1, 2)))
    world.step()
    world.step()
    world.run()
    for i in (1, 2):
        assert world.tokens[SequenceId(i)] == continuation(prompt(50, i), 20)
    assert world.num_preemptions() == 0


def test_a_hit_needs_only_the_blocks_that_the_window_reaches() -> None:
    world = windowed(num_blocks=9)
    tokens = prompt(32)
    world.add(make_sequence(1, [*tokens, 5], max_tokens=1))
    world.run()  # its first blocks were given back first
    world.add(make_sequence(2, prompt(22, 9), max_tokens=1))  # six blocks: one unused, then the oldest
    world.run()
    world.add(make_sequence(3, [*tokens, 6], max_tokens=8))
    plan = world.step()
    (new,) = plan.new_sequences
    assert plan.scheduled[0].start == 32
    (table,) = new.tables
    assert table.first == 6
    world.run()
    assert world.tokens[SequenceId(3)] == continuation([*tokens, 6], 8)


def test_a_gap_in_what_the_window_reaches_is_no_hit() -> None:
    world = windowed(num_blocks=9)
    tokens = prompt(32)
    world.add(make_sequence(1, [*tokens, 5], max_tokens=1))
    world.run()
    cache = world.scheduler.kv.index.main_cache
    seventh = {key: block for block, key in published(cache).items()}
    keys = make_sequence(9, [*tokens, 6])
    world.scheduler.kv.demand(keys)
    cache.forget_all([seventh[keys.block_keys[6]]])
    world.add(make_sequence(2, [*tokens, 6], max_tokens=4))
    assert world.step().scheduled[0].start == 24, "the window of the next token ends before the gap"
    world.run()
    assert world.tokens[SequenceId(2)] == continuation([*tokens, 6], 4)


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
@pytest.mark.parametrize("batching", Batching)
def test_preempted_in_either_way_it_goes_on_where_it_was(mode: PreemptionMode, batching: Batching) -> None:
    world = windowed(max_num_batched_tokens=16, preemption_mode=mode, num_host_blocks=9, batching=batching)
    # All three need a third block in the same step: nine of eight.
    world.add(*(make_sequence(i, prompt(5, i), max_tokens=40) for i in (1, 2, 3)))
    world.run()
    assert world.num_preemptions() > 0
    assert bool(world.num_swaps()) == (mode is PreemptionMode.SWAP)
    for i in (1, 2, 3):
        assert world.tokens[SequenceId(i)] == continuation(prompt(5, i), 40)


def test_only_what_the_window_reaches_is_swapped_out() -> None:
    world = windowed(
        num_blocks=5,
        max_num_batched_tokens=16,
        preemption_mode=PreemptionMode.SWAP,
        num_host_blocks=9,
        host_tier=HostTier.OFF,
        max_num_seqs=2,
    )
    world.add(make_sequence(1, prompt(6, 1), max_tokens=60))
    for _ in range(20):
        world.step()
    world.add(make_sequence(2, prompt(6, 2), max_tokens=60))
    world.run()
    assert world.num_swaps() > 0
    assert max(len(plan.swap_out) for plan in world.worker.plans) <= 3
    for i in (1, 2):
        assert world.tokens[SequenceId(i)] == continuation(prompt(6, i), 60)


def test_one_that_was_sent_away_and_cannot_start_over_ends() -> None:
    """The cache is too small for a window and a step; the engine admits no such sequence."""
    world = windowed(
        num_blocks=5,
        max_num_batched_tokens=16,
        policy=SchedulingPolicy.PRIORITY,
        displacement=Displacement.OFF,
        prefix_caching=PrefixCaching.OFF,
    )
    world.add(make_sequence(1, prompt(6, 1), max_tokens=90, priority=1))
    for _ in range(32):
        world.step()
    world.add(make_sequence(2, prompt(6, 2), max_tokens=60, priority=0))
    world.run()
    assert world.reason(1) is FinishReason.LENGTH
    tokens = world.tokens[SequenceId(1)]
    assert 25 <= len(tokens) < 90
    assert tokens == continuation(prompt(6, 1), 90)[: len(tokens)]
    assert world.scheduler.stats().num_stalls == 0


@pytest.mark.parametrize("window", [None, 64, 1000])
def test_a_window_as_long_as_the_context_is_none(window: int | None) -> None:
    (reach,) = places_of(small_config(groups=windows_of(window)))
    assert not reach.is_limited
    assert reach.first(60) == 0
    assert most_blocks((reach,), 60) == 15


def test_what_a_window_reaches() -> None:
    (reach,) = places_of(small_config(groups=windows_of(6), max_num_batched_tokens=8, max_num_seqs=4))
    assert [reach.first(start) for start in (0, 5, 8, 9, 12, 13)] == [0, 0, 0, 1, 1, 2]
    assert most_blocks((reach,), 1000) == 4
    assert reach.end(1000, 9) == 5
    assert reach.end(18, 9) == 5
    assert reach.end(16, 9) == 4


def test_one_that_got_blocks_but_no_share_of_a_step_that_failed_does_not_go_on_without_them() -> None:
    num_with_blocks_only = 0
    for num_steps in range(1, 9):
        world = windowed(
            policy=SchedulingPolicy.PRIORITY,
            prefix_caching=PrefixCaching.OFF,
            num_blocks=40,
            max_num_batched_tokens=5,
            max_chunk_tokens=4,
        )
        world.add(make_sequence(1, prompt(3), max_tokens=50, priority=2))
        world.step()
        world.add(make_sequence(2, prompt(60, 1), max_tokens=3, priority=1))
        for _ in range(num_steps):
            world.step()
        world.add(make_sequence(3, prompt(60, 2), max_tokens=3, priority=0))
        world.worker.explode_next = True
        plan = world.step()
        num_with_blocks_only += len(plan.new_blocks.keys() - {share.sequence_id for share in plan.scheduled})
        world.run()
    assert num_with_blocks_only, "the test would show nothing"
