"""Share of a step that one sequence gets: a decode, or a chunk of its prompt.

Owns: the size of a share, and what goes with it: blocks found from now on, room for encoder outputs.
"""

from collections.abc import Callable
from functools import partial

from scheduler.messages import ScheduledSequence, SequenceId
from scheduler.sequence import Sequence
from scheduler.step.budget import SchedulingBudget
from scheduler.step.draft_shares import DraftShares
from scheduler.step.encoder_cache import EncoderCache
from scheduler.step.plan_draft import PlanDraft
from scheduler.step.scheduler_state import SchedulerState

_share: Callable[[tuple[SequenceId, int, int, bool]], ScheduledSequence]
_share = partial(tuple.__new__, ScheduledSequence)  # half the time of the class's own constructor


class TokenShares:
    """Each call gives one sequence, which has its blocks, its share of the plan."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._kv = state.kv
        self._block_size = state.config.block_size
        self._has_state = state.kv.has_state
        self._inputs_at_once = state.config.inputs_at_once
        # In a pipeline, a sequence has no share before its token is known.
        self._num_expected = 1 if state.config.num_stages == 1 else 0
        self._drafts = state.drafts
        self.draft_shares = DraftShares(state)
        self.encoder_cache = EncoderCache(state.config)

    def decode(self, seq: Sequence, plan: PlanDraft) -> None:
        """Give one token; it may be the last one of a prompt, for which nothing is encoded."""
        start = seq.num_computed_tokens
        plan.budget.take_decode()
        seq.num_computed_tokens = end = start + 1
        # A block is found by its tokens: one that a plan in flight samples is published when it is known.
        if end % self._block_size == 0 and end <= len(seq.token_ids):
            self._publish(seq, start, end)
        if self._drafts.offers and (drafts := self._drafts.take(seq.sequence_id)) is not None:
            self.draft_shares.decode(seq, start, drafts, plan)
            return
        plan.decodes.append(ScheduledSequence(seq.sequence_id, start, 1, True))  # noqa: FBT003  (a hot path)
        if seq.num_tokens + 1 < seq.max_length:  # as expect_token, without the call
            seq.num_tokens += self._num_expected

    @property
    def has_extras(self) -> bool:
        """Whether inputs to encode may change what a decode gets, or a draft model what a plan asks for."""
        return self._drafts.asks_now or not self.encoder_cache.is_idle

    def decode_all(self, running: list[Sequence]) -> tuple[list[ScheduledSequence], list[Sequence]] | None:
        """Give each one token, as `decode` does, but for blocks; None if one wants another share.

        Returns the shares, and the sequences that fill a block with it or begin one.
        """
        block_size = self._block_size
        shares, at_bounds = list[ScheduledSequence](), list[Sequence]()
        for seq in running:
            start = seq.num_computed_tokens
            end = start + 1
            if seq.num_tokens != end:
                self.take_back(running[: len(shares)])
                return None
            seq.num_computed_tokens = end
            if end + 1 < seq.max_length:
                seq.num_tokens = end + 1
            if end % block_size <= 1:
                at_bounds.append(seq)
            shares.append(_share((seq.sequence_id, start, 1, True)))
        return shares, at_bounds

    def take_back(self, seqs: list[Sequence]) -> None:
        """Undo `decode_all` for these."""
        for seq in seqs:
            seq.num_tokens = seq.num_computed_tokens
            seq.num_computed_tokens -= 1

    def publish_full(self, at_bounds: list[Sequence]) -> None:
        """Let others find the blocks that `decode_all` filled, and complete the plan."""
        size = self._block_size
        full = [
            seq
            for seq in at_bounds
            if seq.num_computed_tokens % size == 0 and seq.num_computed_tokens <= len(seq.token_ids)
        ]
        for seq in full:
            self._publish(seq, seq.num_computed_tokens - 1, seq.num_computed_tokens)
        if full:
            self._kv.complete_plan()

    def part(self, seq: Sequence, plan: PlanDraft) -> None:
        """Give as many of the uncomputed tokens as the budget has; no share, if none are left.

        Nor is there one while the output of an input comes next that is not encoded yet.
        """
        if seq.encoder_inputs:
            self.encoder_cache.claim(seq)
        share = self.take(seq, self.num_shared(seq, plan.budget), plan.budget)
        if share:
            self.chunk(seq, share, plan)

    def take(self, seq: Sequence, num_wanted: int, budget: SchedulingBudget) -> int:
        """Take a chunk from the budget; one that would cut an input that is computed at once is another."""
        if not (seq.encoder_inputs and self._inputs_at_once):
            return budget.take_chunk(seq, num_wanted)
        if num_wanted < 1:  # it waits for an input, perhaps one that a found prefix ends in
            return 0
        start = seq.num_computed_tokens
        share = min(num_wanted, budget.chunk_tokens(seq, num_decodes=budget.num_decodes_ahead))
        for item in seq.encoder_inputs:
            if item.offset < start + share < item.end:
                if item.offset <= start:
                    return budget.take_whole(seq, item.end - start)
                share = item.offset - start
        return budget.take_chunk(seq, share)

    def chunk(self, seq: Sequence, share: int, plan: PlanDraft) -> None:
        """Give `share` tokens, which the budget has been charged with."""
        start = seq.num_computed_tokens
        seq.num_computed_tokens = end = start + share
        self._state.counters.num_recomputed_tokens += max(min(end, seq.num_reached_tokens) - start, 0)
        if seq.encoder_inputs:
            self.encoder_cache.drop(seq, end)
        self._publish(seq, start, end)
        if self._has_state:
            taps = self._kv.tap(seq, start, end, self._state.queues.running)
            plan.taps += taps
            self._state.counters.num_restore_points += len(taps)
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

    def forget_extras(self, seq: Sequence) -> None:
        """Drop drafts and encoder outputs of a sequence that leaves the running queue."""
        self._drafts.forget(seq.sequence_id)
        if seq.encoder_inputs:
            self.encoder_cache.release(seq)

    def awaits_encoder(self, seq: Sequence) -> bool:
        """Whether a running sequence has no share before an input is encoded."""
        start, num_left = seq.num_computed_tokens, seq.num_uncomputed_tokens
        return bool(num_left) and not self.encoder_cache.computable_tokens(seq, start, num_left)

    def _publish(self, seq: Sequence, start: int, end: int) -> None:
        if not seq.is_indivisible:
            self._kv.index.publish(seq, start, end)
