"""Index of KV that is there already, on the device or on the host.

Owns: the blocks that are found by content. Full blocks on the device (the prefix cache), full blocks in the
swap space (its second tier), and the tails of prompts, which are copied and never shared.
Never: takes or gives back a block (kv_cache_manager.py).
Sources: vLLM's lazy CPU offload, which saves blocks about to be evicted; copy-on-write of PagedAttention,
arXiv:2309.06180, for tails.

A tail is the part of a prompt behind its last full block, without the prompt's last token, which is computed
in any case. A request with n > 1 has n sequences with one tail. The sequence that computed it goes on writing
behind it in the same block; so the others get a copy of the block, if they are admitted in a later step. In
the same step the tail is not written yet when copies are made, and to compute it costs less than to wait.
"""

from array import array
from dataclasses import dataclass, field

from scheduler.blocks.attended_blocks import AttendedBlocks
from scheduler.blocks.prefix_cache import PrefixCache
from scheduler.blocks.swap_space import SwapSpace
from scheduler.config import HostTier, PrefixCaching, SchedulerConfig
from scheduler.messages import BlockId
from scheduler.prefix_keys import ChangeKind, JournalContent, PrefixChange, PrefixJournal, block_key, root_key
from scheduler.sequence import Sequence


@dataclass(slots=True, kw_only=True)
class PrefixHit:
    """Prefix that a sequence need not compute. Places count blocks from the first of its table."""

    num_tokens: int = 0
    """Length of the prefix; a window may have passed its beginning."""
    device: dict[int, BlockId] = field(default_factory=dict)
    """Blocks to share, by place."""
    host: dict[int, BlockId] = field(default_factory=dict)
    """Host blocks to copy in, by place."""
    tail: BlockId | None = None
    """Block to copy for the place behind `num_tokens`; all but the last known token is then there."""


