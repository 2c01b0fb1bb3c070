"""Processor time that the masks of grammars may take: of one row over its tokens, and of all rows in a step.

Owns: the limits, a row's account, and the account of a step. A mask is computed while all other sequences
wait, so its cost is measured where it is spent.
Never: computes a mask (grammar_rows.py), or torch: the process that tries grammars keeps the same account.

Processor time, not time on the clock: a busy machine must not end a request.
"""

from collections.abc import Hashable
from dataclasses import dataclass

TOKEN_ALLOWANCE_S = 0.005
"""Seconds that each token adds to what a row may spend. A usual schema takes a hundredth of it."""
MAX_OVERDRAFT_S = 0.05
"""Seconds by which a row may exceed its allowance: one very dear mask, or ten of twice the allowance."""
MAX_REPLAY_S = 0.05
"""Seconds for all that a row had generated before it was preempted, if the text is short."""
_REPLAY_TOKEN_S = 0.00002
"""Seconds for each token of a long text, where these are more."""
MAX_STEP_S = 0.02
"""Seconds for all masks of a step, for each thread. Beyond, only rows within an equal share get theirs."""
MODEST_S = 0.0005
"""Seconds below which a mask is never refused: 256 of them are computed by two threads in 0.064 s."""
_NEWEST_SHARE = 0.25


@dataclass(slots=True)
class RowAccount:
    """Processor time that one row's grammar has taken."""

    average_s: float = 0.0
    """Per token, the newest ones weighing most."""
    advance_s: float = 0.0
    """Seconds that advancing by the last token took; they count with the next mask."""
    overdraft_s: float = 0.0
    """Seconds beyond the allowance, of which each cheap token pays back a little."""

    @property
    def is_overdrawn(self) -> bool:
        return self.overdraft_s > MAX_OVERDRAFT_S

    def pay_mask(self, mask_s: float) -> float:
        """Take in the cost of a token's mask; return that of the whole token."""
        cost_s, self.advance_s = mask_s + self.advance_s, 0.0
        self.average_s += _NEWEST_SHARE * (cost_s - self.average_s)
        self.overdraft_s = max(0.0, self.overdraft_s + cost_s - TOKEN_ALLOWANCE_S)
        return cost_s


def max_replay_s(num_tokens: int) -> float:
    """Seconds for a row to read `num_tokens` of its own tokens again."""
    return max(MAX_REPLAY_S, num_tokens * _REPLAY_TOKEN_S)


class StepAccount:
    """Processor time of the masks of one step, by grammar. Several threads may pay at once."""

    def __init__(self, *, num_threads: int, num_rows: int) -> None:
        """`num_rows` counts the rows of the whole step whose grammars are active."""
        self._budget_s = MAX_STEP_S * num_threads
        self._share_s = max(MODEST_S, self._budget_s / max(num_rows, 1))
        self._spent_s = 0.0
        self._drafts_s = 0.0
        self._of_grammar: dict[Hashable, tuple[int, float]] = {}

    @property
    def spent_s(self) -> float:
        """Seconds that are paid, without those of drafts."""
        return self._spent_s

    @property
    def has_time(self) -> bool:
        """Whether another draft may be followed: one thread computes the masks behind drafts."""
        return self._spent_s + self._drafts_s <= MAX_STEP_S

    def set_aside_drafts(self, since_s: float) -> None:
        """Charge mask time since `since_s` to drafts, not to the rows' own budgets."""
        self._drafts_s += self._spent_s - since_s
        self._spent_s = since_s

    def affords(self, grammar: Hashable, account: RowAccount) -> bool:
        """Whether a row of this grammar gets its mask: there is time left, or it keeps to an equal share.

        A row must not end because its neighbours have spent the step's time.

        Choices of one request become dear at the same token; the first of them speak for the others.
        """
        if self._spent_s <= self._budget_s:
            return True
        num_masks, spent_s = self._of_grammar.get(grammar, (0, 0.0))
        mean_s = spent_s / num_masks if num_masks else 0.0
        return max(mean_s, account.average_s) <= self._share_s

    def pay(self, grammar: Hashable, cost_s: float) -> None:
        """Take in the cost of one mask."""
        self._spent_s += cost_s
        num_masks, spent_s = self._of_grammar.get(grammar, (0, 0.0))
        self._of_grammar[grammar] = (num_masks + 1, spent_s + cost_s)
