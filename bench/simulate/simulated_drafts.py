"""Drafts of a simulated model: how often they are right at each place, and how long they take to make.

Owns: the draws. Every token of a simulated answer is the same, so that a right draft is that token and a
wrong one is another.
Never: decides how many drafts are made or verified: the scheduler does, by the rule of the server.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.config import DraftSupply
from scheduler.draft_messages import DraftPasses
from scheduler.messages import SchedulerOutput, SequenceId

Tokens = tuple[int, ...]

_RIGHT, _WRONG = 1, 2
_SEED = "drafts"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """Source of the drafts of all sequences. Without rates there are none."""

    rates: tuple[float, ...] = ()
    """Share of drafts that are right at each place, where all before them are."""
    pass_s: float = 0.0
    """Seconds of a draft model for one more place of all sequences; 0: drafts are found, and not computed."""


NO_DRAFTS = DraftSource()


class SimulatedDrafts:
    """Drafts of one replica."""

    def __init__(self, source: DraftSource, supply: DraftSupply) -> None:
        self._source = source
        self._supply = supply
        self._random = random.Random(_SEED)

    def passes(self, plan: SchedulerOutput) -> DraftPasses:
        """List the passes of the draft model behind a step."""
        wanted = sorted(plan.num_drafts_wanted.values())
        if not wanted or not self._source.pass_s:
            return ()
        num_passes = min(wanted[-1], len(self._source.rates))
        return tuple((sum(num > place for num in wanted), self._source.pass_s) for place in range(num_passes))

    def followed(self, plan: SchedulerOutput, sampled: Mapping[SequenceId, Tokens]) -> dict[SequenceId, int]:
        """Count the tokens of each sequence that the draft model was asked about: it computes them all."""
        drafts = plan.draft_token_ids
        return {
            share.sequence_id: share.start
            + share.num_tokens
            - len(drafts.get(share.sequence_id, ()))
            + len(sampled[share.sequence_id])
            for share in plan.scheduled
            if share.sequence_id in plan.num_drafts_wanted
        }

    def verify(self, plan: SchedulerOutput, sampled: dict[SequenceId, Tokens]) -> None:
        """Lengthen what sequences sample by the drafts that hold."""
        for sequence_id, drafts in plan.draft_token_ids.items():
            num_right = next((place for place, each in enumerate(drafts) if each != _RIGHT), len(drafts))
            sampled[sequence_id] = (_RIGHT,) * (1 + num_right)

    def offers(self, plan: SchedulerOutput, sampled: Mapping[SequenceId, Tokens]) -> dict[SequenceId, Tokens]:
        """Draw the drafts that follow the tokens of a step."""
        rates = self._source.rates
        if self._supply is DraftSupply.ASKED:
            return {each: self._draw(rates[:num]) for each, num in plan.num_drafts_wanted.items()}
        return {each: self._draw(rates) for each in sampled}

    def _draw(self, rates: tuple[float, ...]) -> Tokens:
        return tuple([_RIGHT if self._random.random() < rate else _WRONG for rate in rates])
