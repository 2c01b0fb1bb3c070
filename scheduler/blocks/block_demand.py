"""Blocks that admitting a sequence would take, and the answer to whether it can have them."""

from enum import Enum
from typing import NamedTuple

from scheduler.blocks.prefix_index import PrefixHit
from scheduler.messages import BlockCopy


class AllocationStatus(Enum):
    """Answer to: can this sequence have its blocks?"""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class BlockDemand(NamedTuple):
    """Blocks that admitting a sequence would take out of the pool. Good until another is admitted."""

    hit: PrefixHit
    places: list[range]
    """Places that the table of each group will hold."""
    num_blocks: int
    """Blocks that it will hold."""
    num_fresh: int
    """Blocks of these that no hit gives."""
    num_from_free: int
    """Blocks that leave the free list, for the time of the plan at least."""
    takes_point: bool
    """Whether it goes on in the blocks of the restore point that was found: there is no room for a copy."""


class AdmissionCopies(NamedTuple):
    """Copies of a plan that bring an admitted sequence the prefix that was found for it."""

    swap_in: list[BlockCopy]
    copies: list[BlockCopy]
