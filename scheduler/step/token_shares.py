"""Share of a step that one sequence gets: a decode, a chunk of its prompt, a decode with drafts.

Owns: the size of a share, and what goes with it: blocks found from now on, drafts, encoder inputs; the blocks
into which a draft model may write ahead. Drafts are guesses at the next tokens of a running sequence, until
a plan verifies them.
Never: admits (admission.py), serves (planner.py) or preempts (preemption.py) a sequence; makes or judges a
draft: the worker does both.
Source: speculative decoding, arXiv:2211.17192. A share of 1 + k tokens computes the last known token and k
drafts; the worker returns the drafts that the model would have sampled too, and one token more.

Drafts continue the last token that is known. So they fit only while no plan in flight samples further tokens
of their sequence. A sequence for which drafts come too early is not planned ahead any more, and the next ones
fit.
"""

from collections.abc import Callable
from functools import partial

from scheduler.config import DraftAdmission, DraftSupply
from scheduler.draft_messages import DraftPasses
from scheduler.messages import ScheduledSequence, SchedulerOutput, SequenceId
from scheduler.sequence import Sequence, Status
from scheduler.step.budget import SchedulingBudget
from scheduler.step.draft_choice import Drafting, DraftRule, DraftSource
from scheduler.step.encoder_cache import EncoderCache
from scheduler.step.plan_draft import PlanDraft
from scheduler.step.scheduler_state import SchedulerState

_share: Callable[[tuple[SequenceId, int, int, bool]], ScheduledSequence]
_share = partial(tuple.__new__, ScheduledSequence)  # half the time of the class's own constructor

_EXPECTED: tuple[int, ...] = ()
"""In place of drafts: some are expected, and none fit yet."""


