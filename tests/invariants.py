"""Invariants that hold after every call to the scheduler; tests check them after each of millions of steps.

Owns: nothing. Reads what the scheduler holds, private state included.
"""

from collections import Counter

from scheduler.blocks.pool import BlockPool
from scheduler.blocks.prefix_cache import PrefixCache
from scheduler.cache_groups import CacheGroup, LifetimeKind
from scheduler.messages import BlockId, PromptComputation, SchedulerOutput
from scheduler.queues.deadlines import Deadlines
from scheduler.queues.waiting_queue import WaitingQueue
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence, Status


def free_blocks(pool: BlockPool) -> list[BlockId]:
    """Free blocks in the order in which they would be reused."""
    return pool.next_free(pool.num_free)


def published(cache: PrefixCache) -> dict[BlockId, bytes]:
    """Keys by block."""
    return dict(cache._key_by_block)


def tenant_service(scheduler: Scheduler) -> dict[str, float]:
    """Service of each tenant so far, by cost, of all levels of priority."""
    accounts, together = scheduler._queues._accounts, Counter[str]()
    assert accounts is not None, "no fairness"
    for ledger in accounts._ledgers.values():
        together.update(ledger._service)
    return dict(together)


def num_entries(queue: WaitingQueue | Deadlines) -> int:
    """Entries in memory, of sequences that have gone too."""
    heaps = (queue._heap, queue._unswept) if isinstance(queue, Deadlines) else queue.heaps()
    return sum(map(len, heaps))


def check_invariants(scheduler: Scheduler) -> None:
    """Raise AssertionError that says what broke. O(sequences + blocks)."""
    running, waiting = scheduler.running_sequences(), scheduler.waiting_sequences()
    _check_queues(scheduler, running, waiting)
    _check_compilations(scheduler, waiting)
    _check_in_flight(scheduler, running + waiting)
    _check_shared_room(scheduler, running)
    _check_blocks(scheduler, running)
    _check_group_uses(scheduler, running)
    _check_prefix_cache(scheduler, running)
    _check_swap_space(scheduler, waiting)


def check_plan(scheduler: Scheduler, plan: SchedulerOutput) -> None:
    """Check that the plan keeps the budget and names each sequence once."""
    num_tokens = sum(share.num_tokens for share in plan.scheduled)
    assert num_tokens == plan.num_scheduled_tokens <= scheduler.config.max_num_batched_tokens
    assert all(share.num_tokens > 0 for share in plan.scheduled)
    ids = [share.sequence_id for share in plan.scheduled]
    assert len(ids) == len(set(ids)) <= scheduler.config.max_num_seqs
    admitted = {new.sequence_id for new in plan.new_sequences}
    assert admitted <= set(ids) | plan.encoder_inputs.keys()
    assert not {new.sequence_id for new in plan.new_sequences} & plan.new_blocks.keys()
    assert plan.draft_token_ids.keys() <= set(ids)
    for share in plan.scheduled:
        num_drafts = len(plan.draft_token_ids.get(share.sequence_id, ()))
        assert not num_drafts or (share.samples and share.num_tokens == 1 + num_drafts)
    chunks = [share.num_tokens for share in plan.scheduled if share.sequence_id not in plan.draft_token_ids]
    poolings = [new.pooling for new in plan.new_sequences if new.pooling is not None]
    if not any(pooling.prompt is PromptComputation.AT_ONCE for pooling in poolings):
        max_prefill = scheduler.config.max_prefill_tokens or num_tokens
        assert sum(size for size in chunks if size > 1) <= max_prefill
    to_encode = [item for inputs in plan.encoder_inputs.values() for item in inputs]
    assert sum(item.num_tokens for item in to_encode) <= scheduler.config.encoder_cache_tokens
    assert to_encode or not plan.encoder_slice_s
    preempted = {preemption.sequence_id for preemption in plan.preemptions}
    assert not preempted & set(ids), "a preempted sequence has a share of the same step"


