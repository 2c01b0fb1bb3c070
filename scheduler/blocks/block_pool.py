"""Pool of physical blocks: which are free, and which of the free ones is reused next.

Owns: block ids, reference counts, the free list in eviction order. Every operation is O(1).
Never: sequences (kv_cache_manager.py), contents (prefix_cache.py) or tensors (worker/attention/kv_cache.py).
Source: PagedAttention, arXiv:2309.06180, section 4.

The free list is doubly linked through two arrays, so that a block found again by its content can leave
from the middle. Block 0, which is never handed out, is its sentinel:

    head = after[0]                                    tail = before[0]
    0 -> 7 -> 3 -> 12 -> ... -> 5 -> 0      (after)
    next to be reused               last to be reused
"""

from collections.abc import Iterable
from typing import cast

from scheduler.messages import BlockId

_SENTINEL = BlockId(0)


class BlockPool:
    """Blocks 1 to num_blocks. A block is in the free list exactly if its count of references is 0."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._references = [0] * (num_blocks + 1)
        self._after = cast("list[BlockId]", [*range(1, num_blocks + 1), 0])
        self._before = cast("list[BlockId]", [num_blocks, *range(num_blocks)])

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def is_free(self, block: BlockId) -> bool:
        return self._references[block] == 0

    def count_free(self, blocks: Iterable[BlockId]) -> int:
        """Number of `blocks` without a reference."""
        references = self._references
        return [references[block] for block in blocks].count(0)

    def num_references(self, block: BlockId) -> int:
        return self._references[block]

    def pop(self) -> BlockId:
        """Take the block that is reused next. The caller makes sure that one is free."""
        assert self.num_free, "the caller counts free blocks before it takes any"
        block = self._after[_SENTINEL]
        self._unlink(block)
        self._references[block] = 1
        return block

    def share(self, block: BlockId) -> None:
        """Add a reference; a free block leaves the free list."""
        if self._references[block] == 0:
            self._unlink(block)
        self._references[block] += 1

    def drop(self, block: BlockId) -> bool:
        """Drop a reference. True if it was the last.

        The caller then puts the block back into the free list.
        """
        assert self._references[block] > 0, f"block {block} is free already"
        self._references[block] -= 1
        return self._references[block] == 0

    def put_first(self, block: BlockId) -> None:
        """Make the block the next to be reused: its content is worth nothing."""
        self._link(block, _SENTINEL, self._after[_SENTINEL])

    def put_last(self, block: BlockId) -> None:
        """Make the block the last to be reused: its content may be asked for again."""
        self._link(block, self._before[_SENTINEL], _SENTINEL)

    def free_blocks(self) -> list[BlockId]:
        """Free blocks in the order in which they would be reused. O(free); for tests and invariants."""
        blocks: list[BlockId] = []
        block = self._after[_SENTINEL]
        while block != _SENTINEL:
            blocks.append(block)
            block = self._after[block]
        return blocks

    def _link(self, block: BlockId, before: BlockId, after: BlockId) -> None:
        assert self._references[block] == 0
        self._before[block], self._after[block] = before, after
        self._after[before] = block
        self._before[after] = block
        self.num_free += 1

    def _unlink(self, block: BlockId) -> None:
        before, after = self._before[block], self._after[block]
        self._after[before] = after
        self._before[after] = before
        self.num_free -= 1
