"""Drafts for each row: its proposer, and the rest of its guess."""

import numpy as np
from numpy.typing import NDArray

from scheduler.messages import NewSequence
from worker.speculation.proposers import ExpectedText, OwnText, Proposer, Scope, ScopedReplies, TokenIds
from worker.worker_config import DraftMethod, SpeculationConfig

_RING_TOKENS = 1 << 16
"""Kept of each scope, and searched for each token that is sampled: some 20 µs."""
_REACH_OF_ALL = 1 << 19
"""Tokens of all texts, predictions among them, that all rows of a step may search together. A row with a long
context among many others looks at the last part of it: on a GPU the next step waits for these searches."""
_MAX_SCOPES = 64
"""16 MiB of tokens."""


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
        self._num_prompt_tokens: dict[int, int] = {}
        self._scopes: dict[int, Scope] = {}

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
        self._num_prompt_tokens[row] = new.num_prompt_tokens
        self._scopes[row] = _scope_of(new)

    def remove(self, row: int, tokens: TokenIds) -> None:
        """Forget a row, whose tokens were these; an unknown one is ignored."""
        self._proposers.pop(row, None)
        num_prompt_tokens = self._num_prompt_tokens.pop(row, len(tokens))
        scope = self._scopes.pop(row, None)
        if self._replies is not None and scope is not None and len(tokens) > num_prompt_tokens:
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
