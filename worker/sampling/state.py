"""State of one row that the sampler keeps between steps.

Owns: the counter-based source of uniform numbers, token counts for the penalties, bad words, open thoughts
and the count of generated tokens.
Never: tensors; a row is host data, so that adding and removing one costs no device work.
Source: SplitMix64, G. L. Steele, D. Lea, C. H. Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scheduler.messages import SamplingParams
from worker.sampling.grammar_rows import RowGrammar

TokenIds = NDArray[np.int64]

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_INITIAL_CAPACITY = 64


class OpenThoughts:
    """Thoughts of a row before its answer: some tokens may not come before the mark that ends them."""

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


def uniforms(seeds_N: NDArray[np.uint64], indices_N: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers `indices_N` of the streams of some seeds, in [0, 1) with 53 random bits.

    None needs another before it: SplitMix64's finalizer makes every bit depend on every bit of its argument.
    """
    value = seeds_N + (indices_N + np.uint64(1)) * np.uint64(_GOLDEN_GAMMA)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    uniforms_N: NDArray[np.float64] = (value >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniforms_N


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


class RowTokenCounts:
    """The distinct tokens of one sequence, and how often each was generated.

    A list of the tokens that occur, not a row of the whole vocabulary: the penalties then touch a
    few hundred logits of a sequence instead of 150,000.
    """

    def __init__(self, prompt: TokenIds, generated: TokenIds) -> None:
        ids, counts = np.unique(generated, return_counts=True)
        ids = np.concatenate((ids, np.setdiff1d(prompt, ids)))
        self._size = len(ids)
        self._ids: TokenIds = np.empty(len(ids) + _INITIAL_CAPACITY, np.int64)
        self._counts = np.zeros(len(self._ids), np.float32)
        self._ids[: self._size] = ids
        self._counts[: len(counts)] = counts
        self._place = {int(token_id): place for place, token_id in enumerate(ids)}

    @property
    def ids(self) -> TokenIds:
        """Each token of prompt and output once; good until the next `add`."""
        return self._ids[: self._size]

    @property
    def num_generated(self) -> NDArray[np.float32]:
        """Occurrences in the output, aligned with `ids`; 0 for a token of the prompt alone."""
        return self._counts[: self._size]

    def after(self, token_id: int) -> "RowTokenCounts":
        """Copy the counts, with one more generated token in them."""
        counts = copy(self)
        counts._ids, counts._counts = self._ids.copy(), self._counts.copy()
        counts._place = self._place.copy()
        counts.add(token_id)
        return counts

    def add(self, token_id: int) -> None:
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = self._size
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token_id
            self._size += 1
        self._counts[place] += 1


class SamplingRow:
    """Parameters and progress of the sequence that holds a row."""

    def __init__(
        self, params: SamplingParams, token_ids: Sequence[int], *, num_prompt_tokens: int, vocab_size: int
    ) -> None:
        if params.top_k >= vocab_size:  # no truncation, and must not cost a sort of the whole row
            params = replace(params, top_k=0)
        self.params = params
        self._vocab_size = vocab_size
        self.num_generated = len(token_ids) - num_prompt_tokens
        """Including tokens that are being sampled."""
        self._num_pending = 0
        # An id outside the vocabulary can never be sampled, so it needs neither bias nor ban.
        bias = [entry for entry in params.logit_bias if 0 <= entry[0] < vocab_size]
        self.bias_ids: TokenIds = np.array([token_id for token_id, _ in bias], np.int64)
        self.bias_values = np.array([value for _, value in bias], np.float32)
        stop = [token_id for token_id in params.stop_token_ids if 0 <= token_id < vocab_size]
        self.stop_ids: TokenIds = np.array(stop, np.int64)
        allowed = sorted({token_id for token_id in params.allowed_token_ids if 0 <= token_id < vocab_size})
        self.allowed_ids: TokenIds = np.array(allowed, np.int64)
        self.bad_words: BadWords | None = None
        if params.bad_words:
            self.bad_words = BadWords(params.bad_words, token_ids[num_prompt_tokens:], vocab_size=vocab_size)
        self.is_penalized = bool(
            params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        )
        self.counts: RowTokenCounts | None = None
        """Counts for the penalties, if the host keeps them."""
        self.grammar: RowGrammar | None = None
        self.thoughts: OpenThoughts | None = open_thoughts(
            params, token_ids[num_prompt_tokens:], vocab_size=vocab_size
        )
        # Computed once: most rows edit nothing, and every step asks.
        self._names_tokens = bool(
            bias or params.allowed_token_ids or self.bad_words is not None or params.min_tokens > 0
        )
        self.is_plain = (
            not (self.is_penalized or self._names_tokens)
            and params.grammar is None
            and self.thoughts is None
            and params.num_logprobs is None
        )
        """Whether a token follows from its logits, the seed and its place alone, and nothing is reported."""
        # top_k=1 leaves one candidate for every draw: the maximum is the same token.
        self.is_greedy = params.temperature == 0.0 or params.top_k == 1

    def after(self, token_id: int) -> "SamplingRow":
        """Copy the state as it would be if `token_id` had been sampled; for a row without a grammar.

        The copy is only for sampling the token that follows: it is not recorded to.
        """
        row = copy(self)
        row.num_generated += 1
        if self.counts is not None:
            row.counts = self.counts.after(token_id)
        if self.bad_words is not None:
            row.bad_words = self.bad_words.after(token_id)
        if self.thoughts is not None:
            row.thoughts = self.thoughts.after(token_id)
        return row

    @cached_property
    def allowed_bits(self) -> NDArray[np.int32]:
        """Allowed tokens as bits, the lowest of a word first, for rows that name some."""
        is_allowed = np.zeros(-(-self._vocab_size // 32) * 32, np.bool_)
        is_allowed[self.allowed_ids] = True
        return np.packbits(is_allowed, bitorder="little").view(np.int32)

    @property
    def must_not_stop(self) -> bool:
        if self.grammar is not None and self.grammar.is_complete:
            return False  # a complete text ends, long enough or not: there is no other token to sample
        return self.num_generated < self.params.min_tokens and len(self.stop_ids) > 0

    @property
    def may_edit(self) -> bool:
        """Whether `edits_logits` may ever be true."""
        return self.is_penalized or self.names_tokens

    @property
    def names_tokens(self) -> bool:
        """Whether the row may ever edit tokens that it names: by a bias, bans, a mask, not by penalties."""
        return self._names_tokens or self.grammar is not None or self.thoughts is not None

    @property
    def edits_logits(self) -> bool:
        if self.is_penalized or (self.grammar is not None and self.grammar.is_active):
            return True
        if self.thoughts is not None and (self.thoughts.moves_end or self.thoughts.must_close):
            return True
        return self._names_tokens and (
            len(self.bias_ids) > 0
            or self.must_not_stop
            or self.bad_words is not None
            or bool(self.params.allowed_token_ids)
        )

    def banned_ids(self) -> list[TokenIds]:
        """List the tokens that the minimum length, open thoughts and bad words forbid now."""
        banned = [self.stop_ids] if self.must_not_stop else []
        if self.thoughts is not None and self.thoughts.moves_end:
            banned.append(np.array(self.thoughts.end_ids, np.int64))
        return banned if self.bad_words is None else [*banned, *self.bad_words.banned_ids()]

    @property
    def needs_history(self) -> bool:
        """Whether the next token depends on one that is still being sampled."""
        return self._num_pending > 0 and self.learns

    @property
    def learns(self) -> bool:
        """Whether `record` must report sampled tokens to the row; other rows do not depend on them."""
        knows_text = self.counts is not None or self.bad_words is not None
        return knows_text or self.grammar is not None or self.thoughts is not None

    @property
    def is_unfit(self) -> bool:
        """Whether the row failed by its own grammar, and not by the model."""
        return self.grammar is not None and bool(self.grammar.failure)

    @property
    def failure(self) -> str:
        """The reason why no token could be sampled, for the log. Only for a row that failed."""
        failure = self.grammar.failure if self.grammar is not None else ""
        return failure or "logits are not finite, or no token is left to draw"

    def advance(self) -> None:
        """Note that a token is being sampled: `record` or `withdraw` follows, perhaps after a second one."""
        self.num_generated += 1
        self._num_pending += 1

    def record(self, token_id: int) -> None:
        """Record the oldest token that was being sampled."""
        self._num_pending -= 1
        if self.counts is not None:
            self.counts.add(token_id)
        if self.bad_words is not None:
            self.bad_words.record(token_id)
        if self.grammar is not None:
            self.grammar.record(token_id)
        if self.thoughts is not None:
            self.thoughts.record(token_id)

    def withdraw(self) -> None:
        """Take back the oldest token that was being sampled: its place in the stream is free again."""
        self._num_pending -= 1
        self.num_generated -= 1
