"""Messages about drafts: how many are verified and why, and how a client's prediction was used."""

from enum import StrEnum
from typing import NamedTuple


class DraftReason(StrEnum):
    """Reason for the number of offered drafts that a step verifies."""

    ALL = "all"  # each was expected to pay
    COST = "cost"  # one more was expected to cost more time than it saves
    PREFILL = "prefill"  # prompts fill the step


class DraftChoice(NamedTuple):
    """Choice among the drafts that were offered to a step, for the trace."""

    num_offered: int
    num_chosen: int
    """Before the limits of the step and of sequences: the plan's drafts may be fewer."""
    reason: DraftReason
    expected_tokens: float
    """Sampled tokens of the step, drafts that hold included."""
    expected_s: float


DraftPasses = tuple[tuple[int, float], ...]
"""Tokens and seconds of each pass of a draft model after a step."""


class PredictionUse(NamedTuple):
    """Drafts from a sequence's prediction that a step verified."""

    num_accepted: int
    num_rejected: int
