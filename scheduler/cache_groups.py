"""Groups of layers that keep the same kind of thing of a sequence for the same time.

Owns: the rules of lifetime, and the records of a group, of what a sequence holds of it, and of a position at
which a sequence can be taken up again.
Never: blocks that are free or shared (blocks/), or tensors (worker/attention/kv_cache.py).

    ALL        [ every token .................................... ]
    WINDOW(n)                                 [ the last n tokens ]
    CHUNK(n)                     [ from the last multiple of n on ]
    FIXED                                                   [state]   as large after one token as after many
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from scheduler.messages import BlockId


class LifetimeKind(StrEnum):
    """Rule by which the layers of a group keep something of each token."""

    ALL = "all"
    WINDOW = "window"
    CHUNK = "chunk"
    FIXED = "fixed"


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Time for which something is kept of a token. Raises ValueError for a window or chunk below 1."""

    kind: LifetimeKind = LifetimeKind.ALL
    num_tokens: int = 0
    """Most tokens that one reads, itself included: of WINDOW and CHUNK; 0 of the others."""

    def __post_init__(self) -> None:
        if self.num_tokens < (1 if self.is_limited else 0):
            raise ValueError(f"a {self.kind} must be at least 1 token long, not {self.num_tokens}")

    @property
    def is_limited(self) -> bool:
        """Whether there are tokens that later ones never read."""
        return self.kind in (LifetimeKind.WINDOW, LifetimeKind.CHUNK)

    def first_read(self, start: int) -> int:
        """First position that a token at position `start` reads. It never falls as `start` grows."""
        match self.kind:
            case LifetimeKind.WINDOW:
                return max(start - self.num_tokens + 1, 0)
            case LifetimeKind.CHUNK:
                return start // self.num_tokens * self.num_tokens
        return 0


ALL_TOKENS = Lifetime()


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of one lifetime."""

    lifetime: Lifetime = ALL_TOKENS
    num_stripes: int = 1
    """Blocks of a place, which is block_size tokens of all the group's layers; of FIXED: of its one state."""


@dataclass(slots=True)
class BlockTable:
    """Blocks that a sequence holds of one group, on one side: the device's or the host's."""

    first: int = 0
    """First place that is held; those before it are passed."""
    block_ids: list[BlockId] = field(default_factory=list)
    """Blocks of the held places alone: that of stripe s of place p is at (p - first) * num_stripes + s."""

    def end(self, num_stripes: int) -> int:
        """Place behind the last one that is held."""
        return self.first + len(self.block_ids) // num_stripes


class RestorePoint(NamedTuple):
    """Position at which all groups have what the next token reads, windows and states too."""

    num_tokens: int
    """Tokens before it; a multiple of nothing."""
    key: bytes
    """Key of the last full block before it in the chain of prefix keys; empty if there is none."""


def joint_lifetime(lifetimes: list[Lifetime]) -> Lifetime:
    """Lifetime of layers that share their blocks: what one of them still reads is kept of all."""
    if len(set(lifetimes)) == 1:
        return lifetimes[0]
    if not all(each.is_limited for each in lifetimes):
        return ALL_TOKENS
    return Lifetime(LifetimeKind.WINDOW, max(each.num_tokens for each in lifetimes))
