"""Proposers: each guesses the next tokens of one row from some text.

Owns: the row's own tokens as a source, the text that its client expects, and the replies of late.
Never: cuts a guess to what a grammar or a limit allows (drafter.py).
Source: prompt lookup (n-grams of the row's own text); OpenAI's predicted outputs; suffix decoding over
earlier replies, arXiv:2411.04975, here without trees: the longest match of a few tokens decides.
"""

from typing import Protocol

import numpy as np

from worker.speculation.matching import TokenIds, find_continuations

_LEAST_RESYNC, _MOST_RESYNC = 2, 16
_NO_TOKENS = np.empty(0, np.int32)


class Proposer(Protocol):
    """A source of guesses for one row."""

    def propose(self, tokens: TokenIds, num_wanted: int) -> TokenIds:
        """Guess the tokens that follow `tokens`, the row's prompt and output; as many as wanted at most."""


class OwnText:
    """Continuation of the row's own text as it was when the text last went like its end."""

    def __init__(self, *, least: int, most: int) -> None:
        """Take in the bounds of the match, in tokens."""
        self._least, self._most = least, most

    def propose(self, tokens: TokenIds, num_wanted: int) -> TokenIds:
        """See Proposer. A text that repeats itself is continued beyond its end."""
        places = find_continuations(tokens[:-1], tokens, least=self._least, most=self._most)
        if not len(places):
            return _NO_TOKENS
        place = int(places[-1])
        return tokens[place + np.arange(num_wanted) % (len(tokens) - place)]


class Prediction:
    """The text that the client expects, followed from place to place.

    After a token that is not the expected one, the place is looked up by the last tokens; if they are nowhere
    in the text, one token counts as replaced by another.
    """

    def __init__(self, expected: TokenIds, *, num_prompt_tokens: int) -> None:
        self._expected = expected
        self._num_seen = num_prompt_tokens
        self._place = 0

    def propose(self, tokens: TokenIds, num_wanted: int) -> TokenIds:
        """See Proposer."""
        fresh = tokens[self._num_seen :]
        self._num_seen = len(tokens)
        ahead = self._expected[self._place : self._place + len(fresh)]
        if len(ahead) == len(fresh) and bool((ahead == fresh).all()):
            self._place += len(fresh)
        else:
            self._place = self._find(tokens, self._place + len(fresh))
        return self._expected[self._place : self._place + num_wanted]

    def _find(self, tokens: TokenIds, after: int) -> int:
        """Look up the place; of several the one nearest to `after`, which is the answer if there is none."""
        places = find_continuations(self._expected, tokens, least=_LEAST_RESYNC, most=_MOST_RESYNC)
        if not len(places):
            return min(after, len(self._expected))
        return int(places[np.abs(places - after).argmin()])


class RecentReplies:
    """Texts of replies that ended of late, in one ring of tokens, oldest overwritten first."""

    _BORDER = -1

    def __init__(self, *, capacity_tokens: int, least: int, most: int) -> None:
        self._ring = np.full(capacity_tokens, self._BORDER, np.int32)
        self._end = 0
        self._least, self._most = least, most

    def add(self, reply: TokenIds) -> None:
        """Keep a reply; of a longer one than the ring, the end."""
        reply = np.concatenate((reply[-(len(self._ring) - 1) :], [self._BORDER])).astype(np.int32)
        if self._end + len(reply) > len(self._ring):
            self._ring[self._end :] = self._BORDER
            self._end = 0
        self._ring[self._end : self._end + len(reply)] = reply
        self._end += len(reply)
        self._ring[self._end : self._end + 1] = self._BORDER  # what is left of an overwritten one begins here

    def propose(self, tokens: TokenIds, num_wanted: int) -> TokenIds:
        """See Proposer."""
        places = find_continuations(self._ring, tokens, least=self._least, most=self._most)
        if not len(places):
            return _NO_TOKENS
        found = self._ring[int(places[-1]) :][:num_wanted]
        borders = np.flatnonzero(found == self._BORDER)
        return found[: borders[0]] if len(borders) else found
