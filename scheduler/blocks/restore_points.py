"""Restore points: positions behind which a prompt may go on, where a window or a state would be gone by then.

Owns: which positions of a running sequence these are; the ends of replies, with what lies behind their last
full place; and which points are given up once they are too many.

    prompt   [ system prompt .. | turn | reply | turn ........ |begin of the answer] reply |
                                ^ fork: others part here       ^ end of the last message   ^ end of the reply

Points of a running sequence are ends of blocks, under whose keys they are found. The end of a reply is where
it is: a sequence with a state leaves it in its own blocks, and the beginning of a place with it. What a
window reaches there is given back last, and needs no more.
Sources: points where prompts part are the rule of Marconi, arXiv:2411.19379.
"""

from typing import NamedTuple

from scheduler.blocks.prefix_cache import PrefixCache, Row
from scheduler.messages import BlockId
from scheduler.prefix_keys import block_key
from scheduler.sequence import Sequence

_ANSWER_TOKENS = 8
"""Tokens at the end of a prompt that begin the answer, and are another text once the answer is history.
Counted where the end of the last message is not known."""
STEADY_TOKENS = 8192
"""Distance of further states of a long prompt, against edits in its middle, while blocks were never used."""


def points_of(seq: Sequence, num_kept_tokens: int, num_found_tokens: int, block_size: int) -> tuple[int, ...]:
    """Positions behind which others will go on.

    Those that the caller named, or the end of the last message as a guess; where this prompt parts from an
    earlier one, of which the groups that keep all tokens have `num_kept_tokens`; and what it was restored
    from.
    """
    last = seq.num_prompt_tokens - 1
    named = seq.restore_at or (max(last - _ANSWER_TOKENS, 0),)
    places = {min(each, last) // block_size for each in (*named, num_found_tokens)}
    return tuple({num_kept_tokens, *(place * block_size for place in places)})


class ReplyEnd(NamedTuple):
    """State at the end of a reply, and the beginning of a place before it, which later prompts copy."""

    num_tokens: int
    """Tokens in the place that is not full."""
    row: Row
    """Blocks of that place in each group of tokens, then those of the state."""


class ReplyEnds:
    """At most one behind each full block: the newest."""

    def __init__(self) -> None:
        self._rows = PrefixCache()
        self._begun: dict[bytes, tuple[int, bytes]] = {}  # tokens of the place, and the key of these

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> PrefixCache:
        """Rows by the key of the full block before them."""
        return self._rows

    def publish(self, parent: bytes, seq: Sequence, start: int, end: int, row: Row) -> None:
        """Let the end of a reply be found, with the tokens [start, end) behind the last full block."""
        self.forget_all(self._rows.get(parent) or ())
        self._rows.publish(parent, row)
        self._begun[parent] = (end - start, _key(parent, seq, start, end))

    def find(self, parent: bytes, seq: Sequence, start: int) -> ReplyEnd | None:
        """Return the end of a reply that a prompt goes on from, behind `start` and before its last token."""
        row = self._rows.get(parent)
        if row is None:
            return None
        num_tokens, key = self._begun[parent]
        end = start + num_tokens
        is_same = end < seq.num_tokens and _key(parent, seq, start, end) == key
        return ReplyEnd(num_tokens, row) if is_same else None

    def forget_all(self, blocks: list[BlockId] | Row) -> list[bytes]:
        """Forget those that have one of these blocks; returns the keys of the blocks before them."""
        found = [parent for parent, _ in self._rows.forget_all(blocks)] if len(self._rows) else []
        for parent in found:
            del self._begun[parent]
        return found

    def clear(self) -> None:
        self._rows.clear()
        self._begun.clear()


def _key(parent: bytes, seq: Sequence, start: int, end: int) -> bytes:
    return block_key(parent, seq.token_ids[start:end], seq.inputs_within(start, end))