class PrefixIndex:
    """Finds and publishes; keys are computed once for each sequence, since its tokens never change."""

    def __init__(self, config: SchedulerConfig, attended: AttendedBlocks) -> None:
        self.cache = PrefixCache()
        self.swap_space = SwapSpace(config.num_host_blocks)
        self._tails = PrefixCache()
        self._new_tails: list[tuple[bytes, BlockId]] = []
        self._attended = attended
        self._block_size = config.block_size
        self._is_on = config.prefix_caching is PrefixCaching.ON
        self.keeps_on_host = self._is_on and config.host_tier is HostTier.ON and config.num_host_blocks > 0

    def num_unhashed(self, seq: Sequence) -> int:
        """Tokens whose keys `find` would have to compute first; they are kept."""
        if not self._is_on or not seq.reads_prefix_cache:
            return 0
        return max(self._num_findable(seq) - len(seq.block_keys), 0) * self._block_size

    def find(self, seq: Sequence) -> PrefixHit:
        """Longest prefix of a sequence that has no blocks; its own copy on the host counts too."""
        hit = self._find_prefix(seq) if self._is_on and seq.reads_prefix_cache else PrefixHit()
        num_swapped = min(seq.num_swapped_tokens, seq.num_tokens - 1)
        if num_swapped > hit.num_tokens:
            return self._find_swapped(seq, num_swapped)
        if hit.num_tokens == self._num_findable(seq) * self._block_size:
            hit.tail = self._find_tail(seq)
        return hit

    def publish(self, seq: Sequence, start: int, end: int) -> None:
        """Let others find the blocks that [start, end) completes, and a prompt's tail that it completes."""
        if not self._is_on:
            return
        first, last = start // self._block_size, end // self._block_size
        if first < last:
            keys = self._keys(seq, last)
            # Plans in flight may have moved the window past a block before its last token was known.
            first = max(first, seq.num_passed_blocks)
            if self.cache.journal is None:
                self.cache.publish_all(keys[first:last], seq.block_ids[first:last])
            else:
                for place in range(first, last):
                    self._publish(seq, place, keys[place])
        if start < seq.num_prompt_tokens <= end:
            key = self._tail_key(seq)
            if key:
                self._new_tails.append((key, seq.block_ids[self._num_findable_of_prompt(seq)]))

    def publish_hit(self, seq: Sequence, hit: PrefixHit) -> None:
        """Let blocks that this plan copies in be found: they arrive before anything is computed."""
        if not self._is_on or not hit.host:
            return
        num_full = hit.num_tokens // self._block_size
        keys = self._keys(seq, num_full)
        for place in hit.host:
            if place < num_full:
                self._publish(seq, place, keys[place])

    def publish_swapped(self, device_block: BlockId, host_block: BlockId) -> None:
        """Let others find the copy of a preempted sequence as well, if they can find the block itself."""
        key = self.cache.key_of(device_block)
        if key is not None and self.keeps_on_host:
            self.swap_space.publish(key, host_block)

    def reuse(self, block: BlockId) -> bytes | None:
        """Forget a block whose content is about to change.

        Returns the key under which it was found, if any.
        """
        self._tails.forget(block)
        return self.cache.forget(block)

    def reuse_all(self, blocks: list[BlockId]) -> list[tuple[bytes, BlockId]]:
        """Forget blocks, as `reuse` does; returns those that were found, with their keys."""
        if len(self._tails):
            self._tails.forget_all(blocks)
        return self.cache.forget_all(blocks)

    def forget(self, seq: Sequence, *, start: int = 0) -> None:
        """Forget all that this sequence computed from `start` on, wherever it is by now."""
        first = start // self._block_size
        for block in seq.block_ids[first:]:
            self.reuse(block)
        for key in seq.block_keys[first:]:
            self.cache.forget_key(key)
            self.swap_space.forget_key(key)

    def clear(self) -> None:
        """Forget all that was computed so far."""
        self.cache.clear()
        self._tails.clear()
        self.swap_space.clear()

    def complete_plan(self) -> None:
        """Let the next plan find the tails that this plan computes. The newest lives longest."""
        for key, block in self._new_tails:
            self._tails.replace(key, block)
        self._new_tails.clear()

    def _publish(self, seq: Sequence, place: int, key: bytes) -> None:
        """Let others find the block at a place of the table of `seq`."""
        journal = self.cache.journal
        if journal is not None and self.cache.get(key) is None:
            journal.note_stored(self._stored(seq, place, journal))
        self.cache.publish(key, seq.block_ids[place])

    def _stored(self, seq: Sequence, place: int, journal: PrefixJournal) -> PrefixChange:
        key = seq.block_keys[place]
        if journal.content is JournalContent.KEYS:
            return PrefixChange(ChangeKind.STORED, key)
        start = place * self._block_size
        token_ids = array("I", seq.token_ids[start : start + self._block_size]).tobytes()
        parent = seq.block_keys[place - 1] if place else b""
        return PrefixChange(ChangeKind.STORED, key, parent, token_ids, seq.cache_salt, seq.adapter)

    def _find_prefix(self, seq: Sequence) -> PrefixHit:
        """Longest prefix of full blocks of which all blocks that the next token attends are there."""
        num_findable = self._num_findable(seq)
        keys = self._keys(seq, num_findable)
        # Most often that is all: one call, because a long prompt that does not fit is looked up in each step.
        device = dict(enumerate(self.cache.leading_blocks(keys[:num_findable])))
        end, unbroken_from = len(device), 0
        if not self.keeps_on_host and not self._attended.is_limited:
            return PrefixHit(num_tokens=end * self._block_size, device=device)
        host: dict[int, BlockId] = {}
        for place in range(end, num_findable):
            if (block := self.cache.get(keys[place])) is not None:
                device[place] = block
            elif (block := self.swap_space.find(keys[place])) is not None:
                host[place] = block
            elif self._attended.is_limited:
                unbroken_from = place + 1
                continue
            else:
                break
            if unbroken_from <= self._attended.first_block((place + 1) * self._block_size):
                end = place + 1
        first = self._attended.first_block(end * self._block_size)
        return PrefixHit(
            num_tokens=end * self._block_size,
            device={place: block for place, block in device.items() if first <= place < end},
            host={place: block for place, block in host.items() if first <= place < end},
        )

    def _find_swapped(self, seq: Sequence, num_tokens: int) -> PrefixHit:
        """Prefix in its own copy on the host, but for the blocks that the device still has."""
        hit = PrefixHit(num_tokens=num_tokens)
        num_full = num_tokens // self._block_size if self._is_on else 0
        keys = self._keys(seq, num_full)
        for place in range(self._attended.first_block(num_tokens), self._attended.blocks_for(num_tokens)):
            block = self.cache.get(keys[place]) if place < num_full else None
            if block is not None:
                hit.device[place] = block
            else:
                hit.host[place] = seq.host_block_ids[place]
        return hit

    def _find_tail(self, seq: Sequence) -> BlockId | None:
        if not self._is_on or not seq.reads_prefix_cache or seq.num_tokens > seq.num_prompt_tokens:
            return None
        return self._tails.get(self._tail_key(seq)) if len(self._tails) else None

    def _tail_key(self, seq: Sequence) -> bytes:
        """Key of a prompt's tail; empty if it has none."""
        if seq.tail_key is None:
            place, end = self._num_findable_of_prompt(seq), seq.num_prompt_tokens - 1
            start = place * self._block_size
            seq.tail_key = b""
            if start < end:
                parent = self._parent_key(seq, place)
                seq.tail_key = block_key(parent, seq.token_ids[start:end], seq.inputs_within(start, end))
        return seq.tail_key

    def _num_findable(self, seq: Sequence) -> int:
        """Full blocks of all known tokens but the last, which is computed in any case."""
        return (seq.num_tokens - 1) // self._block_size

    def _num_findable_of_prompt(self, seq: Sequence) -> int:
        return (seq.num_prompt_tokens - 1) // self._block_size

    def _parent_key(self, seq: Sequence, place: int) -> bytes:
        return self._keys(seq, place)[place - 1] if place else root_key(seq.cache_salt, seq.adapter)

    def _keys(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """At least the first `num_blocks` keys of `seq`."""
        keys = seq.block_keys
        while len(keys) < num_blocks:
            start = len(keys) * self._block_size
            parent = keys[-1] if keys else root_key(seq.cache_salt, seq.adapter)
            end = start + self._block_size
            assert end <= len(seq.token_ids), "a key covers tokens, and these are not known yet"
            keys.append(block_key(parent, seq.token_ids[start:end], seq.inputs_within(start, end)))
        return keys
