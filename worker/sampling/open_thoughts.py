"""Thoughts of a row before its answer: the tokens that may not come before the mark that ends them.

Owns: whether they are open, and how many tokens they have.
Never: tensors, or the grammar that waits for their end (grammar_rows.py).
"""

from collections.abc import Sequence
from copy import copy

from scheduler.messages import SamplingParams


class OpenThoughts:
    """State of the thoughts of one row."""

    def __init__(self, params: SamplingParams, generated: Sequence[int], *, vocab_size: int) -> None:
        answer = params.answer
        assert answer is not None, "thoughts without an end"
        self.closing_id = answer.token_ids[0]
        self._begin_ids = answer.begin_token_ids
        self._max_tokens = answer.max_tokens
        self._grammar_waits = params.grammar is not None and params.grammar.begins_after is not None
        self.end_ids = tuple(
            token_id
            for token_id in params.stop_token_ids
            if token_id not in answer.stop_token_ids and 0 <= token_id < vocab_size
        )
        """Tokens by which the model ends a reply."""
        self._num_tokens = 0
        self._is_open = True
        for token_id in generated:
            self.record(token_id)

    @property
    def moves_end(self) -> bool:
        """Whether the end of the reply means the end of the thoughts, behind which a grammar waits."""
        return self._is_open and self._grammar_waits and bool(self.end_ids)

    @property
    def must_close(self) -> bool:
        """Whether nothing but the mark can follow."""
        has_begun = self._num_tokens > 0 or not self._begin_ids
        is_spent = self._max_tokens is not None and self._num_tokens >= self._max_tokens
        return self._is_open and has_begun and is_spent

    def record(self, token_id: int) -> None:
        """Take a generated token in. A reply that does not begin with the first mark has no thoughts."""
        if self._is_open:
            is_none = not self._num_tokens and bool(self._begin_ids) and token_id != self._begin_ids[0]
            self._is_open = not is_none and token_id != self.closing_id
            self._num_tokens += 1

    def after(self, token_id: int) -> "OpenThoughts":
        """Copy the state with one more token."""
        thoughts = copy(self)
        thoughts.record(token_id)
        return thoughts


def open_thoughts(
    params: SamplingParams, generated: Sequence[int], *, vocab_size: int
) -> OpenThoughts | None:
    """Return the thoughts that sampling must know of; None if there are none."""
    answer = params.answer
    if answer is None or not answer.token_ids or (answer.begin and not answer.begin_token_ids):
        return None
    is_needed = params.grammar is not None or answer.max_tokens is not None
    return OpenThoughts(params, generated, vocab_size=vocab_size) if is_needed else None