def _check_queues(scheduler: Scheduler, running: list[Sequence], waiting: list[Sequence]) -> None:
    assert all(seq.status is Status.RUNNING for seq in running)
    assert all(seq.status in (Status.WAITING, Status.SWAPPED) for seq in waiting)
    assert [seq.running_rank for seq in running] == sorted(seq.running_rank for seq in running), (
        "the running queue is out of order"
    )
    assert len(running) <= scheduler.config.max_num_seqs
    counts = scheduler.get_request_counts()
    assert counts.running == len(running)
    assert counts.swapped == sum(seq.status is Status.SWAPPED for seq in waiting)
    assert counts.waiting == len(waiting) - counts.swapped, "the waiting queue miscounts"
    ids = [seq.sequence_id for seq in running + waiting]
    assert len(ids) == len(set(ids)), "a sequence is in two places"
    assert bool(ids) == scheduler.has_unfinished_requests
    for seq in waiting:
        assert not seq.num_blocks, f"{seq} waits and holds blocks"
        assert seq.num_computed_tokens == 0
    for seq in running:
        begins_with_input = bool(seq.encoder_inputs and not seq.encoder_inputs[0].offset)
        assert seq.num_computed_tokens or begins_with_input or seq.is_indivisible
        assert seq.num_computed_tokens <= seq.num_tokens
        assert seq.num_slots >= seq.num_computed_tokens
        for group, table in zip(scheduler.config.groups, seq.tables, strict=True):
            assert len(table.block_ids) == (table.end - table.first) * group.num_stripes, "a row is not whole"
            if group.lifetime.kind is LifetimeKind.FIXED:
                assert (table.first, table.end) == (0, 1)
            else:
                assert table.end * scheduler.config.block_size >= seq.num_slots


def _check_compilations(scheduler: Scheduler, waiting: list[Sequence]) -> None:
    compilations, queues = scheduler.compilations, scheduler._queues
    compiled = compilations.compiled()
    assert {id(seq) for seq in compiled} == {id(seq) for seq in waiting if seq.is_compiled}, "a row is lost"
    assert len(compiled) + compilations.num_under_way <= scheduler.config.max_num_seqs, "rows pile up"
    assert not any(queues.lacks_grammar(seq) for seq in queues.waiting), "it holds up others"
    assert all(queues.lacks_grammar(seq) for seq in queues.uncompiled), "it could run"


