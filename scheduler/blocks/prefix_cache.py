"""Prefix cache: full blocks found again by their content.

Owns: the map from a block's key to the block, and back.
Never: reference counts or the order of eviction (pool.py).
Source: keys are those of prefix_keys.py: equal ones mean equal prefixes of the same salt.
"""

from collections.abc import KeysView
from itertools import repeat, takewhile

from scheduler.messages import BlockId
from scheduler.prefix_keys import PrefixJournal


class PrefixCache:
    """At most one block per key; a second block with the same content simply stays unpublished."""

    def __init__(self) -> None:
        self._block_by_key: dict[bytes, BlockId] = {}
        self._key_by_block: dict[BlockId, bytes] = {}
        self.num_changes = 0
        self.journal: PrefixJournal | None = None
        """Record of blocks that are found, and found no more, for readers outside; None: there are none."""

    def __len__(self) -> int:
        return len(self._block_by_key)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._key_by_block

    @property
    def blocks(self) -> KeysView[BlockId]:
        """Blocks that can be found."""
        return self._key_by_block.keys()

    def get(self, key: bytes) -> BlockId | None:
        return self._block_by_key.get(key)

    def leading_blocks(self, keys: list[bytes]) -> list[BlockId]:
        """Blocks of `keys`, up to the first key that has none."""
        return list(takewhile(bool, map(self._block_by_key.get, keys)))  # type: ignore[arg-type]

    def key_of(self, block: BlockId) -> bytes | None:
        return self._key_by_block.get(block)

    def publish(self, key: bytes, block: BlockId) -> None:
        if key not in self._block_by_key:
            self._block_by_key[key] = block
            self._key_by_block[block] = key
            self.num_changes += 1

    def publish_all(self, keys: list[bytes], blocks: list[BlockId]) -> None:
        """Publish each block under its key."""
        if not self._block_by_key.keys().isdisjoint(keys):
            known = self._block_by_key
            pairs = [pair for pair in zip(keys, blocks, strict=True) if pair[0] not in known]
            keys, blocks = [key for key, _ in pairs], [block for _, block in pairs]
        self._block_by_key.update(zip(keys, blocks, strict=True))
        self._key_by_block.update(zip(blocks, keys, strict=True))
        self.num_changes += len(keys)

    def replace(self, key: bytes, block: BlockId) -> None:
        """Publish; a block that had the key before is not found any more."""
        self.forget_key(key)
        self.forget(block)
        self.publish(key, block)

    def forget(self, block: BlockId) -> bytes | None:
        """Remove a block: its content is about to change, or was never written.

        Returns its key, if it had one.
        """
        found = self.forget_all([block])
        return found[0][0] if found else None

    def forget_all(self, blocks: list[BlockId]) -> list[tuple[bytes, BlockId]]:
        """Remove the findable ones among these blocks; returns them with their keys."""
        keys = map(self._key_by_block.pop, blocks, repeat(b""))
        found = [pair for pair in zip(keys, blocks, strict=True) if pair[0]]
        for key, _ in found:
            del self._block_by_key[key]
        self.num_changes += len(found)
        if self.journal is not None:
            for key, _ in found:
                self.journal.note_forgotten(key)
        return found

    def forget_key(self, key: bytes) -> None:
        block = self._block_by_key.get(key)
        if block is not None:
            self.forget(block)

    def clear(self) -> None:
        self._block_by_key.clear()
        self._key_by_block.clear()
        self.num_changes += 1
        if self.journal is not None:
            self.journal.note_cleared()

    def published(self) -> dict[BlockId, bytes]:
        """Copy of the keys by block; for tests and invariants."""
        return dict(self._key_by_block)
