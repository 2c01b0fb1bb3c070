"""Grammars of sequences whose text must match one: the tokens that may come next, row by row.

Owns: one matcher for each such row, advanced to the end of the row's text, and the mask over its logits. A
row whose grammar takes more time than mask_budget.py allows ends; its neighbours do not wait for it.
Never: whether a grammar is acceptable (the engine has tried it before), or when a sequence ends: a complete
text leaves only the end-of-sequence token to sample.

Shapes: N rows that have a grammar, W logits of a row (the vocabulary, padded), V tokens that masks cover.
"""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from math import inf
from pathlib import Path

import torch
from llguidance import LLMatcher, LLTokenizer

from scheduler.messages import GRAMMAR_TOO_DEAR, Grammar
from worker.sampling.grammar_library import Bitmask, GrammarRefused, new_bitmasks, new_matcher, open_tokenizer
from worker.sampling.mask_budget import RowAccount, StepAccount, max_replay_s

_MAX_THREADS = 8
_ALONE_S = 0.001
"""Time after which the masks that are left are divided between threads: waking these takes longer than a
hundred masks do, once the lexers are warm."""
_NO_WAY_ON = "nothing that it allows can follow the text that was written"
_LIMITS = ("too many", "fuel")
"""Words of the library's errors about the price of a grammar."""

_num_masks_begun = 0


def num_masks_begun() -> int:
    """Count the masks begun since the process started, within a step too. Any thread may ask."""
    return _num_masks_begun


class RowGrammar:
    """Position of one row's text in its grammar. Inactive while tokens are still free."""

    def __init__(
        self, matcher: LLMatcher | None, begins_after: int | None, *, name: int = 0, failure: str = ""
    ) -> None:
        self._matcher = matcher
        self._begins_after = begins_after
        self.name = name
        """The same for all rows of one grammar."""
        self.account = RowAccount()
        self.is_active = begins_after is None
        self.failure = failure
        """The reason why no token can be sampled any more; empty if there is none."""
        self.mask: Bitmask | None = None
        """Mask that was computed already, as of a copy that `Grammars.along` made."""
        self._unread: list[int] = []
        """Tokens of the text that the matcher has not consumed yet: that is part of a mask's price."""
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

    def give_up_matcher(self) -> LLMatcher | None:
        """Drop the matcher: no further token is sampled."""
        matcher, self._matcher = self._matcher, None
        return matcher

    def record(self, token_id: int) -> None:
        """Advance by a generated token."""
        if not self.is_active:
            self.is_active = token_id == self._begins_after
        elif self._matcher is not None:
            self._unread.append(token_id)

    def read(self, *, max_s: float = inf) -> None:
        """Advance the matcher to the end of the text. The row ends if that takes longer than `max_s`."""
        if self._matcher is None or not self._unread:
            return
        began_s = time.thread_time()
        for num_read, token_id in enumerate(self._unread, 1):
            self._matcher.consume_token(token_id)
            self.account.advance_s = time.thread_time() - began_s
            if self.account.advance_s > max_s and num_read < len(self._unread):
                self.end_as_too_dear()
                break
        self._unread.clear()

    def as_now(self, mask: Bitmask | None) -> "RowGrammar":
        """Copy the position for sampling later, when the matcher has moved on."""
        now = RowGrammar(None, self._begins_after, failure=self.failure)
        now.is_active, now.mask, now._is_complete = self.is_active, mask, self.is_complete
        return now

    def allows(self, token_id: int) -> bool:
        """Whether a token, which does not end the sequence, may be the next one."""
        if not self.is_active or self._matcher is None:
            return not self.failure
        self.read()
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
        self.read()
        if self._matcher.is_stopped():
            return num_free
        return num_free + self._matcher.validate_tokens(list(token_ids[num_free:]))

    def go_back(self, num_consumed: int, *, to: "RowGrammar") -> None:
        """Undo the last tokens that the matcher consumed; `to` is a copy that was made before them."""
        num_unread = min(num_consumed, len(self._unread))
        if num_unread:
            del self._unread[-num_unread:]
        if self._matcher is not None and num_consumed > num_unread:
            self._matcher.rollback(num_consumed - num_unread)
        self.is_active, self.failure = to.is_active, to.failure

    def check(self) -> None:
        """Take over an error of the matcher, which never raises, and end a row that costs too much."""
        if self._matcher is None or self.failure:
            return
        if self._matcher.is_error():
            # The library's own words are for its developers.
            error = self._matcher.get_error().lower()
            is_dear = any(word in error for word in _LIMITS)
            self.failure = f"the grammar failed: {GRAMMAR_TOO_DEAR if is_dear else _NO_WAY_ON}"
        elif self.account.is_overdrawn:
            self.end_as_too_dear()

    def end_as_too_dear(self) -> None:
        self.failure = f"the grammar failed: {GRAMMAR_TOO_DEAR}"