def _check_in_flight(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    plans = list(scheduler._in_flight)
    assert len(plans) <= scheduler.config.max_plans_in_flight
    num_samples = Counter(share.sequence_id for plan in plans for share in plan.scheduled if share.samples)
    for seq in sequences:
        num_expected = seq.num_tokens - len(seq.token_ids)
        assert 0 <= num_expected <= num_samples[seq.sequence_id], f"{seq} expects tokens that no plan samples"
        if num_samples[seq.sequence_id] and seq.pooling is None:
            assert len(seq.token_ids) + num_samples[seq.sequence_id] <= seq.max_length, (
                f"{seq} is sampled too long"
            )
        elif seq.status is Status.RUNNING:
            assert seq.num_uncomputed_tokens or num_samples[seq.sequence_id], f"{seq} has nothing left to do"


def _check_shared_room(scheduler: Scheduler, running: list[Sequence]) -> None:
    """Check that only running sequences hold adapters and encoder outputs, and not too many."""
    config = scheduler.config
    assert len({seq.adapter for seq in running if seq.adapter}) <= config.max_adapters
    assert num_encoder_tokens(scheduler) <= config.encoder_cache_tokens
    holders = scheduler._shares.encoder_cache._held.keys()
    assert holders <= {seq.sequence_id for seq in running}, "no sequence holds them"


def num_encoder_tokens(scheduler: Scheduler) -> int:
    """Tokens of the encoder cache that sequences hold."""
    held = scheduler._shares.encoder_cache._held.values()
    return sum(item.num_tokens for items in held for item in items.values())


def _check_blocks(scheduler: Scheduler, running: list[Sequence]) -> None:
    pool = scheduler.kv.pool
    free = free_blocks(pool)
    held: Counter[BlockId] = Counter(block for seq in running for block in seq.held_blocks())
    assert len(free) == len(set(free)) == pool.num_free, "the free list miscounts"
    assert not held.keys() & set(free), "a block is free and held"
    assert held.keys() | set(free) == set(range(1, pool.num_blocks + 1)), "a block is lost"
    for block, num_holders in held.items():
        assert pool.num_references(block) == num_holders, f"block {block} has a wrong reference count"
    for seq in running:
        own = list(seq.held_blocks())
        assert len(own) == len(set(own)), f"{seq} holds a block twice"
        most = scheduler.kv.most_blocks(seq.max_length)  # drafts may have asked for blocks ahead
        assert len(own) <= most, f"{seq} holds more than it reads"
        for group, table in zip(scheduler.config.groups, seq.tables, strict=True):
            if group.lifetime.kind is LifetimeKind.FIXED:
                findable = {block for cache in scheduler.kv.index.caches for block in cache.blocks}
                assert not findable & set(table.block_ids), f"{seq}: others find a state that it moves on"
                assert all(held[block] == 1 for block in table.block_ids), f"{seq} shares its state"


def _check_group_uses(scheduler: Scheduler, running: list[Sequence]) -> None:
    """Check the blocks of each group, counted one by one."""
    uses = scheduler.group_uses()
    for index, use in enumerate(uses):
        assert use.num_held == len({block for seq in running for block in seq.tables[index].block_ids})
    findable = list(scheduler.kv.index.findable_blocks())
    assert sum(use.num_findable for use in uses) == len(findable) == len(set(findable))


def _check_swap_space(scheduler: Scheduler, waiting: list[Sequence]) -> None:
    space, block_size = scheduler.kv.swap_space, scheduler.config.block_size
    held = [block for seq in waiting for table in seq.tables for block in table.host_ids]
    assert sorted(held + free_blocks(space._pool)) == list(range(1, space.num_blocks + 1)), (
        "a host block is lost"
    )
    for seq in waiting:
        is_swapped = seq.status is Status.SWAPPED
        assert bool(seq.num_swapped_tokens) == is_swapped
        for group, table in zip(scheduler.config.groups, seq.tables, strict=False):
            end = 1 if group.lifetime.kind is LifetimeKind.FIXED else -(-seq.num_swapped_tokens // block_size)
            num_places = end - table.first if is_swapped else 0
            assert len(table.host_ids) == num_places * group.num_stripes
    for group, kept in zip(scheduler.config.groups, space._kept, strict=True):
        _check_rows(group, published(kept))


def _check_prefix_cache(scheduler: Scheduler, running: list[Sequence]) -> None:
    found = [published(cache) for cache in scheduler.kv.index.caches]
    blocks = [block for keys in found for block in keys]
    assert len(blocks) == len(set(blocks)), "a block is found in two groups"
    assert 0 not in blocks, "block 0, which is never handed out, can be found"
    for index, (group, keys) in enumerate(zip(scheduler.config.groups, found, strict=True)):
        _check_rows(group, keys)
        for seq in running:
            table = seq.tables[index]
            num_full = seq.num_computed_tokens // scheduler.config.block_size - table.first
            for block in table.block_ids[max(num_full, 0) * group.num_stripes :]:
                assert block not in keys, f"{seq}: a block that is not full can be found"


def _check_rows(group: CacheGroup, key_by_block: dict[BlockId, bytes]) -> None:
    """One row of blocks for each key."""
    counts = Counter(key_by_block.values())
    assert set(counts.values()) <= {group.num_stripes}, "a row is not whole, or two rows have one key"
