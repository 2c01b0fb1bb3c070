"""Whom a more urgent waiting sequence sends away, if that is enough.

Owns: the choice. Pure: it changes nothing.
Source: what users of priority scheduling ask for and no engine of 2026 does well: with all places taken
by work of low priority, an urgent request waits until one of them ends.

The rules, each against a fault that others have had:
- strictly more urgent, by priority and by rank: two of one priority never send each other away;
- all or nothing: unless the victims' places and blocks suffice, nobody is sent away;
- what the rest of the line needs to grow in this step is left alone, so nothing planned is undone;
- one that was preempted is protected until it has made some progress: no thrashing.
"""

from collections import Counter
from dataclasses import dataclass, field

from scheduler.blocks.block_pool import BlockPool
from scheduler.blocks.kv_cache_manager import KVCacheManager, Need
from scheduler.messages import BlockId
from scheduler.sequence import Sequence

# Tokens that a resumed sequence generates before it can be displaced again, so that bringing it back was
# not for nothing. An urgent newcomer that finds everybody protected waits for so many tokens.
PROTECTED_TOKENS = 16


def is_more_urgent(candidate: Sequence, other: Sequence) -> bool:
    return candidate.priority < other.priority and candidate.rank < other.rank


def stands_before_some(candidate: Sequence, running: list[Sequence]) -> bool:
    """Whether somebody in the line, which is in rank order, is less urgent."""
    for seq in reversed(running):
        if seq.rank < candidate.rank:
            return False
        if seq.priority > candidate.priority:
            return True
    return False


@dataclass(slots=True)
class _Gain:
    """What comes free while victims are added: a shared block only with the last of its holders."""

    pool: BlockPool
    kept: set[BlockId]  # the candidate itself shares them
    num_blocks: int = 0
    dropped: Counter[BlockId] = field(default_factory=Counter)

    def add(self, victim: Sequence) -> None:
        for block in victim.block_ids:
            self.dropped[block] += 1
            if self.dropped[block] == self.pool.num_references(block) and block not in self.kept:
                self.num_blocks += 1


def choose_victims(
    candidate: Sequence, need: Need, running: list[Sequence], *, kv: KVCacheManager, num_free_slots: int
) -> list[Sequence] | None:
    """Victims from the back of the line, as few as suffice; none may be enough. None: it cannot be done."""
    num_growing = sum(kv.num_missing(seq) for seq in running if seq.num_tokens > seq.num_slots)
    gain = _Gain(kv.pool, set(need.found.device.values()))
    victims: list[Sequence] = []
    line = reversed(running)
    while num_free_slots + len(victims) < 1 or (
        kv.pool.num_free + gain.num_blocks < need.num_from_free + num_growing
    ):
        victim = next((seq for seq in line if is_more_urgent(candidate, seq) and not seq.is_protected), None)
        if victim is None:
            return None
        victims.append(victim)
        gain.add(victim)
        num_growing -= kv.num_missing(victim)
    return victims
