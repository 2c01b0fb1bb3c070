"""Keys of full KV blocks by their content, and the record of blocks that are found and no longer found.

A key is a SHA-256 chain: it covers the tokens of its own block and, through its parent's key, all tokens
before, and the cache salt at the root. Equal keys therefore mean equal prefixes of the same salt; a
collision that would leak one tenant's text to another is out of reach (CVE-2025-25183 was a weak hash).
"""

from array import array
from collections.abc import Sequence
from enum import StrEnum
from hashlib import sha256
from typing import NamedTuple

from scheduler.cache_groups import Lifetime


def root_key(cache_salt: str, adapter: str = "") -> bytes:
    """Key of the parent of a sequence's first block.

    The two texts are hashed apart: joined, one could end earlier and the other begin earlier, for the same
    key.
    """
    return sha256(sha256(cache_salt.encode()).digest() + adapter.encode()).digest()


def block_key(parent: bytes, token_ids: list[int], inputs: bytes = b"") -> bytes:
    """Key of a full block, or of the beginning of one.

    `token_ids` and `inputs`, which name the encoder inputs at some of the positions, are the block's own
    only.
    """
    return sha256(parent + array("I", token_ids).tobytes() + inputs).digest()


def prompt_keys(token_ids: Sequence[int], block_size: int, root: bytes) -> list[bytes]:
    """Keys of the full blocks that a prompt may find: all but its last token, which is computed anyway."""
    keys: list[bytes] = []
    parent = root
    for start in range(0, (len(token_ids) - 1) // block_size * block_size, block_size):
        parent = block_key(parent, list(token_ids[start : start + block_size]))
        keys.append(parent)
    return keys


class ChangeKind(StrEnum):
    """Change of the blocks that are found."""

    STORED = "stored"
    FORGOTTEN = "forgotten"
    CLEARED = "cleared"  # everything is forgotten


class ChangedGroup(NamedTuple):
    """Group of layers of which something is found."""

    number: int
    lifetime: Lifetime


class PrefixChange(NamedTuple):
    """One change."""

    kind: ChangeKind
    key: bytes = b""
    parent: bytes = b""
    """Key of the block before; empty for the first block of a sequence."""
    token_ids: bytes = b""
    """Tokens of a stored block, 32 bits each, little-endian; empty if the journal keeps keys only."""
    salt: str = ""
    """Cache salt of its sequence; with the tokens only."""
    adapter: str = ""
    """Adapter of its sequence; with the tokens only."""
    group: ChangedGroup | None = None
    """Group of layers; None: all layers are one."""


class JournalContent(StrEnum):
    """Content of a journal."""

    KEYS = "keys"
    TOKENS = "tokens"


class PrefixJournal:
    """Changes since they were last taken, in order. A step makes a bounded number of them."""

    def __init__(self, content: JournalContent) -> None:
        self.content = content
        self._changes: list[PrefixChange] = []

    def note_stored(self, change: PrefixChange) -> None:
        self._changes.append(change)

    def note_forgotten(self, key: bytes, group: ChangedGroup | None) -> None:
        self._changes.append(PrefixChange(ChangeKind.FORGOTTEN, key, group=group))

    def note_cleared(self, group: ChangedGroup | None) -> None:
        self._changes.append(PrefixChange(ChangeKind.CLEARED, group=group))

    def take(self) -> list[PrefixChange]:
        changes, self._changes = self._changes, []
        return changes
