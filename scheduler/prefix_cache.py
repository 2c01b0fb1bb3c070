"""Full blocks found again by their content.

Owns: the map from a block's key to the block, and back.
Never: reference counts or the order of eviction (block_pool.py).

A key is a SHA-256 chain: it covers the tokens of its own block and, through its parent's key, all tokens
before, and the cache salt at the root. Equal keys therefore mean equal prefixes of the same salt; a
collision that would leak one tenant's text to another is out of reach (CVE-2025-25183 was a weak hash).
"""

from array import array
from collections.abc import Iterable
from hashlib import sha256

from scheduler.messages import BlockId


def root_key(cache_salt: str) -> bytes:
    """The parent of a sequence's first block. An adapter's name would join the salt here."""
    return sha256(cache_salt.encode()).digest()


def block_key(parent: bytes, token_ids: list[int]) -> bytes:
    """The key of a full block; `token_ids` are its own tokens only."""
    return sha256(parent + array("I", token_ids).tobytes()).digest()


class PrefixCache:
    """At most one block per key; a second block with the same content simply stays unpublished."""

    def __init__(self) -> None:
        self._block_by_key: dict[bytes, BlockId] = {}
        self._key_by_block: dict[BlockId, bytes] = {}
        self.num_changes = 0

    def __len__(self) -> int:
        return len(self._block_by_key)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._key_by_block

    def find(self, keys: Iterable[bytes]) -> list[BlockId]:
        """The blocks of the longest prefix of `keys` that is known."""
        found: list[BlockId] = []
        for key in keys:
            block = self._block_by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, key: bytes, block: BlockId) -> None:
        if key not in self._block_by_key:
            self._block_by_key[key] = block
            self._key_by_block[block] = key
            self.num_changes += 1

    def forget(self, block: BlockId) -> None:
        """Its content is about to change, or was never written. A block that is not known is fine."""
        key = self._key_by_block.pop(block, None)
        if key is not None:
            del self._block_by_key[key]
            self.num_changes += 1

    def clear(self) -> None:
        self._block_by_key.clear()
        self._key_by_block.clear()
        self.num_changes += 1

    def published(self) -> dict[BlockId, bytes]:
        """A copy of what is known; for tests and invariants."""
        return dict(self._key_by_block)
