"""A sequence's block table: what it needs, what it shares, when it gives back.

Owns: the block tables, through the pool (which blocks are free) and the index (what is found where).
Never: chooses who has to go; it says OK, LATER or NEVER and on anything but OK it changes nothing.
Source: PagedAttention, arXiv:2309.06180. Hits are taken out of the free list before fresh blocks are
popped, else a fresh block could evict a hit.

A plan's copies are made before it computes, in the order swap_out, swap_in, copies. So a block may be popped
in the plan that copies it out, but not in the plan that copies from it: sources of `swap_in` and of `copies`
are held until the plan is complete.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from scheduler.blocks.attended_blocks import Reach
from scheduler.blocks.block_pool import BlockPool
from scheduler.blocks.prefix_cache import PrefixCache
from scheduler.blocks.prefix_index import Found, PrefixIndex
from scheduler.blocks.swap_space import SwapSpace
from scheduler.config import SchedulerConfig
from scheduler.messages import BlockCopy, BlockId
from scheduler.sequence import Sequence

_PASSED = BlockId(0)
"""In a block table: a window has passed it, and nobody reads it any more."""

# Of a step, for keeping evicted blocks on the host: where running requests notice nothing of it yet.
_MOST_KEEPING_S = 0.01
_MOST_KEPT_BLOCKS = 1024


class Fit(Enum):
    """The answer to: can this sequence have its blocks?"""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What admitting a sequence would take out of the pool. Good until something else is admitted."""

    found: Found
    first: int
    """The first place of its table that holds a block."""
    end: int
    """How long its table will be."""
    num_free_hits: int
    """Hits that nobody references: they lie in the free list and would leave it."""

    @property
    def num_blocks(self) -> int:
        return self.end - self.first

    @property
    def num_fresh(self) -> int:
        return self.num_blocks - len(self.found.device)

    @property
    def num_from_free(self) -> int:
        return self.num_fresh + self.num_free_hits


class Arrivals(NamedTuple):
    """The copies of a plan that bring an admitted sequence what was found for it."""

    swap_in: list[BlockCopy]
    copies: list[BlockCopy]


