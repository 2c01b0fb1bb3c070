"""Swap space: host memory for KV blocks of preempted sequences, and of cached prefixes that left the device.

Owns: which host blocks a preempted sequence holds, what content the others keep, and which is reused next.
Source: pool.py and prefix_cache.py once more, for the host: a block without a holder may keep content
that is found by its key, until the block is needed. Each group of layers has keys of its own.

A plan copies out before it copies in. So a host block that a plan copies in is pinned until the plan is
complete: no other copy of the same plan may go to it.
"""

from collections.abc import Iterable

from scheduler.blocks.pool import BlockPool
from scheduler.blocks.prefix_cache import PrefixCache, Row, any_of
from scheduler.messages import BlockId


class SwapSpace:
    """Host blocks 1 to num_blocks. Preempted sequences come first.

    They take blocks that only keep a prefix.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        self.num_blocks = num_blocks
        self._pool = BlockPool(num_blocks)
        self._kept = [PrefixCache() for _ in range(num_groups)]
        self._pinned: list[BlockId] = []

    @property
    def num_free(self) -> int:
        """Blocks without a holder, those with a kept prefix included."""
        return self._pool.num_free

    @property
    def num_used(self) -> int:
        """Blocks that preempted sequences hold, between two plans."""
        return self._pool.num_used

    @property
    def num_changes(self) -> int:
        """Changes of what can be found, since the start."""
        return sum([kept.num_changes for kept in self._kept])

    def take(self, num_blocks: int) -> list[BlockId]:
        """Take blocks for a preempted sequence. The caller makes sure that as many are free."""
        blocks = self._pool.take(num_blocks)
        for kept in self._kept:
            kept.forget_all(blocks)
        return blocks

    def give_back(self, blocks: Iterable[BlockId]) -> None:
        self._pool.release(blocks, any_of(self._kept))

    def publish(self, group: int, key: bytes, row: Row) -> None:
        """Let the content of held blocks be found too, until one is reused."""
        self._kept[group].publish(key, row)

    def keep(self, group: int, key: bytes, num_stripes: int) -> Row:
        """Take blocks to copy the content of `key` to. Empty if it is kept already, or there is no room.

        Kept content that is asked for again becomes the last to be given up.
        """
        kept = self._kept[group].get(key)
        if kept is not None:
            self._pool.requeue(kept, kept)
            return ()
        if self._pool.num_free < num_stripes:
            return ()
        row = tuple(self.take(num_stripes))
        self._kept[group].publish(key, row)
        self.give_back(row)
        return row

    def find(self, group: int, key: bytes) -> Row | None:
        return self._kept[group].get(key)

    def pin(self, block: BlockId) -> None:
        """Keep a block of the swap space from being reused: this plan copies it to the device."""
        self._pool.share(block)
        self._pinned.append(block)

    def unpin(self) -> None:
        """Release the pinned blocks of a complete plan.

        The head of a prefix, pinned first, is given up last.
        """
        if self._pinned:
            self.give_back(reversed(self._pinned))
            self._pinned.clear()

    def forget(self, block: BlockId) -> None:
        """Let the content not be found: it is unknown whether it ever arrived."""
        for kept in self._kept:
            kept.forget_all((block,))

    def forget_key(self, key: bytes) -> None:
        """Forget a key whose content may be wrong."""
        for kept in self._kept:
            kept.forget_key(key)

    def clear(self) -> None:
        """Forget all content."""
        for kept in self._kept:
            kept.clear()
