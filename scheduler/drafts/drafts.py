"""Drafts of the running sequences: guesses at their next tokens, until a plan verifies them.

Drafts continue the last token that is known. So they fit only while no plan in flight samples further tokens
of their sequence. A sequence for which drafts come too early is not planned ahead any more, and the next ones
fit.
"""

from collections.abc import Iterable, Mapping

from scheduler.config import DraftAdmission, DraftSupply, SchedulerConfig
from scheduler.draft_messages import DraftChoice, DraftPasses, PredictionUse
from scheduler.drafts.draft_rates import DraftSource
from scheduler.drafts.draft_rule import Drafting, DraftRule
from scheduler.drafts.draft_trials import DraftTrials
from scheduler.messages import ModelRunnerOutput, SchedulerOutput, SequenceId
from scheduler.sequence import Sequence, Status

_EXPECTED: tuple[int, ...] = ()
"""In place of drafts that do not fit yet."""


class Drafts:
    """Offers from `offer` or from the draft model that `ask` asks, each taken once."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.offers: dict[SequenceId, tuple[int, ...]] = {}
        """Drafts that the next share of a sequence verifies; empty if some are expected, and none fit yet."""
        self._late: dict[SequenceId, int] = {}  # numbers of drafts that came while a plan was in flight
        self._num_followed: dict[SequenceId, int] = {}  # tokens that a draft model has computed
        self._rule: DraftRule | None = None
        if config.draft_admission is DraftAdmission.PAYING and config.max_drafts:
            self._rule = DraftRule(config.max_drafts)
        self.has_model = bool(config.max_drafts) and config.draft_supply is DraftSupply.ASKED
        """Whether a draft model is asked for drafts."""
        self.trials = DraftTrials() if self.has_model and self._rule is not None else None

    @property
    def asks_now(self) -> bool:
        """Whether a draft model is asked in this turn."""
        return self.has_model and (self.trials is None or not self.trials.is_resting)

    def offer(self, seq: Sequence, token_ids: tuple[int, ...]) -> None:
        """Keep drafts for the next share of `seq`, if that computes the last known token alone."""
        if seq.status is not Status.RUNNING or not token_ids:
            return
        fits = seq.num_uncomputed_tokens == 1 and seq.num_tokens == len(seq.token_ids)
        if self._rule is not None:
            self._rule.note_offer(seq.sequence_id, seq.token_ids, token_ids, self._source_of(seq))
        if fits or self._rule is None:
            self.offers[seq.sequence_id] = token_ids if fits else _EXPECTED
        else:
            self._late[seq.sequence_id] = len(token_ids)

    def take(self, sequence_id: SequenceId) -> tuple[int, ...] | None:
        """Take the drafts of a sequence, which gets its share now; None if it has none."""
        return self.offers.pop(sequence_id, None)

    def forget(self, sequence_id: SequenceId) -> None:
        """Drop all of a sequence that leaves the running queue."""
        self.offers.pop(sequence_id, None)
        self._late.pop(sequence_id, None)
        self._num_followed.pop(sequence_id, None)
        if self._rule is not None:
            self._rule.forget(sequence_id)

    def choose(self, running: Iterable[Sequence], *, num_decodes: int) -> DraftChoice | None:
        """Keep the drafts that are expected to pay, before any share of a step of `num_decodes` is given.

        Where drafts came too late to fit, the choice is whether to wait for the next ones. None if there is
        nothing to choose.
        """
        if self._rule is None or not (self.offers or self._late):
            return None
        offers = {each: len(drafts) for each, drafts in self.offers.items()} | self._late
        has_prefill = any(seq.num_uncomputed_tokens > 1 for seq in running)
        chosen, choice = self._rule.choose(offers, num_decodes=num_decodes, has_prefill=has_prefill)
        drafts, self._late = self.offers, {}
        self.offers = {each: drafts.get(each, _EXPECTED)[:num] for each, num in chosen.items()}
        return choice

    def ask(
        self, decoding: list[Sequence], verified: Mapping[SequenceId, tuple[int, ...]]
    ) -> dict[SequenceId, int]:
        """Choose the drafts that a model makes for the step behind one in which these decode.

        That one verifies the drafts in `verified`.
        """
        drafting = {
            seq.sequence_id: self._drafting(seq, len(verified.get(seq.sequence_id, ())))
            for seq in decoding
            if not seq.prediction
        }
        if self._rule is None:
            return {each: one.most for each, one in drafting.items()}
        asked = self._rule.ask(drafting, num_decodes=len(decoding))
        has_room = any(one.most for one in drafting.values())
        if self.trials is not None and has_room and not (asked or verified.keys() & drafting.keys()):
            self.trials.note_nothing_asked()
        return asked

    def note_followed(self, seq: Sequence, num_tokens: int) -> None:
        """Learn how many tokens of a sequence the draft model has computed: perhaps a part of its prompt."""
        if seq.status is Status.RUNNING:
            self._num_followed[seq.sequence_id] = num_tokens

    def observe_step(self, plan: SchedulerOutput, seconds: float, waited_s: float) -> None:
        """Learn how long a step without prompts took, while there are drafts.

        One without shares, which encodes inputs or copies blocks, teaches nothing.
        """
        if self._rule is None or not plan.scheduled or not (self.has_model or not self._rule.is_idle):
            return
        self._rule.observe(plan.num_scheduled_tokens, seconds)
        if self.trials is not None:
            self.trials.note_decodes(plan)
        if self._config.max_plans_in_flight > 1:  # with one, all steps wait
            self._rule.observe_wait(waited_s, has_drafts=bool(plan.draft_token_ids))

    def observe_passes(self, passes: DraftPasses) -> None:
        """Learn how long passes of the draft model took."""
        if self._rule is not None:
            for num_tokens, seconds in passes:
                self._rule.pass_costs.observe(num_tokens, seconds)

    def prediction_use(
        self, seq: Sequence, kept_ids: tuple[int, ...], plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> PredictionUse | None:
        """Count the drafts of a sequence that were accepted, up to its end, and the others."""
        num_drafts = len(plan.draft_token_ids.get(seq.sequence_id, ()))
        num_accepted = min(len(result.token_ids[seq.sequence_id]) - 1, len(kept_ids))
        return PredictionUse(num_accepted, num_drafts - num_accepted) if num_drafts else None

    def _source_of(self, seq: Sequence) -> DraftSource:
        if seq.prediction:
            return DraftSource.PREDICTION
        return DraftSource.MODEL if self.has_model else DraftSource.TEXT

    def _drafting(self, seq: Sequence, num_verified: int) -> Drafting:
        """Describe a sequence as it will be if all drafts hold that the present plan verifies."""
        num_left = seq.max_length - seq.num_tokens - num_verified - 2
        return Drafting(
            most=max(min(num_left, self._config.max_drafts), 0),
            lag=seq.num_tokens - self._num_followed.get(seq.sequence_id, 0),
            num_generated=seq.num_output_tokens,
            num_left=max(num_left, 0),
        )
