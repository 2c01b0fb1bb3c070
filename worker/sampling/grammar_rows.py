"""Grammars of sequences whose text must match one: the tokens that may come next, row by row.

Owns: one matcher for each such row, advanced to the end of the row's text, and the mask over its logits.
Never: whether a grammar is acceptable (the engine has tried it before), or when a sequence ends: a complete
text leaves only the end-of-sequence token to sample.

Shapes: N rows that have a grammar, W logits of a row (the vocabulary, padded), V tokens that masks cover.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from scheduler.messages import Grammar
from worker.sampling.grammar_library import Bitmask, GrammarRefused, new_bitmasks, new_matcher, open_tokenizer

_MAX_THREADS = 8
_NUM_ROWS_FOR_THREADS = 16
"""Below, waking the threads takes longer than the masks do: 2 µs each, once a lexer is warm."""


class RowGrammar:
    """Position of one row's text in its grammar. Inactive while tokens are still free."""

    def __init__(self, matcher: LLMatcher | None, begins_after: int | None, failure: str = "") -> None:
        self._matcher = matcher
        self._begins_after = begins_after
        self.is_active = begins_after is None
        self.failure = failure
        """The reason why no token can be sampled any more; empty if there is none."""
        self.mask: Bitmask | None = None
        """Mask that was computed already, as of a copy that `Grammars.along` made."""
        self._is_complete = False  # of such a copy, which has no matcher

    @property
    def matcher(self) -> LLMatcher | None:
        """The matcher; None after a failure, and for a row without one."""
        return None if self.failure else self._matcher

    @property
    def is_complete(self) -> bool:
        """Whether only the end of the sequence can follow. Known once the mask of the step is computed."""
        if self._matcher is None:
            return self._is_complete
        return self.is_active and self._matcher.is_stopped()

    def record(self, token_id: int) -> None:
        """Advance by a generated token."""
        if self.is_active:
            if self._matcher is not None:
                self._matcher.consume_token(token_id)
        else:
            self.is_active = token_id == self._begins_after

    def as_now(self, mask: Bitmask | None) -> "RowGrammar":
        """Copy the position, to sample from later: the matcher will be elsewhere by then."""
        now = RowGrammar(None, self._begins_after, self.failure)
        now.is_active, now.mask, now._is_complete = self.is_active, mask, self.is_complete
        return now

    def allows(self, token_id: int) -> bool:
        """Whether a token, which does not end the sequence, may be the next one."""
        if not self.is_active or self._matcher is None:
            return not self.failure
        return not self._matcher.is_stopped() and self._matcher.validate_tokens([token_id]) == 1

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Count the leading tokens that the grammar allows; none of them ends the sequence."""
        if self.failure:
            return 0
        num_free = 0
        if not self.is_active and self._begins_after is not None:
            if self._begins_after not in token_ids:
                return len(token_ids)
            num_free = list(token_ids).index(self._begins_after) + 1
        if self._matcher is None or not token_ids[num_free:]:
            return len(token_ids)
        if self._matcher.is_stopped():
            return num_free
        return num_free + self._matcher.validate_tokens(list(token_ids[num_free:]))

    def go_back(self, num_consumed: int, *, to: "RowGrammar") -> None:
        """Undo the last tokens that the matcher consumed; `to` is a copy that was made before them."""
        if self._matcher is not None and num_consumed:
            self._matcher.rollback(num_consumed)
        self.is_active, self.failure = to.is_active, to.failure

    def check(self) -> None:
        """Take over an error of the matcher, which never raises."""
        if self._matcher is not None and self._matcher.is_error() and not self.failure:
            self.failure = f"the grammar failed: {self._matcher.get_error()}"


class Grammars:
    """Factory of rows with grammars; opens the tokenizer and starts threads when first needed."""

    def __init__(self, folder: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._limits: torch.Tensor | None = None

    def row(self, grammar: Grammar, generated: Sequence[int]) -> RowGrammar:
        """Bring a matcher to the end of what the row has generated already.

        Compiled anew for each row, which takes milliseconds: copies would share one lexer with its limit on
        states, so that a row could fail because of the text of others. An error fails the row when it
        samples.
        """
        try:
            row = RowGrammar(new_matcher(self._open(), grammar), grammar.begins_after)
        except GrammarRefused as error:
            return RowGrammar(None, None, f"the grammar failed: {error}")
        for token_id in generated:
            row.record(token_id)
        return row

    def along(self, row: RowGrammar, drafts: Sequence[int]) -> list[RowGrammar]:
        """Copy the position of `row` now, and after each of `drafts` as far as the grammar allows them.

        None of the drafts ends the sequence. The row itself is afterwards where it was.
        """
        copies, num_consumed = [self._as_now(row)], 0
        for draft in drafts:
            if not row.allows(draft):
                break
            num_consumed += row.is_active
            row.record(draft)
            copy = self._as_now(row)
            if copy.failure:  # beyond a draft: it counts once the draft has turned out to be right
                break
            copies.append(copy)
        row.go_back(num_consumed, to=copies[0])
        return copies

    def _as_now(self, row: RowGrammar) -> RowGrammar:
        mask = self.bitmasks([row])[0] if row.is_active else None
        return row.as_now(mask)

    def mask(self, logits_NW: torch.Tensor, rows: Sequence[RowGrammar | None]) -> None:
        """Set the logits of tokens that cannot come next to -inf, in place; for a failed row, all logits.

        logits_NW is float32, one line for each of `rows`; those without an active grammar stay as they are.
        """
        lines = [n for n, row in enumerate(rows) if row is not None and row.is_active]
        active = [row for row in rows if row is not None and row.is_active]
        if len(lines) == len(rows):
            self._mask_all(logits_NW, active)
        elif lines:
            where = torch.tensor(lines, device=logits_NW.device)
            some_NW = logits_NW[where]
            self._mask_all(some_NW, active)
            logits_NW[where] = some_NW

    def _mask_all(self, logits_NW: torch.Tensor, rows: Sequence[RowGrammar]) -> None:
        if self._limits is None:
            self._limits = _limits_by_byte(logits_NW.device)
        packed = torch.from_numpy(self.bitmasks(rows)).to(logits_NW.device).view(torch.uint8)
        # The lesser of two numbers: at 150,000 logits ten times faster than a fill under a mask.
        limits_NV = self._limits.index_select(0, packed.flatten().int()).view(len(rows), -1)
        width = min(limits_NV.shape[1], logits_NW.shape[1])
        torch.minimum(logits_NW[:, :width], limits_NV[:, :width], out=logits_NW[:, :width])
        logits_NW[:, width:] = -torch.inf

    def bitmasks(self, rows: Sequence[RowGrammar]) -> Bitmask:
        """Compute masks of the tokens that can come next, one line for each of `rows`, which are all active.

        A failed row has no bit set. Tokens behind the end of a line are not allowed.
        """
        masks = new_bitmasks(self._open(), len(rows))
        asked = [(row.matcher, place) for place, row in enumerate(rows) if row.matcher is not None]
        if len(asked) >= _NUM_ROWS_FOR_THREADS:
            if self._executor is None:
                self._executor = LLExecutor(num_threads=min(_MAX_THREADS, os.cpu_count() or 1))
            self._executor.unsafe_compute_mask_ptr(asked, masks.ctypes.data, masks.strides[0], len(rows))
        else:
            for matcher, place in asked:
                line = masks[place]
                matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
        for place, row in enumerate(rows):
            row.check()
            if row.mask is not None:
                masks[place] = row.mask
            if row.failure:
                masks[place] = 0
        return masks

    def _open(self) -> LLTokenizer:
        """Open the tokenizer once. Raises GrammarRefused."""
        if self._tokenizer is None:
            self._tokenizer = open_tokenizer(
                self._folder, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
            )
        return self._tokenizer


def _limits_by_byte(device: torch.device) -> torch.Tensor:
    """Build [256, 8]: for each byte of a bitmask, the upper limits of the logits of its eight tokens."""
    bytes_256 = torch.arange(256, device=device).unsqueeze(1)
    bits_8 = torch.arange(8, device=device)
    return torch.where((bytes_256 >> bits_8) & 1 == 1, torch.inf, -torch.inf)