class KVCacheManager:
    """Blocks for sequences, shared where their prefixes are equal.

    All of a sequence's known tokens get their blocks at admission, so that a prefill, once begun, never
    waits for memory; a decode takes one block every `block_size` tokens. With a sliding window a sequence
    gets as many as it holds at once at most, and takes one further for each one that the window passed.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.reach = Reach(config)
        self._index = PrefixIndex(config, self.reach)
        self._watermark_blocks = int(config.watermark * config.num_blocks)
        self._held_for_copies: list[BlockId] = []
        self._evicted: list[tuple[bytes, BlockId]] = []
        self._max_kept = _MOST_KEPT_BLOCKS
        if config.copy_s_per_block:
            self._max_kept = min(self._max_kept, int(_MOST_KEEPING_S / config.copy_s_per_block) or 1)
        self.num_kept_blocks = 0
        """Copied to the host because the prefix cache on the device gave them up; since the start."""

    @property
    def prefix_cache(self) -> PrefixCache:
        """What is found on the device."""
        return self._index.cache

    @property
    def swap_space(self) -> SwapSpace:
        return self._index.swap_space

    @property
    def num_changes(self) -> int:
        """Differs from what it was if anybody may find more or less than before."""
        return self.prefix_cache.num_changes + self.swap_space.num_changes

    def blocks_for(self, num_tokens: int) -> int:
        return self.reach.blocks_for(num_tokens)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether the empty pool would be large enough."""
        return self.reach.most_blocks(num_tokens) <= self.pool.num_blocks

    def need(self, seq: Sequence) -> Need:
        """What admitting `seq` would take now; it changes nothing."""
        found = self._index.find(seq)
        if found.tail is not None and self.pool.is_free(found.tail):
            found.tail = None  # to hold it for the copy would cost a block
        return Need(
            found=found,
            first=self.reach.first_block(found.num_tokens),
            end=self.reach.end_block(seq.num_tokens, found.num_tokens),
            num_free_hits=self.pool.count_free(found.device.values()),
        )

    def can_allocate(self, need: Need, *, num_running: int) -> Fit:
        """Whether there is room for it now. The watermark counts only while others run."""
        if need.num_blocks > self.pool.num_blocks:
            return Fit.NEVER
        reserve = self._watermark_blocks if num_running else 0
        return Fit.OK if need.num_from_free + reserve <= self.pool.num_free else Fit.LATER

    def pin(self, need: Need) -> None:
        """Host blocks that it needs are not to be given to those who are preempted for it."""
        for block in need.found.host.values():
            self.swap_space.pin(block)

    def allocate(self, seq: Sequence, need: Need) -> Arrivals:
        """Blocks for a sequence that has none, those found first; `need` must fit.

        Sets `num_computed_tokens` to what was found: at most all but the last token, since something must
        be computed to draw the next one.
        """
        assert not seq.block_ids, f"{seq} has blocks already"
        found = need.found
        for block in found.device.values():
            self.pool.share(block)
        self.pin(need)
        tail = self._hold_for_copy(found.tail)
        seq.num_passed_blocks = need.first
        seq.block_ids = [_PASSED] * need.first
        for place in range(need.first, need.end):
            seq.block_ids.append(found.device[place] if place in found.device else self._pop())
        seq.num_slots = need.end * self.block_size
        seq.num_computed_tokens = found.num_tokens
        self._index.publish_found(seq, found)
        self.drop_copy(seq)
        arrivals = Arrivals(
            [BlockCopy(block, seq.block_ids[place]) for place, block in found.host.items()], []
        )
        if tail is not None:
            place = found.num_tokens // self.block_size
            arrivals.copies.append(BlockCopy(tail, seq.block_ids[place]))
            seq.num_computed_tokens = seq.num_tokens - 1
        return arrivals

    def num_missing(self, seq: Sequence, *, num_lookahead: int = 0) -> int:
        """Blocks that `append` would take."""
        end = self.reach.end_block(seq.num_tokens + num_lookahead, seq.num_computed_tokens)
        return max(end - len(seq.block_ids), 0)

    def append(self, seq: Sequence, *, num_lookahead: int = 0) -> tuple[BlockId, ...] | None:
        """Blocks for the tokens that have none yet; None, and nothing changed, if too few are free.

        `num_lookahead` more tokens may be written behind the known ones.
        """
        num_missing = self.num_missing(seq, num_lookahead=num_lookahead)
        if num_missing > self.pool.num_free:
            return None
        fresh = tuple(self._pop() for _ in range(num_missing))
        seq.block_ids.extend(fresh)
        seq.num_slots = len(seq.block_ids) * self.block_size
        return fresh

    def pass_blocks(self, seq: Sequence) -> None:
        """Give up what the window has passed, now that the next share of `seq` is planned.

        The worker is not told: it does not read that part of the table. Cached blocks can still be found.
        """
        for place in range(seq.num_passed_blocks, self.reach.first_block(seq.num_computed_tokens)):
            self._drop(seq.block_ids[place])
            seq.block_ids[place] = _PASSED
            seq.num_passed_blocks = place + 1

    def publish(self, seq: Sequence, start: int, end: int) -> None:
        """Let others find what [start, end) completes.

        Called when the step is planned: the worker writes the whole batch's keys and values before any
        of it attends, so that even a sequence of the same step may use them. If the step fails,
        `forget` takes it back.
        """
        self._index.publish(seq, start, end)

    def free(self, seq: Sequence) -> None:
        """Give everything back. The tail goes first in line for reuse: it is shared least likely."""
        for block in reversed(seq.block_ids):
            if block != _PASSED:
                self._drop(block)
        seq.block_ids = []
        seq.num_passed_blocks = 0
        seq.num_slots = 0
        seq.num_computed_tokens = 0

    def copy_out(self, seq: Sequence) -> list[BlockCopy]:
        """Take host blocks for all that it has computed and still reaches; what it holds stays its own.

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
        """It is back, it ended while it was swapped out, or its copy cannot be trusted."""
        self.swap_space.give_back(block for block in reversed(seq.host_block_ids) if block != _PASSED)
        seq.host_block_ids = []
        seq.num_swapped_tokens = 0

    def complete_plan(self) -> list[BlockCopy]:
        """Called once all of a plan is decided. Returns what it must copy out besides: evicted prefixes."""
        copies = self._keep_evicted() if self._evicted else []
        if self._held_for_copies:
            for block in self._held_for_copies:
                self._drop(block)
            self._held_for_copies.clear()
        self.swap_space.unpin()
        self._index.complete_plan()
        return copies

    def forget(self, seq: Sequence, *, start: int = 0) -> None:
        """Nobody may find what this sequence computed from `start` on: it cannot be trusted."""
        self._index.forget(seq, start=start)

    def forget_block(self, block: BlockId) -> None:
        """Nobody may find what was to be copied to it."""
        self._index.reuse(block)

    def forget_copies(self, swap_out: tuple[BlockCopy, ...]) -> None:
        """Nobody may find what these copies were to bring to the host: the step failed."""
        for copy in swap_out:
            self.swap_space.forget(copy.target)

    def reset_prefix_cache(self) -> None:
        """Let nothing that was computed so far be found, on neither side; whoever runs keeps its blocks."""
        self._index.clear()

    def _keep_evicted(self) -> list[BlockCopy]:
        """The plan copies out before it writes: what fresh blocks held is still in them then.

        If they are too many for a step, those that were used last are kept.
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
        """Nobody gets it in this plan. None if whoever had it was sent away meanwhile."""
        if tail is None or self.pool.is_free(tail):
            return None
        self.pool.share(tail)
        self._held_for_copies.append(tail)
        return tail

    def _pop(self) -> BlockId:
        block = self.pool.pop()
        key = self._index.reuse(block)
        if key is not None and self._index.keeps_on_host:
            self._evicted.append((key, block))
        return block

    def _drop(self, block: BlockId) -> None:
        """One reference less; without any left it waits for reuse, the longer if it can be found."""
        if self.pool.drop(block):
            if block in self.prefix_cache:
                self.pool.put_last(block)
            else:
                self.pool.put_first(block)
