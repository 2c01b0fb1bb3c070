"""Restore points: positions behind which a prompt may go on, where a window or a state would be gone by then.

Owns: which positions of a sequence these are. All are ends of blocks, under whose keys they are found.
Never: blocks (kv_cache_manager.py), or which prefix is found (longest_hit.py).

    prompt   [ system prompt .. | turn | reply | turn ........ |begin of the answer] reply
                                ^ fork: others part here        ^ end of the last message

The end of a reply needs no point: what its window reaches is given back last.
Sources: points where prompts part are the rule of Marconi, arXiv:2411.19379.
"""

from scheduler.blocks.prefix_index import PrefixHit
from scheduler.sequence import Sequence

_ANSWER_TOKENS = 8
"""Tokens at the end of a prompt that begin the answer, and are another text once the answer is history."""
STEADY_TOKENS = 8192
"""Distance of further states of a long prompt, against edits in its middle, while blocks were never used."""


def points_of(seq: Sequence, hit: PrefixHit, block_size: int) -> tuple[int, ...]:
    """Positions behind which others will go on.

    The end of the last message, where this prompt parts from an earlier one, and what it was restored from.
    """
    end_of_message = max(seq.num_prompt_tokens - 1 - _ANSWER_TOKENS, 0) // block_size * block_size
    return tuple({end_of_message, hit.num_kept_tokens, hit.num_tokens // block_size * block_size})
