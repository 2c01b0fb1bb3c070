"""Drafts for each row, by proposers, each of which guesses the next tokens from some text.

Owns: the row's own tokens as a source, the text that its client expects, and the replies of late, which are
kept apart by scope.
Source: prompt lookup (A. Saxena, 2023: n-grams of the row's own text); OpenAI's predicted outputs; suffix
decoding over earlier replies, arXiv:2411.04975, here without trees: the longest match decides.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scheduler.messages import NewSequence
from worker.worker_config import DraftMethod, SpeculationConfig

_RING_TOKENS = 1 << 16
"""Kept of each scope, and searched for each token that is sampled: some 20 µs."""
_REACH_OF_ALL = 1 << 19
"""Tokens of all texts, predictions among them, that all rows of a step may search together. A row with a long
context among many others looks at the last part of it: on a GPU the next step waits for these searches."""
_MAX_SCOPES = 64
"""16 MiB of tokens."""

Scope = tuple[str, str, str]
"""Tenant, cache salt and adapter of a row."""

_LEAST_RESYNC, _MOST_RESYNC = 2, 16
_NO_TOKENS = np.empty(0, np.int32)

TokenIds = NDArray[np.int32]


def find_continuations(text: TokenIds, tail: TokenIds, *, least: int, most: int) -> NDArray[np.int64]:
    """Find the places of `text` that come right after the end of `tail`, in ascending order.

    The match is as long as any, up to `most` tokens; none if that is less than `least`. The end of the text
    may be a place. The tokens themselves are compared, some microseconds for 8,000, so that there is no index
    to build or to bound.
    """
    none = np.empty(0, np.int64)
    if len(tail) < least:
        return none
    places = np.flatnonzero(text[least - 1 :] == tail[-1]) + least
    for length in range(2, min(most, len(tail)) + 1):
        longer = places[places >= length]
        longer = longer[text[longer - length] == tail[-length]]
        if not len(longer):
            return places if length > least else none
        places = longer
    return places


class Proposer(Protocol):
    """A source of guesses for one row."""

    def propose(self, tokens: TokenIds, num_wanted: int, *, reach: int) -> TokenIds:
        """Guess the tokens that follow `tokens`, the row's prompt and output; as many as wanted at most.

        Limits of a search: the last `reach` of a text that grows, and of another those about the
        place where it was left.
        """


class OwnText:
    """Continuation of the row's own text as it was when the text last went like its end."""

    def __init__(self, *, least: int, most: int) -> None:
        """Take in the bounds of the match, in tokens."""
        self._least, self._most = least, most

    def propose(self, tokens: TokenIds, num_wanted: int, *, reach: int) -> TokenIds:
        """See Proposer. A text that repeats itself is continued beyond its end."""
        tokens = tokens[-reach:]
        places = find_continuations(tokens[:-1], tokens, least=self._least, most=self._most)
        if not len(places):
            return _NO_TOKENS
        place = int(places[-1])
        return tokens[place + np.arange(num_wanted) % (len(tokens) - place)]


