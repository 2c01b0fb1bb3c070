"""Blocks found again by their content, and the order in which they are given up."""

from array import array
from hashlib import sha256

from scheduler.blocks.kv_cache_manager import AllocationStatus, KVCacheManager
from scheduler.messages import ModelRunnerOutput, SequenceId
from scheduler.scheduler import Scheduler
from tests.fakes import continuation, make_sequence
from tests.invariants import free_blocks
from tests.world import World, small_config

SHARED = list(range(1, 13))  # three blocks of four


def test_a_later_request_with_the_same_prefix_computes_only_the_rest() -> None:
    world = World(small_config())
    world.add(make_sequence(1, [*SHARED, 50], max_tokens=1))
    world.run()
    world.add(make_sequence(2, [*SHARED, 60, 61], max_tokens=3))
    plan = world.step()
    assert plan.scheduled[0].start == 12
    assert plan.scheduled[0].num_tokens == 2
    world.run()
    assert world.tokens[SequenceId(2)] == continuation([*SHARED, 60, 61], 3)
    start = world.ended[SequenceId(2)].start
    assert start is None, "told once, with the first output"
    assert world.scheduler.stats().num_prefix_hits == 12


def test_two_requests_of_one_step_share_what_that_step_computes() -> None:
    world = World(small_config(num_blocks=5))
    world.add(make_sequence(1, [*SHARED, 50]), make_sequence(2, [*SHARED, 60]))
    plan = world.step()
    assert [share.start for share in plan.scheduled] == [0, 12]
    assert world.scheduler.kv.pool.num_used == 5
    world.run()
    assert world.tokens[SequenceId(2)] == continuation([*SHARED, 60], 4)


def test_a_prompt_that_is_wholly_cached_still_computes_its_last_block() -> None:
    world = World(small_config())
    world.add(make_sequence(1, SHARED, max_tokens=1))
    world.run()
    world.add(make_sequence(2, SHARED, max_tokens=2))
    assert world.step().scheduled[0].start == 8
    world.run()
    assert world.tokens[SequenceId(2)] == continuation(SHARED, 2)


def test_what_was_generated_is_found_by_the_next_turn_of_a_conversation() -> None:
    world = World(small_config())
    world.add(make_sequence(1, SHARED[:6], max_tokens=7))
    world.run()
    world.add(make_sequence(2, [*SHARED[:6], *world.tokens[SequenceId(1)], 5, 6]))
    assert world.step().scheduled[0].start == 12


def test_another_salt_finds_nothing() -> None:
    world = World(small_config())
    for i, salt in ((1, "a"), (2, "b"), (3, "a")):
        world.add(make_sequence(i, [*SHARED, 50], max_tokens=1, cache_salt=salt))
        assert world.step().scheduled[0].start == (12 if i == 3 else 0)


def test_keys_are_digests_of_all_tokens_before_and_of_the_salt() -> None:
    """CVE-2025-25183 was a hash whose collisions anyone could compute."""
    world = World(small_config())
    seq = make_sequence(1, [*SHARED, 50], cache_salt="a")
    world.add(seq)
    world.step()
    key = sha256(sha256(b"a").digest()).digest()
    for place, found in enumerate(seq.block_keys[:3]):
        key = sha256(key + array("I", SHARED[4 * place : 4 * place + 4]).tobytes()).digest()
        assert found == key


def test_of_a_crowd_with_one_long_prompt_a_step_looks_up_a_few() -> None:
    """Each finds the whole of it, so that a step has tokens for all."""
    sizes = {"num_blocks": 3000, "block_size": 16, "max_num_batched_tokens": 40_000, "max_model_len": 50_000}
    scheduler = Scheduler(small_config(**sizes, max_num_seqs=16))
    for i in range(10):
        scheduler.add_request(make_sequence(i, SHARED * 2730, max_tokens=9), now_s=0.0)
    plans = []
    for _ in range(4):
        plans.append(scheduler.schedule(now_s=0.0))
        sampled = {share.sequence_id: (7,) for share in plans[-1].scheduled}
        scheduler.update_from_output(
            plans[-1], ModelRunnerOutput(token_ids=sampled, logprobs={}, failures={})
        )
    assert [len(plan.new_sequences) for plan in plans] == [4, 4, 2, 0]


