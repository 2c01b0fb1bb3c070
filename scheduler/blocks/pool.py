"""Pool of physical blocks: which are free, and which of the free ones is reused next.

Owns: block ids, reference counts, the free list in eviction order. Every operation is O(1) for a block.
Source: PagedAttention, arXiv:2309.06180, section 4.

The free list is doubly linked through two arrays, so that a block found again by its content can leave
from the middle. Block 0, which is never handed out, is its sentinel:

    head = after[0]                                    tail = before[0]
    0 -> 7 -> 3 -> 12 -> ... -> 5 -> 0      (after)
    next to be reused               last to be reused
"""

from collections.abc import Container, Iterable
from functools import lru_cache
from typing import cast

from scheduler.messages import BlockId

_SENTINEL = BlockId(0)


class BlockPool:
    """Blocks 1 to num_blocks. A block is in the free list exactly if its count of references is 0."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._references = [0] * (num_blocks + 1)
        self._last_passed = BlockId(num_blocks)
        """Last of the blocks at the front that are reused before those of `kept`; 0: there are none."""
        numbers = _numbers(num_blocks + 1)
        self._after = cast("list[BlockId]", [*numbers[1:], 0])
        self._before = cast("list[BlockId]", [num_blocks, *numbers[:-1]])

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

    def take(self, num_blocks: int) -> list[BlockId]:
        """Take the blocks that are reused next. The caller makes sure that as many are free."""
        assert self.num_free >= num_blocks, "the caller counts free blocks before it takes any"
        after, references = self._after, self._references
        taken: list[BlockId] = []
        block = after[_SENTINEL]
        for _ in range(num_blocks):
            references[block] = 1
            taken.append(block)
            block = after[block]
        after[_SENTINEL], self._before[block] = block, _SENTINEL
        self.num_free -= num_blocks
        if references[self._last_passed]:
            self._last_passed = _SENTINEL
        return taken

    def next_free(self, num_blocks: int) -> list[BlockId]:
        """Blocks that `take` would take."""
        blocks, block = [], self._after[_SENTINEL]
        for _ in range(num_blocks):
            blocks.append(block)
            block = self._after[block]
        return blocks

    def share(self, block: BlockId) -> None:
        """Add a reference; a free block leaves the free list."""
        if self._references[block] == 0:
            self._unlink(block)
        self._references[block] += 1

    def release(self, blocks: Iterable[BlockId], kept: Container[BlockId]) -> None:
        """Drop a reference to each in turn; after the last one the block is free.

        It becomes the next to be reused, or the last if it is in `kept`: its content may be asked for again.
        """
        after, before, references = self._after, self._before, self._references
        num_freed = 0
        for block in blocks:
            num_left = references[block] - 1
            assert num_left >= 0, f"block {block} is free already"
            references[block] = num_left
            if num_left:
                continue
            if block in kept:
                left, right = before[_SENTINEL], _SENTINEL
            else:
                left, right = _SENTINEL, after[_SENTINEL]
            before[block], after[block] = left, right
            after[left] = before[right] = block
            num_freed += 1
        self.num_free += num_freed

    def requeue(self, blocks: Iterable[BlockId], kept: Container[BlockId]) -> None:
        """Move those of `blocks` that are free to where `release` would put them."""
        free = [block for block in blocks if self.is_free(block)]
        for block in free:
            self.share(block)
        self.release(free, kept)

    def release_passed(self, blocks: Iterable[BlockId]) -> None:
        """Drop a reference to each in turn; those without any left are reused before all of `kept`.

        Those before them are blocks that hold nothing, and those that were passed earlier.
        """
        after, before, references = self._after, self._before, self._references
        left = self._last_passed
        for block in blocks:
            references[block] -= 1
            if references[block]:
                continue
            right = after[left]
            before[block], after[block] = left, right
            after[left] = before[right] = block
            left = block
            self.num_free += 1
        self._last_passed = left

    def _unlink(self, block: BlockId) -> None:
        before, after = self._before[block], self._after[block]
        if block == self._last_passed:
            self._last_passed = before
        self._after[before] = after
        self._before[after] = before
        self.num_free -= 1


@lru_cache(maxsize=2)
def _numbers(end: int) -> list[int]:
    """Numbers below `end`, the same objects for all pools: a simulation has a thousand devices and hosts."""
    return list(range(end))
