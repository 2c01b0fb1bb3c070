"""Load and prefixes of one engine, as the process that chooses between engines knows them.

Owns: the counts of sequences and tokens that were sent there and have not ended. They are raised when a
request is sent, so that a burst sees itself; a report of the engine never overwrites them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from scheduler.group_places import GroupPlaces, main_group, most_blocks
from scheduler.longest_hit import longest_hit
from scheduler.prefix_keys import ChangeKind, PrefixChange

_MOST_UNBEGUN = 2
"""Sequences that may wait at an engine whatever their length: so it never lacks the next one."""
_STEPS_AHEAD = 2
"""Steps whose tokens may wait there: one is computed while the other is on its way."""
_HELD_TOKEN_PRICE = 0.25
"""Cost of a token of context that an engine holds, in prompt tokens computed: all its steps read it."""
_LIVE_PRICE_TOKENS = 64
"""Cost of another running sequence, in prompt tokens computed: it takes a token of each step."""


class EngineSize(NamedTuple):
    """Limits of an engine, known when its model is loaded."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    step_tokens: int
    """Most tokens of a step."""
    groups: tuple[GroupPlaces, ...] = ()
    """Groups of layers; empty: there is one, which keeps all tokens."""


class EngineView:
    """One engine. `size` is None while its model is not loaded."""

    def __init__(self, size: EngineSize | None = None) -> None:
        self.size = size
        groups = () if size is None else size.groups
        self._main = main_group(groups) if groups else 0
        self._is_plain = all(group.keeps_all for group in groups)
        self.keys: list[set[bytes]] = [set() for _ in groups or (0,)]
        """Keys of what is found there, of each group."""
        self.num_live = 0
        """Sequences that were sent and have not ended."""
        self.num_unbegun = 0
        """Sequences among them without an output."""
        self.num_unbegun_tokens = 0
        """Prompt tokens of those, as far as no cache has them."""
        self.num_unbegun_blocks = 0
        """Most blocks that those take, each by itself."""
        self.num_held_tokens = 0
        """Tokens of context of all live sequences, shared ones for each."""
        self.num_free_blocks = 0 if size is None else size.num_blocks
        """Blocks free for others, as last reported."""
        self.priorities: Counter[int] = Counter()
        """Requests by priority."""
        self.last_chosen = 0
        """Number of the choice that took it last."""

    def note_prefixes(self, changes: Iterable[PrefixChange]) -> None:
        for change in changes:
            keys = self.keys[self._main if change.group is None else change.group.number]
            if change.kind is ChangeKind.STORED:
                keys.add(change.key)
            elif change.kind is ChangeKind.FORGOTTEN:
                keys.discard(change.key)
            else:
                keys.clear()

    def num_cached_tokens(self, keys: Sequence[bytes]) -> int:
        """Tokens at the beginning of a prompt with these keys that need not be computed there."""
        size = self.size
        if size is None or not self.keys[self._main]:
            return 0
        num_leading = sum(1 for _ in takewhile(self.keys[self._main].__contains__, keys))
        if self._is_plain:
            return size.block_size * num_leading
        tests = [lambda place, known=known: keys[place] in known for known in self.keys]
        num_places = num_leading if size.groups[self._main].keeps_all else len(keys)
        return size.block_size * longest_hit(size.groups, tests, num_places, size.block_size).num_places

    def can_begin(self, num_tokens: int, *, priority: float) -> bool:
        """Whether a request with `num_tokens` to compute can begin soon.

        Priority inf is that of a request which takes no other's place.
        """
        size = self.size
        if size is None:
            return False
        if any(each > priority for each in self.priorities):
            return True  # the engine lets it pass, and may take a running one's place for it
        if self.num_live >= size.max_num_seqs:
            return False
        if self.num_unbegun < _MOST_UNBEGUN:
            return True
        return self.num_unbegun_tokens + num_tokens <= _STEPS_AHEAD * size.step_tokens

    @property
    def burden(self) -> float:
        """Work of all sequences there, in prompt tokens computed."""
        beside = _HELD_TOKEN_PRICE * self.num_held_tokens + _LIVE_PRICE_TOKENS * self.num_live
        return self.num_unbegun_tokens + beside

    def least_cost(self, num_tokens: int, keys: Sequence[bytes]) -> float:
        """Return what `cost` is at least for a prompt of this number of tokens, with these keys."""
        may_hit = bool(keys) and (not self._is_plain or keys[0] in self.keys[self._main])
        return self.burden + (1 if may_hit else num_tokens)

    def cost(self, num_tokens: int) -> float:
        """Work before the first token, and that of all other sequences, in prompt tokens computed."""
        assert self.size is not None
        # Without room it would wait for others to end, or push them out.
        has_room = self.num_unbegun_blocks + self.num_blocks(num_tokens) <= self.num_free_blocks
        return self.burden + num_tokens + (0 if has_room else self.size.num_blocks * self.size.block_size)

    def num_blocks(self, num_tokens: int) -> int:
        """Count the most blocks that a request of this number of tokens takes; for none, none."""
        assert self.size is not None
        if not self.size.groups:
            return -(-num_tokens // self.size.block_size)
        return most_blocks(self.size.groups, num_tokens) if num_tokens else 0
