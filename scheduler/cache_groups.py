"""Groups of layers that keep the same kind of thing of a sequence for the same time.

The lifetimes, by the tokens of a sequence that they keep:

    ALL        [ every token .................................... ]
    WINDOW(n)                                 [ the last n tokens ]
    CHUNK(n)                     [ from the last multiple of n on ]
    FIXED                                                   [state]   as large after one token as after many
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

_Positions = TypeVar("_Positions")
"""One position, or a tensor or array of them."""


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

    @property
    def window(self) -> int:
        """Length of the window; 0 where there is none."""
        return self.num_tokens if self.kind is LifetimeKind.WINDOW else 0

    @property
    def chunk(self) -> int:
        """Length of a chunk; 0 where there are none."""
        return self.num_tokens if self.kind is LifetimeKind.CHUNK else 0

    def first_read(self, start: _Positions) -> _Positions:
        """First position that a token at position `start` reads. It never falls as `start` grows."""
        position: Any = start
        first: _Positions
        match self.kind:
            case LifetimeKind.WINDOW:
                first = (position - self.num_tokens + 1) * (position >= self.num_tokens)
            case LifetimeKind.CHUNK:
                first = position // self.num_tokens * self.num_tokens
            case _:
                first = position * 0
        return first


ALL_TOKENS = Lifetime()


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of one lifetime."""

    lifetime: Lifetime = ALL_TOKENS
    num_stripes: int = 1
    """Blocks of a place, which is block_size tokens of all the group's layers; of FIXED: of its one state."""

    @property
    def name(self) -> str:
        """Name for readers: `all`, `window-1024`, `chunk-8192`, `state`."""
        kind, num_tokens = self.lifetime.kind, self.lifetime.num_tokens
        if kind is LifetimeKind.FIXED:
            return "state"
        return f"{kind}-{num_tokens}" if num_tokens else kind.value

    def most_places(self, num_tokens: int, *, block_size: int, num_step_tokens: int) -> int:
        """Most places that a sequence of `num_tokens` holds at once, in steps of `num_step_tokens`."""
        if self.lifetime.kind is LifetimeKind.FIXED:
            return 1
        end = -(-num_tokens // block_size)
        if not self.lifetime.is_limited:
            return end
        # A range of tokens touches one block more than fit into it, unless it begins where a block does.
        longest_range = self.lifetime.num_tokens - 1 + num_step_tokens
        return min(end, -(-(longest_range - 1) // block_size) + 1)


def num_tables(groups: tuple[CacheGroup, ...]) -> int:
    """Tables of blocks that have an entry for each place: one for each stripe of what is kept of tokens."""
    return sum([group.num_stripes for group in groups if group.lifetime.kind is not LifetimeKind.FIXED])


def most_blocks(
    groups: tuple[CacheGroup, ...], num_tokens: int, *, block_size: int, num_step_tokens: int
) -> int:
    """Most blocks that a sequence of `num_tokens` holds at once, of all groups."""
    sizes = {"block_size": block_size, "num_step_tokens": num_step_tokens}
    return sum([group.num_stripes * group.most_places(num_tokens, **sizes) for group in groups])


def joint_lifetime(lifetimes: list[Lifetime]) -> Lifetime:
    """Lifetime of layers that share their blocks: what one of them still reads is kept of all."""
    if len(set(lifetimes)) == 1:
        return lifetimes[0]
    if not all(each.is_limited for each in lifetimes):
        return ALL_TOKENS
    return Lifetime(LifetimeKind.WINDOW, max(each.num_tokens for each in lifetimes))
