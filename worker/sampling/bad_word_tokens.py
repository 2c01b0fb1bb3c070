"""Bad words of one sequence: the tokens that it must not sample next.

Owns: the words as token sequences, and the end of what was generated.
Never: logits (logits.py), or how a word becomes tokens (the engine's tokenizer).
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int64]


class BadWords:
    """Bad words, indexed by the tokens before their last: one look-up for each length, not for each word.

    A word counts only if all of its tokens are generated: the prompt may end with its beginning.
    """

    def __init__(self, words: Iterable[Sequence[int]], generated: Sequence[int], *, vocab_size: int) -> None:
        last_of: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for *before, last in words:
            if 0 <= last < vocab_size:  # another one can never be sampled
                last_of[tuple(before)].add(last)
        self._last_of = {before: np.array(sorted(tokens), np.int64) for before, tokens in last_of.items()}
        self._lengths = sorted({len(before) for before in self._last_of})
        longest = self._lengths[-1] if self._lengths else 0
        self._tail = deque(generated[-longest:] if longest else (), maxlen=longest)

    def after(self, token_id: int) -> "BadWords":
        """Copy the words with one more token generated."""
        words = copy(self)
        words._tail = self._tail.copy()
        words.record(token_id)
        return words

    def record(self, token_id: int) -> None:
        self._tail.append(token_id)

    def banned_ids(self) -> list[TokenIds]:
        """List the tokens that must not be sampled now; a token may be in several lists."""
        tail = tuple(self._tail)
        # A slice from -0 on would be all of it.
        befores = (tail[len(tail) - length :] for length in self._lengths if length <= len(tail))
        return [self._last_of[before] for before in befores if before in self._last_of]