class TokenShares:
    """Each call gives one sequence, which has its blocks, its share of the plan."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._kv = state.kv
        self._block_size = state.config.block_size
        # In a pipeline, a sequence has no share before its token is known.
        self._num_expected = 1 if state.config.num_stages == 1 else 0
        self._drafts: dict[SequenceId, tuple[int, ...]] = {}
        self._late: dict[SequenceId, int] = {}  # numbers of drafts that came while a plan was in flight
        self._rule: DraftRule | None = None
        if state.config.draft_admission is DraftAdmission.PAYING and state.config.max_drafts:
            self._rule = DraftRule(state.config.max_drafts)
        self._num_drafted: dict[SequenceId, int] = {}  # tokens that a draft model has computed
        self._asks = bool(state.config.max_drafts) and state.config.draft_supply is DraftSupply.ASKED
        self.encoder_cache = EncoderCache(state.config)

    def decode(self, seq: Sequence, plan: PlanDraft) -> None:
        """Give one token; it may be the last one of a prompt, for which nothing is encoded."""
        start = seq.num_computed_tokens
        plan.budget.take_decode()
        seq.num_computed_tokens = end = start + 1
        # A block is found by its tokens: one that a plan in flight samples is published when it is known.
        if end % self._block_size == 0 and end <= len(seq.token_ids):
            self._publish(seq, start, end)
        if self._drafts and (drafts := self._drafts.pop(seq.sequence_id, None)) is not None:
            self._decode_with_drafts(seq, start, drafts, plan)
            return
        plan.decodes.append(ScheduledSequence(seq.sequence_id, start, 1, True))  # noqa: FBT003  (a hot path)
        if seq.num_tokens + 1 < seq.max_length:  # as expect_token, without the call
            seq.num_tokens += self._num_expected

    @property
    def has_extras(self) -> bool:
        """Whether drafts, or inputs to encode, may change what a decode gets, or what a plan asks for."""
        return bool(self._drafts or self._late or self._asks or self._state.config.max_encoder_tokens)

    def decode_all(self, running: list[Sequence]) -> list[ScheduledSequence]:
        """Give each one token, as `decode` does, in one loop, and complete the plan.

        Each must want just one token, and have a slot for it.
        """
        block_size, shares, has_published = self._block_size, [], False
        for seq in running:
            start = seq.num_computed_tokens
            seq.num_computed_tokens = end = start + 1
            if end % block_size == 0 and end <= len(seq.token_ids):
                self._publish(seq, start, end)
                has_published = True
            shares.append(_share((seq.sequence_id, start, 1, True)))
            if seq.num_tokens + 1 < seq.max_length:
                seq.num_tokens += 1
        if has_published:
            self._kv.complete_plan()
        return shares

    def part(self, seq: Sequence, plan: PlanDraft) -> None:
        """Give as much of what is left to compute as the budget has; no share, if nothing is left."""
        share = plan.budget.take_chunk(seq, self.num_shared(seq, plan.budget))
        if share:
            self.chunk(seq, share, plan)

    def chunk(self, seq: Sequence, share: int, plan: PlanDraft) -> None:
        """Give `share` tokens, which the budget has been charged with."""
        start = seq.num_computed_tokens
        seq.num_computed_tokens = end = start + share
        self._state.counters.num_recomputed_tokens += max(min(end, seq.num_reached_tokens) - start, 0)
        if seq.encoder_inputs:
            self._encode(seq, start, end, plan)
        self._publish(seq, start, end)
        samples = end == seq.num_tokens
        plan.chunks.append(ScheduledSequence(seq.sequence_id, start, share, samples))
        if samples and self._num_expected:
            seq.expect_token()

    def num_wanted(self, seq: Sequence) -> int:
        """Tokens left to compute; fewer if others would like a part of the step too."""
        return self._num_within(seq, self._state.config.max_chunk_tokens)

    def num_shared(self, seq: Sequence, budget: SchedulingBudget) -> int:
        """Tokens as wanted, and more where few others are left: then each has an equal part."""
        limit = self._state.config.max_chunk_tokens
        return self._num_within(seq, max(limit, budget.equal_part()) if limit else 0)

    def _num_within(self, seq: Sequence, limit: int) -> int:
        wanted = seq.num_uncomputed_tokens
        queues = self._state.queues
        if seq.params.num_prompt_logprobs is not None and self._state.queues.has_replies():
            most_scored = self._state.config.max_scored_tokens
            limit = min(limit, most_scored) if limit and most_scored else limit or most_scored
        if limit and not seq.is_indivisible and queues.num_running + len(queues.waiting) > 1:
            wanted = min(wanted, limit)
        if seq.encoder_inputs:
            return self.encoder_cache.computable_tokens(seq, seq.num_computed_tokens, wanted)
        return wanted

    def propose_drafts(self, seq: Sequence, token_ids: tuple[int, ...]) -> None:
        """Keep drafts for the next share of `seq`, if that computes the last known token and nothing else."""
        if seq.status is not Status.RUNNING or not token_ids:
            return
        fits = seq.num_uncomputed_tokens == 1 and seq.num_tokens == len(seq.token_ids)
        if self._rule is not None:
            self._rule.note_offer(seq.sequence_id, seq.token_ids, token_ids, self._source_of(seq))
        if fits or self._rule is None:
            self._drafts[seq.sequence_id] = token_ids if fits else _EXPECTED
        else:
            self._late[seq.sequence_id] = len(token_ids)

    def _source_of(self, seq: Sequence) -> DraftSource:
        if seq.prediction:
            return DraftSource.PREDICTION
        return DraftSource.MODEL if self._asks else DraftSource.TEXT

    def forget_extras(self, seq: Sequence) -> None:
        """Drop drafts and encoder outputs of a sequence that leaves the running queue."""
        self._drafts.pop(seq.sequence_id, None)
        self._late.pop(seq.sequence_id, None)
        self._num_drafted.pop(seq.sequence_id, None)
        if self._rule is not None:
            self._rule.forget(seq.sequence_id)
        if seq.encoder_inputs:
            self.encoder_cache.release(seq)

    def choose_drafts(self, plan: PlanDraft) -> None:
        """Keep those of the drafts that are expected to pay, before any share is given.

        Where drafts came too late to fit, the choice is whether to wait for the next ones.
        """
        if self._rule is None or not (self._drafts or self._late):
            return
        offers = {each: len(drafts) for each, drafts in self._drafts.items()} | self._late
        has_prefill = any(seq.num_uncomputed_tokens > 1 for seq in self._state.queues.running)
        chosen, plan.draft_choice = self._rule.choose(
            offers, num_decodes=plan.budget.num_decodes_ahead, has_prefill=has_prefill
        )
        drafts, self._late = self._drafts, {}
        self._drafts = {each: drafts.get(each, _EXPECTED)[:num] for each, num in chosen.items()}

    def ask_for_drafts(self, plan: PlanDraft) -> None:
        """Ask a draft model for the drafts of the next step that are expected to pay, after all shares.

        None while prompts are computed: the next step would hardly verify them.
        """
        if not self._asks or len(plan.chunks) > len(plan.draft_token_ids):
            return
        decodes = {share.sequence_id for share in (*plan.decodes, *plan.chunks)}
        decoding = [seq for seq in self._state.queues.running if seq.sequence_id in decodes]
        room = {seq.sequence_id: self._drafting(seq, plan) for seq in decoding if not seq.prediction}
        if self._rule is None:
            wanted = {each: one.most for each, one in room.items()}
        else:
            wanted = self._rule.ask(room, num_decodes=len(decoding))
        if wanted:
            self._keep_room(wanted, plan)

    def _drafting(self, seq: Sequence, plan: PlanDraft) -> Drafting:
        """Describe a sequence after all that this plan may bring."""
        num_brought = 1 + len(plan.draft_token_ids.get(seq.sequence_id, ()))
        num_left = seq.max_length - seq.num_tokens - num_brought - 1
        return Drafting(
            most=max(min(num_left, self._state.config.max_drafts), 0),
            lag=seq.num_tokens - self._num_drafted.get(seq.sequence_id, 0),
            num_generated=seq.num_output_tokens,
            num_left=max(num_left, 0),
        )

    def _keep_room(self, wanted: dict[SequenceId, int], plan: PlanDraft) -> None:
        """Give blocks to drafts that are asked for, of those that no growth in the next step will ask for."""
        running = self._state.queues.running
        num_free = self._kv.pool.num_free - sum(
            self._kv.num_missing(each, num_lookahead=1) for each in running
        )
        for seq in running:
            num_drafts = wanted.get(seq.sequence_id, 0)
            if not num_drafts:
                continue
            # Where this plan verifies drafts, they may all hold.
            num_ahead = num_drafts + 1 + len(plan.draft_token_ids.get(seq.sequence_id, ()))
            num_missing = self._kv.num_missing(seq, num_lookahead=num_ahead)
            if num_missing > num_free:
                continue
            num_free -= num_missing
            fresh = self._kv.append(seq, num_lookahead=num_ahead)
            if fresh:
                plan.new_blocks[seq.sequence_id] = plan.new_blocks.get(seq.sequence_id, ()) + fresh
            plan.num_drafts_wanted[seq.sequence_id] = num_drafts

    def note_followed(self, seq: Sequence, num_tokens: int) -> None:
        """Learn how many tokens of a sequence the draft model has computed: perhaps a part of its prompt."""
        if seq.status is Status.RUNNING:
            self._num_drafted[seq.sequence_id] = num_tokens

    def observe_step(self, plan: SchedulerOutput, seconds: float, waited_s: float) -> None:
        """Learn how long a step without prompts took, while drafts are about."""
        if self._rule is None or not (self._asks or not self._rule.is_idle):
            return
        self._rule.observe(plan.num_scheduled_tokens, seconds)
        if self._state.config.max_plans_in_flight > 1:  # else all steps wait
            self._rule.observe_wait(waited_s, has_drafts=bool(plan.draft_token_ids))

    def observe_draft_passes(self, passes: DraftPasses) -> None:
        """Learn how long passes of the draft model took."""
        if self._rule is not None:
            for num_tokens, seconds in passes:
                self._rule.pass_costs.observe(num_tokens, seconds)

    def _decode_with_drafts(
        self, seq: Sequence, start: int, drafts: tuple[int, ...], plan: PlanDraft
    ) -> None:
        """Give a share with as many drafts as cost no other sequence anything.

        The worker says how many hold.
        """
        self._state.in_flight.hold()
        num_drafts = self._num_drafts_with_room(seq, len(drafts), plan)
        share = ScheduledSequence(seq.sequence_id, start, 1 + num_drafts, samples=True)
        if not num_drafts:
            plan.decodes.append(share)
            return
        fresh = self._kv.append(seq, num_lookahead=num_drafts)
        assert fresh is not None, "there was room for them"
        if fresh:
            plan.new_blocks[seq.sequence_id] = plan.new_blocks.get(seq.sequence_id, ()) + fresh
        plan.budget.remaining_tokens -= num_drafts
        plan.draft_token_ids[seq.sequence_id] = drafts[:num_drafts]
        plan.chunks.append(share)

    def _num_drafts_with_room(self, seq: Sequence, num_wanted: int, plan: PlanDraft) -> int:
        """Drafts that the step and the sequence may still have, in blocks that no growth will ask for."""
        budget = plan.budget
        num_drafts = min(
            num_wanted,
            budget.remaining_tokens - budget.num_decodes_ahead,
            seq.max_length - seq.num_tokens - 1,
        )
        if num_drafts <= seq.num_slots - seq.num_tokens:
            return max(num_drafts, 0)
        if plan.num_blocks_for_growth is None:
            plan.num_blocks_for_growth = sum(
                self._kv.num_missing(each)
                for each in self._state.queues.running
                if each.num_tokens > each.num_slots
            )
        num_missing = self._kv.num_missing(seq, num_lookahead=num_drafts)
        if num_missing + plan.num_blocks_for_growth <= self._kv.pool.num_free:
            return num_drafts
        return seq.num_slots - seq.num_tokens

    def _encode(self, seq: Sequence, start: int, end: int, plan: PlanDraft) -> None:
        inputs = self.encoder_cache.take(seq, start, end)
        if inputs:
            plan.encoder_inputs[seq.sequence_id] = inputs

    def _publish(self, seq: Sequence, start: int, end: int) -> None:
        if not seq.is_indivisible:
            self._kv.publish(seq, start, end)
