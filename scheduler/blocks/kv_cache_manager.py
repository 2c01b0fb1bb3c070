"""Block tables of sequences: which blocks one needs, which it shares, when it gives them back.

Owns: the block tables, through the pool (which blocks are free) and the index (which are found by content).
Never: chooses which sequence is preempted; it says OK, LATER or NEVER and on anything but OK it changes
nothing.
Source: PagedAttention, arXiv:2309.06180. Hits are taken out of the free list before fresh blocks are
popped, otherwise a fresh block could evict a hit.

A plan's copies are made before it computes, in the order swap_out, swap_in, copies. So a block may be popped
in the plan that copies it out, but not in the plan that copies from it: sources of `swap_in` and of `copies`
are held until the plan is complete.
"""

from enum import Enum
from typing import NamedTuple

from scheduler.blocks.attended_blocks import AttendedBlocks
from scheduler.blocks.pool import BlockPool
from scheduler.blocks.prefix_cache import PrefixCache
from scheduler.blocks.prefix_index import PrefixHit, PrefixIndex
from scheduler.blocks.swap_space import SwapSpace
from scheduler.config import SchedulerConfig
from scheduler.messages import BlockCopy, BlockId
from scheduler.sequence import Sequence

_PASSED = BlockId(0)
"""Placeholder in a block table for a block that a window has passed; it is not read any more."""

# Limits of a step for copying evicted blocks to the host: running requests do not notice as little as this.
_MOST_KEEPING_S = 0.01
_MOST_KEPT_BLOCKS = 1024


class AllocationStatus(Enum):
    """Answer to: can this sequence have its blocks?"""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class BlockDemand(NamedTuple):
    """Blocks that admitting a sequence would take out of the pool. Good until another is admitted."""

    hit: PrefixHit
    first: int
    """First place of its table that holds a block."""
    end: int
    """Length that its table will have."""
    num_free_hits: int
    """Blocks of the hit without a reference: they are in the free list and would leave it."""

    @property
    def num_blocks(self) -> int:
        return self.end - self.first

    @property
    def num_fresh(self) -> int:
        return self.num_blocks - len(self.hit.device)

    @property
    def num_from_free(self) -> int:
        return self.num_fresh + self.num_free_hits


class AdmissionCopies(NamedTuple):
    """Copies of a plan that bring an admitted sequence the prefix that was found for it."""

    swap_in: list[BlockCopy]
    copies: list[BlockCopy]


