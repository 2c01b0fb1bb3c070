"""Prefix cache: full places of a group of layers found again by their content.

Source: keys are those of prefix_keys.py: equal ones mean equal prefixes of the same salt.
"""

from collections.abc import Container, KeysView, Sequence
from itertools import repeat, takewhile

from scheduler.messages import BlockId
from scheduler.prefix_keys import ChangedGroup, PrefixJournal

Row = tuple[BlockId, ...]
"""Blocks of a place, one for each stripe of its group."""


def rows_of(blocks: list[BlockId], num_stripes: int) -> list[Row]:
    """Rows of a table, in which the blocks of a place lie together."""
    return list(zip(*[iter(blocks)] * num_stripes, strict=True))


class PrefixCache:
    """At most one row per key; a second one with the same content simply stays unpublished.

    A row is found whole or not at all: with one of its blocks all of it is forgotten.
    """

    def __init__(self) -> None:
        self._row_by_key: dict[bytes, Row] = {}
        self._key_by_block: dict[BlockId, bytes] = {}
        self.num_changes = 0
        self.journal: PrefixJournal | None = None
        """Record of places that are found, and found no more, for readers elsewhere; None: there are none."""
        self.group: ChangedGroup | None = None
        """Group of the changes in that record."""

    def __len__(self) -> int:
        return len(self._row_by_key)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._key_by_block

    @property
    def blocks(self) -> KeysView[BlockId]:
        """Blocks that can be found."""
        return self._key_by_block.keys()

    def get(self, key: bytes) -> Row | None:
        return self._row_by_key.get(key)

    def leading_rows(self, keys: list[bytes]) -> list[Row]:
        """Rows of `keys`, up to the first key that has none."""
        return list(takewhile(bool, map(self._row_by_key.get, keys)))  # type: ignore[arg-type]

    def key_of(self, block: BlockId) -> bytes | None:
        return self._key_by_block.get(block)

    def publish(self, key: bytes, row: Row) -> None:
        if key not in self._row_by_key:
            self._row_by_key[key] = row
            for block in row:
                self._key_by_block[block] = key
            self.num_changes += 1

    def publish_all(self, keys: list[bytes], rows: list[Row]) -> None:
        """Publish each row under its key."""
        for key, row in zip(keys, rows, strict=True):
            self.publish(key, row)

    def replace(self, key: bytes, row: Row) -> None:
        """Publish; a row that had the key before is not found any more."""
        self.forget_key(key)
        self.forget_all(row)
        self.publish(key, row)

    def forget_all(self, blocks: Sequence[BlockId]) -> list[tuple[bytes, Row]]:
        """Remove the rows of these blocks: their content is about to change, or was never written.

        Returns those that were found, with their keys.
        """
        if self._key_by_block.keys().isdisjoint(blocks):
            return []
        # Of a row's blocks the first that is looked at takes the others along.
        found = []
        for key in filter(None, map(self._key_by_block.pop, blocks, repeat(b""))):
            row = self._row_by_key.pop(key, None)
            if row is not None:
                found.append((key, row))
        for _, row in found:
            if len(row) > 1:
                for block in row:
                    self._key_by_block.pop(block, None)
        self.num_changes += len(found)
        if self.journal is not None:
            for key, _ in found:
                self.journal.note_forgotten(key, self.group)
        return found

    def forget_key(self, key: bytes) -> None:
        row = self._row_by_key.get(key)
        if row is not None:
            self.forget_all(row)

    def clear(self) -> None:
        self._row_by_key.clear()
        self._key_by_block.clear()
        self.num_changes += 1
        if self.journal is not None:
            self.journal.note_cleared(self.group)


class _AnyOf:
    """Blocks that one of several caches finds."""

    def __init__(self, caches: list[PrefixCache]) -> None:
        self._caches = caches

    def __contains__(self, block: object) -> bool:
        return any([block in cache.blocks for cache in self._caches])


def any_of(caches: list[PrefixCache]) -> Container[BlockId]:
    """Blocks that can be found in one of `caches`."""
    return caches[0].blocks if len(caches) == 1 else _AnyOf(caches)