class ExpectedText:
    """The text that the client expects, followed from place to place.

    After a token that is not the expected one, the place is looked up by the last tokens, at most half the
    reach before it or behind; if they are nowhere there, one token counts as replaced by another.
    """

    def __init__(self, expected: TokenIds, *, num_prompt_tokens: int) -> None:
        self._expected = expected
        self._num_seen = num_prompt_tokens
        self._place = 0

    def propose(self, tokens: TokenIds, num_wanted: int, *, reach: int) -> TokenIds:
        """See Proposer. The next tokens are compared first, and searched for only where they differ."""
        fresh = tokens[self._num_seen :]
        self._num_seen = len(tokens)
        ahead = self._expected[self._place : self._place + len(fresh)]
        if len(ahead) == len(fresh) and bool((ahead == fresh).all()):
            self._place += len(fresh)
        else:
            self._place = self._find(tokens, self._place + len(fresh), reach)
        return self._expected[self._place : self._place + num_wanted]

    def _find(self, tokens: TokenIds, after: int, reach: int) -> int:
        """Look up the place; of several the one nearest to `after`, which is the answer if there is none."""
        first = max(after - reach // 2, 0)
        near = self._expected[first : first + reach]
        places = first + find_continuations(near, tokens, least=_LEAST_RESYNC, most=_MOST_RESYNC)
        if not len(places):
            return min(after, len(self._expected))
        return int(places[np.abs(places - after).argmin()])


class RecentReplies:
    """A Proposer: texts of replies that ended of late, in one ring of tokens, oldest overwritten first."""

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
        self._ring[self._end : self._end + 1] = self._BORDER  # the rest of an overwritten one begins here

    def propose(self, tokens: TokenIds, num_wanted: int, *, reach: int) -> TokenIds:
        for recent, newest_end in self._within(reach):
            places = find_continuations(recent, tokens, least=self._least, most=self._most)
            if len(places):
                newest = places[np.searchsorted(places, newest_end) - 1]  # none before it: the last of all
                found = recent[int(newest) :][:num_wanted]
                borders = np.flatnonzero(found == self._BORDER)
                return found[: borders[0]] if len(borders) else found
        return _NO_TOKENS

    def _within(self, reach: int) -> Iterator[tuple[TokenIds, int]]:
        """Yield the parts of the ring that hold the last `reach` tokens, and where in each its newest ends.

        The newer part comes first.
        """
        if reach >= len(self._ring):
            yield self._ring, self._end
            return
        yield self._ring[max(self._end - reach, 0) : self._end], self._end
        if self._end < reach:
            yield self._ring[self._end - reach :], reach - self._end


class ScopedReplies:
    """Recent replies of each scope. The scope whose last reply is the oldest is forgotten first.

    A draft that holds shows in the time of a reply. So a search never reads a reply of another scope, and the
    time of the search depends on the own scope's alone.
    """

    def __init__(self, *, max_scopes: int, capacity_tokens: int, least: int, most: int) -> None:
        """Take in the most scopes, and the bounds of the replies of each."""
        self._max_scopes = max_scopes
        self._bounds = {"capacity_tokens": capacity_tokens, "least": least, "most": most}
        self._replies: dict[Scope, RecentReplies] = {}  # the last to get a reply stands last

    def add(self, scope: Scope, reply: TokenIds) -> None:
        """Keep a reply for rows of its scope."""
        replies = self._replies.pop(scope, None)
        if replies is None:
            if len(self._replies) >= self._max_scopes:
                del self._replies[next(iter(self._replies))]
            replies = RecentReplies(**self._bounds)
        self._replies[scope] = replies
        replies.add(reply)

    def of(self, scope: Scope) -> Proposer:
        """Return the source for rows of a scope."""
        return _RepliesOf(self._replies, scope)


class _RepliesOf:
    """A Proposer: replies of one scope, looked up when they are asked for: it may be forgotten before."""

    def __init__(self, replies: Mapping[Scope, RecentReplies], scope: Scope) -> None:
        self._replies, self._scope = replies, scope

    def propose(self, tokens: TokenIds, num_wanted: int, *, reach: int) -> TokenIds:
        replies = self._replies.get(self._scope)
        return _NO_TOKENS if replies is None else replies.propose(tokens, num_wanted, reach=reach)


class Drafter:
    """Drafts of all rows. A row without a source of guesses costs nothing."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._most = config.num_speculative_tokens
        self._method = config.method
        bounds = {"least": config.prompt_lookup_min, "most": config.prompt_lookup_max}
        self._least = config.prompt_lookup_min
        self._own_text = OwnText(**bounds)
        self._replies: ScopedReplies | None = None
        if config.method is DraftMethod.SUFFIX:
            self._replies = ScopedReplies(max_scopes=_MAX_SCOPES, capacity_tokens=_RING_TOKENS, **bounds)
        self._proposers: dict[int, tuple[Proposer, ...]] = {}
        self._begun: dict[int, tuple[int, Scope]] = {}  # tokens of the prompt, and the scope of each row

    @property
    def is_idle(self) -> bool:
        """Whether no row has a source of guesses."""
        return not self._proposers

    def add(self, row: int, new: NewSequence) -> None:
        """Take a row into use. A prediction is its only source, since its tokens are reported."""
        if new.prediction:
            expected = np.array(new.prediction, np.int32)
            self._proposers[row] = (ExpectedText(expected, num_prompt_tokens=new.num_prompt_tokens),)
        elif self._replies is not None:
            self._proposers[row] = (self._own_text, self._replies.of(_scope_of(new)))
        elif self._method is DraftMethod.NGRAM:
            self._proposers[row] = (self._own_text,)
        self._begun[row] = new.num_prompt_tokens, _scope_of(new)

    def remove(self, row: int, tokens: TokenIds) -> None:
        """Forget a row, whose tokens were these; an unknown one is ignored."""
        self._proposers.pop(row, None)
        num_prompt_tokens, scope = self._begun.pop(row, (len(tokens), ("", "", "")))
        if self._replies is not None and len(tokens) > num_prompt_tokens:
            self._replies.add(scope, tokens[num_prompt_tokens:])

    def hopeless(self, rows: list[int], token_ids_CL: TokenIds, num_tokens_C: NDArray[np.int64]) -> set[int]:
        """Find rows that get no guess, since their last two tokens are nowhere before in their only text.

        One comparison for all of them takes as long as the search of one. All tokens must be known. Texts
        that are long together are left to `propose`, which reads a part of each.
        """
        rows = [row for row in rows if self._proposers.get(row) == (self._own_text,)]
        rows_R = np.array(rows, np.int64)
        most = int(num_tokens_C[rows_R].max(initial=0))
        if self._least < 2 or len(rows) < 2 or most < 2 or len(rows) * most > _REACH_OF_ALL:
            return set()
        texts_RL, ends_R = token_ids_CL[rows_R, :most], num_tokens_C[rows_R, None]
        last_R1 = np.take_along_axis(texts_RL, ends_R - 1, 1)
        before_R1 = np.take_along_axis(texts_RL, ends_R - 2, 1)
        # Of what lies behind the end of a row some may match too: then it is searched in vain.
        found_RL = (texts_RL[:, 1:] == last_R1) & (texts_RL[:, :-1] == before_R1)
        return {row for row, num in zip(rows, found_RL.sum(axis=1).tolist(), strict=True) if num < 2}

    def propose(self, row: int, tokens: TokenIds, *, num_rows: int) -> tuple[int, ...]:
        """Guess the tokens after those of a row, one of `num_rows`; none without a match."""
        proposers = self._proposers.get(row, ())
        for proposer in proposers:
            found = proposer.propose(tokens, self._most, reach=_REACH_OF_ALL // (num_rows * len(proposers)))
            if len(found):
                return tuple(found.tolist())
        return ()


def _scope_of(new: NewSequence) -> Scope:
    return (*new.scope, new.adapter)