class KVCacheManager:
    """Blocks for sequences, shared where their prefixes are equal.

    All of a sequence's known tokens get their blocks at admission, so that a prefill, once begun, never
    waits for memory; a decode takes one block every `block_size` tokens. With a sliding window a sequence
    gets as many as it ever holds at once, and takes one further for each one that the window passed.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.attended = AttendedBlocks(config)
        self._index = PrefixIndex(config, self.attended)
        self._watermark_blocks = int(config.watermark * config.num_blocks)
        self._held_for_copies: list[BlockId] = []
        self._evicted: list[tuple[bytes, BlockId]] = []
        self._max_kept = _MOST_KEPT_BLOCKS
        if config.copy_s_per_block:
            self._max_kept = min(self._max_kept, int(_MOST_KEEPING_S / config.copy_s_per_block) or 1)
        self.num_kept_blocks = 0
        """Blocks copied to the host because the prefix cache on the device gave them up; since the start."""

    @property
    def prefix_cache(self) -> PrefixCache:
        """Blocks that are found on the device."""
        return self._index.cache

    @property
    def swap_space(self) -> SwapSpace:
        return self._index.swap_space

    @property
    def num_changes(self) -> int:
        """Count of changes: while it is the same, every sequence finds the same blocks."""
        return self.prefix_cache.num_changes + self.swap_space.num_changes

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.pool.num_used

    def blocks_for(self, num_tokens: int) -> int:
        return self.attended.blocks_for(num_tokens)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether the empty pool would be large enough."""
        return self.attended.most_blocks(num_tokens) <= self.pool.num_blocks

    def num_unhashed(self, seq: Sequence) -> int:
        """Tokens whose keys `demand` would have to compute first."""
        return self._index.num_unhashed(seq)

    def demand(self, seq: Sequence) -> BlockDemand:
        """Blocks that admitting `seq` would take now; it changes nothing."""
        hit = self._index.find(seq)
        if hit.tail is not None and self.pool.is_free(hit.tail):
            hit.tail = None  # to hold it for the copy would cost a block
        return BlockDemand(
            hit=hit,
            first=self.attended.first_block(hit.num_tokens),
            end=self.attended.end_block(seq.num_tokens, hit.num_tokens),
            num_free_hits=self.pool.count_free(hit.device.values()),
        )

    def can_allocate(self, demand: BlockDemand, *, num_running: int) -> AllocationStatus:
        """Whether there is room now. The watermark counts only while others run."""
        if demand.num_blocks > self.pool.num_blocks:
            return AllocationStatus.NEVER
        reserve = self._watermark_blocks if num_running else 0
        has_room = demand.num_from_free + reserve <= self.pool.num_free
        return AllocationStatus.OK if has_room else AllocationStatus.LATER

    def pin(self, demand: BlockDemand) -> None:
        """Keep the host blocks that a sequence needs from the sequences that are preempted for it."""
        for block in demand.hit.host.values():
            self.swap_space.pin(block)

    def allocate(self, seq: Sequence, demand: BlockDemand) -> AdmissionCopies:
        """Give blocks to a sequence that has none, those found first; `demand` must fit.

        Sets `num_computed_tokens` to the prefix that was found: at most all but the last token, which must be
        computed to sample the next one.
        """
        assert not seq.block_ids, f"{seq} has blocks already"
        hit = demand.hit
        for block in hit.device.values():
            self.pool.share(block)
        self.pin(demand)
        tail = self._hold_for_copy(hit.tail)
        seq.num_passed_blocks = demand.first
        seq.block_ids = [_PASSED] * demand.first
        fresh = self._take(demand.num_fresh)
        if hit.device:
            rest = iter(fresh)
            places = range(demand.first, demand.end)
            fresh = [hit.device[place] if place in hit.device else next(rest) for place in places]
        seq.block_ids += fresh
        seq.num_slots = demand.end * self.block_size
        seq.num_computed_tokens = hit.num_tokens
        self._index.publish_hit(seq, hit)
        self.drop_copy(seq)
        copies_in = AdmissionCopies(
            [BlockCopy(block, seq.block_ids[place]) for place, block in hit.host.items()], []
        )
        if tail is not None:
            place = hit.num_tokens // self.block_size
            copies_in.copies.append(BlockCopy(tail, seq.block_ids[place]))
            seq.num_computed_tokens = seq.num_tokens - 1
        return copies_in

    def num_missing(self, seq: Sequence, *, num_lookahead: int = 0) -> int:
        """Number of blocks that `append` would take."""
        end = self.attended.end_block(seq.num_tokens + num_lookahead, seq.num_computed_tokens)
        return max(end - len(seq.block_ids), 0)

    def append(self, seq: Sequence, *, num_lookahead: int = 0) -> tuple[BlockId, ...] | None:
        """Give blocks to the tokens that have none yet; None, and nothing changed, if too few are free.

        `num_lookahead` more tokens may be written behind the known ones.
        """
        num_missing = self.num_missing(seq, num_lookahead=num_lookahead)
        if num_missing > self.pool.num_free:
            return None
        fresh = tuple(self._take(num_missing))
        seq.block_ids.extend(fresh)
        seq.num_slots = len(seq.block_ids) * self.block_size
        return fresh

    def append_blocks(self, seqs: list[Sequence]) -> None:
        """Give one block to each in turn; the caller makes sure that all are missing, and as many free."""
        for seq, block in zip(seqs, self._take(len(seqs)), strict=True):
            seq.block_ids.append(block)
            seq.num_slots += self.block_size

    def pass_blocks(self, seq: Sequence) -> None:
        """Give up blocks that the window has passed, now that the next share of `seq` is planned.

        The worker need not know: it does not read that part of the table. Cached blocks can still be found.
        """
        for place in range(seq.num_passed_blocks, self.attended.first_block(seq.num_computed_tokens)):
            self._drop(seq.block_ids[place])
            seq.block_ids[place] = _PASSED
            seq.num_passed_blocks = place + 1

    def publish(self, seq: Sequence, start: int, end: int) -> None:
        """Let others find the blocks that [start, end) completes.

        Called when the step is planned: the worker writes the whole batch's keys and values before any
        of it attends, so that even a sequence of the same step may use them. If the step fails,
        `forget` undoes it.
        """
        self._index.publish(seq, start, end)

    def free(self, seq: Sequence) -> None:
        """Give all blocks back. The tail is reused first: it is shared least likely."""
        self.pool.release(reversed(seq.block_ids[seq.num_passed_blocks :]), self.prefix_cache.blocks)
        seq.block_ids = []
        seq.num_passed_blocks = 0
        seq.num_slots = 0
        seq.num_computed_tokens = 0

    def copy_out(self, seq: Sequence) -> list[BlockCopy]:
        """Take host blocks for all that `seq` has computed and still attends.

        It keeps its blocks on the device.

        The copies are in the order in which `free` lets others have the blocks.
        """
        num_written = self.blocks_for(seq.num_computed_tokens)
        sources = seq.block_ids[seq.num_passed_blocks : num_written]
        targets = self.swap_space.take(len(sources))
        for source, target in zip(sources, targets, strict=True):
            self._index.publish_swapped(source, target)
        seq.host_block_ids = [_PASSED] * seq.num_passed_blocks + targets
        seq.num_swapped_tokens = seq.num_computed_tokens
        copies = [BlockCopy(*pair) for pair in zip(sources, targets, strict=True)]
        reused_last = [copy for copy in reversed(copies) if copy.source in self.prefix_cache]
        return [copy for copy in copies if copy.source not in self.prefix_cache] + reused_last

    def drop_copy(self, seq: Sequence) -> None:
        """Give up the copy on the host: the sequence is back or has ended, or its copy cannot be trusted."""
        if seq.host_block_ids:
            self.swap_space.give_back(block for block in reversed(seq.host_block_ids) if block != _PASSED)
            seq.host_block_ids = []
        seq.num_swapped_tokens = 0

    def complete_plan(self) -> list[BlockCopy]:
        """Complete a plan, once all of it is decided.

        Returns the copies of evicted prefixes that it must make.
        """
        copies = self._keep_evicted() if self._evicted else []
        if self._held_for_copies:
            for block in self._held_for_copies:
                self._drop(block)
            self._held_for_copies.clear()
        self.swap_space.unpin()
        self._index.complete_plan()
        return copies

    def forget(self, seq: Sequence, *, start: int = 0) -> None:
        """Let all that this sequence computed from `start` on not be found: it cannot be trusted."""
        self._index.forget(seq, start=start)

    def forget_block(self, block: BlockId) -> None:
        """Let the content that was to be copied to a block not be found."""
        self._index.reuse(block)

    def forget_copies(self, swap_out: tuple[BlockCopy, ...]) -> None:
        """Let the content that these copies were to bring to the host not be found: the step failed."""
        for copy in swap_out:
            self.swap_space.forget(copy.target)

    def reset_prefix_cache(self) -> None:
        """Forget all that was computed so far, on both sides; running sequences keep their blocks."""
        self._index.clear()

    def _keep_evicted(self) -> list[BlockCopy]:
        """Copies of evicted blocks to the host.

        A plan copies out before it writes, so their content is still there.

        If they are too many for a step, the ones that were used last are kept.
        """
        most = min(self._max_kept, self.swap_space.num_free)
        copies = []
        for key, block in self._evicted[max(len(self._evicted) - most, 0) :]:
            target = self.swap_space.keep(key)
            if target is not None:
                copies.append(BlockCopy(block, target))
        self._evicted.clear()
        self.num_kept_blocks += len(copies)
        return copies

    def _hold_for_copy(self, tail: BlockId | None) -> BlockId | None:
        """Keep a tail from being reused in this plan. None if its holder was preempted meanwhile."""
        if tail is None or self.pool.is_free(tail):
            return None
        self.pool.share(tail)
        self._held_for_copies.append(tail)
        return tail

    def _take(self, num_blocks: int) -> list[BlockId]:
        taken = self.pool.take(num_blocks)
        evicted = self._index.reuse_all(taken)
        if evicted and self._index.keeps_on_host:
            self._evicted += evicted
        return taken

    def _drop(self, block: BlockId) -> None:
        """Drop a reference; without any left the block waits for reuse, the longer if it can be found."""
        self.pool.release((block,), self.prefix_cache.blocks)
