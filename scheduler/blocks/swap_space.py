"""Swap space: host memory for KV blocks of preempted sequences, and of cached prefixes that left the device.

Owns: which host blocks a preempted sequence holds, what content the others keep, and which is reused next.
Never: moves contents; the plan's copies do.
Source: pool.py and prefix_cache.py once more, for the host: a block without a holder may keep content
that is found by its key, until the block is needed.

A plan copies out before it copies in. So a host block that a plan copies in is pinned until the plan is
complete: no other copy of the same plan may go to it.
"""

from collections.abc import Iterable

from scheduler.blocks.pool import BlockPool
from scheduler.blocks.prefix_cache import PrefixCache
from scheduler.messages import BlockId


class SwapSpace:
    """Host blocks 1 to num_blocks. Preempted sequences come first.

    They take blocks that only keep a prefix.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = BlockPool(num_blocks)
        self._kept = PrefixCache()
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
        return self._kept.num_changes

    def take(self, num_blocks: int) -> list[BlockId]:
        """Take blocks for a preempted sequence. The caller makes sure that as many are free."""
        return [self._pop() for _ in range(num_blocks)]

    def give_back(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            self._drop(block)

    def publish(self, key: bytes, block: BlockId) -> None:
        """Let the content of a held block be found too, until the block is reused."""
        self._kept.publish(key, block)

    def keep(self, key: bytes) -> BlockId | None:
        """Take a block to copy the content of `key` to. None if it is kept already, or there is no room.

        Kept content that is asked for again becomes the last to be given up.
        """
        kept = self._kept.get(key)
        if kept is not None:
            if self._pool.is_free(kept):
                self._pool.share(kept)
                self._drop(kept)
            return None
        if not self._pool.num_free:
            return None
        block = self._pop()
        self._kept.publish(key, block)
        self._drop(block)
        return block

    def find(self, key: bytes) -> BlockId | None:
        return self._kept.get(key)

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
        self._kept.forget(block)

    def forget_key(self, key: bytes) -> None:
        """Forget a key whose content may be wrong."""
        self._kept.forget_key(key)

    def clear(self) -> None:
        """Forget all content."""
        self._kept.clear()

    def free_blocks(self) -> list[BlockId]:
        """Free blocks in the order in which they would be reused; for tests and invariants."""
        return self._pool.free_blocks()

    def kept(self) -> dict[BlockId, bytes]:
        """Copy of the keys by block; for tests and invariants."""
        return self._kept.published()

    def _pop(self) -> BlockId:
        (block,) = self._pool.take(1)
        self._kept.forget(block)
        return block

    def _drop(self, block: BlockId) -> None:
        self._pool.release((block,), self._kept.blocks)
