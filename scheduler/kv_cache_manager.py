"""A sequence's block table: what it needs, what it shares, when it gives back.

Owns: the block tables, through the pool (which blocks are free) and the prefix cache (what is in them).
Never: chooses who has to go; it says OK, LATER or NEVER and on anything but OK it changes nothing.
Source: PagedAttention, arXiv:2309.06180. Hits are taken out of the free list before fresh blocks are
popped, else a fresh block could evict a hit.
"""

from dataclasses import dataclass
from enum import Enum

from scheduler.block_pool import BlockPool
from scheduler.config import PrefixCaching, SchedulerConfig
from scheduler.messages import BlockId
from scheduler.prefix_cache import PrefixCache, block_key, root_key
from scheduler.sequence import Sequence


class Fit(Enum):
    """The answer to: can this sequence have its blocks?"""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What admitting a sequence would take out of the pool; it changes nothing."""

    hits: list[BlockId]
    num_fresh: int
    num_free_hits: int  # hits that nobody references: they lie in the free list and would leave it

    @property
    def num_from_free(self) -> int:
        return self.num_fresh + self.num_free_hits


class KVCacheManager:
    """Blocks for sequences, shared where their prefixes are equal.

    All of a sequence's known tokens get their blocks at admission, so that a prefill, once begun, never
    waits for memory; a decode takes one block every `block_size` tokens.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.prefix_cache = PrefixCache()
        self._caching = config.prefix_caching is PrefixCaching.ON
        self._watermark_blocks = int(config.watermark * config.num_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether the empty pool would be large enough."""
        return self.blocks_for(num_tokens) <= self.pool.num_blocks

    def can_allocate(self, seq: Sequence, *, num_running: int) -> Fit:
        """Whether `seq` could be admitted now. The watermark counts only while others run."""
        if not self.can_ever_fit(seq.num_tokens):
            return Fit.NEVER
        reserve = self._watermark_blocks if num_running else 0
        return Fit.OK if self.need(seq).num_from_free + reserve <= self.pool.num_free else Fit.LATER

    def need(self, seq: Sequence) -> Need:
        hits: list[BlockId] = []
        if self._caching:
            num_findable = (seq.num_tokens - 1) // self.block_size
            hits = self.prefix_cache.find(self._keys(seq, num_findable)[:num_findable])
        return Need(
            hits=hits,
            num_fresh=self.blocks_for(seq.num_tokens) - len(hits),
            num_free_hits=sum(1 for block in hits if self.pool.is_free(block)),
        )

    def allocate(self, seq: Sequence) -> None:
        """Blocks for all known tokens of a sequence that has none, cached ones first.

        Sets `num_computed_tokens` to what the cache holds: at most all but the last token, since
        something must be computed to draw the next one. Only after `can_allocate` said OK.
        """
        assert not seq.block_ids, f"{seq} has blocks already"
        need = self.need(seq)
        for block in need.hits:
            self.pool.share(block)
        seq.block_ids = need.hits
        seq.num_computed_tokens = len(need.hits) * self.block_size
        self._extend(seq, need.num_fresh)

    def append(self, seq: Sequence) -> tuple[BlockId, ...] | None:
        """Blocks for the tokens that have none yet; None, and nothing changed, if too few are free."""
        num_missing = self.blocks_for(seq.num_tokens) - len(seq.block_ids)
        if num_missing > self.pool.num_free:
            return None
        return self._extend(seq, num_missing)

    def publish(self, seq: Sequence, start: int, end: int) -> None:
        """Let others find the blocks that [start, end) completes.

        Called when the step is planned: the worker writes the whole batch's keys and values before any
        of it attends, so that even a sequence of the same step may use them. If the step fails,
        `forget` takes it back.
        """
        if not self._caching:
            return
        first, last = start // self.block_size, end // self.block_size
        if first == last:
            return
        keys = self._keys(seq, last)
        for index in range(first, last):
            self.prefix_cache.publish(keys[index], seq.block_ids[index])

    def free(self, seq: Sequence) -> None:
        """Give everything back. The tail goes first in line for reuse: it is shared least likely."""
        for block in reversed(seq.block_ids):
            if self.pool.drop(block):
                if block in self.prefix_cache:
                    self.pool.put_last(block)
                else:
                    self.pool.put_first(block)
        seq.block_ids = []
        seq.num_slots = 0
        seq.num_computed_tokens = 0

    def forget(self, seq: Sequence) -> None:
        """Nobody may find this sequence's blocks any more: what they hold cannot be trusted."""
        for block in seq.block_ids:
            self.prefix_cache.forget(block)

    def _extend(self, seq: Sequence, num_blocks: int) -> tuple[BlockId, ...]:
        fresh = tuple(self._pop() for _ in range(num_blocks))
        seq.block_ids.extend(fresh)
        seq.num_slots = len(seq.block_ids) * self.block_size
        return fresh

    def _pop(self) -> BlockId:
        block = self.pool.pop()
        self.prefix_cache.forget(block)
        return block

    def _keys(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """At least the first `num_blocks` keys of `seq`; tokens never change, so keys are kept."""
        keys = seq.block_keys
        while len(keys) < num_blocks:
            start = len(keys) * self.block_size
            parent = keys[-1] if keys else root_key(seq.cache_salt)
            keys.append(block_key(parent, seq.token_ids[start : start + self.block_size]))
        return keys