class Grammars:
    """Factory of rows with grammars; starts threads, and opens the tokenizer, when needed at the latest."""

    def __init__(self, folder: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._threads: ThreadPoolExecutor | None = None
        self._step = StepAccount(num_threads=self._num_threads, num_rows=0)
        self._limits: torch.Tensor | None = None

    def open_ahead(self) -> None:
        """Open the tokenizer now. Later it would hold the interpreter, and all streams with it, for a second.

        Where it cannot be opened nothing happens: each grammar says so then.
        """
        with suppress(GrammarRefused, OSError):
            self._open()

    def begin_step(self, num_rows: int) -> None:
        """Open a new account for the masks of one step with `num_rows` active grammars."""
        self._step = StepAccount(num_threads=self._num_threads, num_rows=num_rows)

    def row(self, grammar: Grammar, generated: Sequence[int]) -> RowGrammar:
        """Bring a matcher to the end of what the row has generated already.

        Compiled anew for each row, which takes milliseconds: copies would share one lexer with its limit on
        states, so that a row could fail because of the text of others. An error fails the row when it
        samples.
        """
        try:
            matcher = new_matcher(self._open(), grammar)
        except GrammarRefused as error:
            return RowGrammar(None, None, failure=f"the grammar failed: {error}")
        row = RowGrammar(matcher, grammar.begins_after, name=hash((grammar.kind, grammar.text)))
        for token_id in generated:
            row.record(token_id)
        row.read(max_s=max_replay_s(len(generated)))
        row.account = RowAccount()  # a preemption is not the row's fault
        return row

    def row_ahead(self, grammar: Grammar, generated: Sequence[int]) -> RowGrammar:
        """Make a row, and compute its next mask once: the lexer then knows those states when it counts."""
        row = self.row(grammar, generated)
        if row.matcher is not None and row.is_active:
            mask = new_bitmasks(self._open(), 1)
            row.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return row

    def along(self, row: RowGrammar, drafts: Sequence[int]) -> list[RowGrammar]:
        """Copy the position of `row` now, and after each of `drafts` as far as the grammar allows them.

        None of the drafts ends the sequence. The row itself is afterwards where it was. Drafts are followed
        only in time that the step has left.
        """
        copies, num_consumed = [self._as_now(row)], 0
        account = copy(row.account)  # drafts that are wrong are not the row's fault
        spent_s = self._step.spent_s
        for draft in drafts:
            if not self._step.has_time or not row.allows(draft):
                break
            num_consumed += row.is_active
            row.record(draft)
            after = self._as_now(row)
            if after.failure:  # beyond a draft: it counts once the draft has turned out to be right
                break
            copies.append(after)
        self._step.set_aside_drafts(spent_s)
        row.account = account
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
        # Cheap rows first: should the step's time run out, it is for those that spend it.
        cheapest = sorted(range(len(rows)), key=lambda place: rows[place].account.average_s)
        left = iter([place for place in cheapest if rows[place].matcher is not None])
        self._compute(rows, left, masks, until_s=time.monotonic() + _ALONE_S)
        beyond = next(left, None)
        if beyond is not None:
            self._share_out(rows, [beyond, *left], masks)
        for place, row in enumerate(rows):
            row.check()
            if row.mask is not None:
                masks[place] = row.mask
            if row.failure:
                masks[place] = 0
        return masks

    def _share_out(self, rows: Sequence[RowGrammar], places: list[int], masks: Bitmask) -> None:
        """Compute masks in several threads. The library lets go of the interpreter meanwhile."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="masks")
        shares = [places[first :: self._num_threads] for first in range(self._num_threads)]
        working = [self._threads.submit(self._compute, rows, iter(each), masks) for each in shares if each]
        for each in working:
            each.result()

    def _compute(
        self, rows: Sequence[RowGrammar], places: Iterator[int], masks: Bitmask, until_s: float = float("inf")
    ) -> None:
        """Compute the masks of some places, one after the other, as long as the clock allows."""
        global _num_masks_begun
        for place in places:
            row, line = rows[place], masks[place]
            matcher = row.matcher
            if matcher is None:
                continue
            if not self._step.affords(row.name, row.account):
                row.end_as_too_dear()
                continue
            _num_masks_begun += 1
            row.read()
            began_s = time.thread_time()
            matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
            self._step.pay(row.name, row.account.pay_mask(time.thread_time() - began_s))
            if time.monotonic() > until_s:
                return

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