def test_equal_tokens_after_different_beginnings_are_different_blocks() -> None:
    world = World(small_config())
    world.add(make_sequence(1, [1, 1, 1, 1, *SHARED], max_tokens=1))
    world.run()
    world.add(make_sequence(2, [2, 2, 2, 2, *SHARED], max_tokens=1))
    assert world.step().scheduled[0].start == 0


def test_the_block_used_longest_ago_is_given_up_first_and_the_tail_of_a_prefix_before_its_head() -> None:
    world = World(small_config(num_blocks=8))
    old, recent = [1] * 12, [2] * 12
    for i, tokens in ((1, old), (2, recent)):
        world.add(make_sequence(i, [*tokens, 9], max_tokens=1))
        world.run()
    world.add(make_sequence(3, [3] * 14, max_tokens=1))  # four blocks: two unused ones, then two of `old`
    world.run()
    world.add(make_sequence(4, [*recent, 9], max_tokens=1))
    assert world.step().scheduled[0].start == 12
    world.add(make_sequence(5, [*old, 9], max_tokens=1))
    assert world.step().scheduled[0].start == 4, "only the head of the old prefix is left"


def test_an_allocation_never_evicts_the_blocks_that_it_is_about_to_share() -> None:
    world = World(small_config(num_blocks=4))
    world.add(make_sequence(1, SHARED, max_tokens=1))
    world.run()
    world.add(make_sequence(2, [*SHARED, 7, 8, 9], max_tokens=1))
    assert world.step().scheduled[0].start == 12


def test_free_hits_count_as_needed_and_a_refusal_changes_nothing() -> None:
    world = World(small_config(num_blocks=4))
    world.add(make_sequence(1, [*SHARED[:8], 1], max_tokens=1))
    world.run()
    world.add(make_sequence(2, [90, 91, 92, 93, 94], max_tokens=4))
    world.step()
    before = free_blocks(world.scheduler.kv.pool)
    wants_three = make_sequence(3, [*SHARED[:8], 2])  # two cached but unreferenced, one fresh: two are free
    kv = world.scheduler.kv
    assert kv.can_allocate(kv.demand(wants_three), num_running=1) is AllocationStatus.LATER
    assert free_blocks(world.scheduler.kv.pool) == before
    assert wants_three.num_blocks == 0


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    world = World(small_config(num_blocks=6))
    world.add(make_sequence(1, [1] * 9, max_tokens=8), make_sequence(2, [2] * 11, max_tokens=3))
    world.step()
    while not world.num_preemptions():
        world.step()
    world.run()
    resumed = [new for plan in world.worker.plans for new in plan.new_sequences if new.sequence_id == 2][1]
    starts = [s.start for plan in world.worker.plans for s in plan.scheduled if s.sequence_id == 2]
    assert len(resumed.token_ids) > resumed.num_prompt_tokens
    assert starts.count(0) == 1, "its first blocks were still there"
    assert world.tokens[SequenceId(2)] == continuation([2] * 11, 3)


def test_blocks_without_reusable_content_are_reused_before_cached_ones() -> None:
    kv = KVCacheManager(small_config(num_blocks=4))
    seq = make_sequence(1, SHARED[:6])
    kv.allocate(seq, kv.demand(seq))
    first, second = seq.tables[0].block_ids
    kv.index.publish(seq, 0, 6)
    kv.free(seq)
    order = free_blocks(kv.pool)
    assert order[0] == second, "half full: worth nothing"
    assert order[-1] == first
