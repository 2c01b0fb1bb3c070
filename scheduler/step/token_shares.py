"""What one sequence gets of a step: a decode, a chunk of its prompt, a decode with drafts.

Owns: the size of a share, and what goes with it: blocks found from now on, drafts, encoder inputs.
Never: who is served or admitted (planner.py, admission.py), or who has to go (preemption.py).
"""

from scheduler.messages import ScheduledSequence
from scheduler.sequence import Sequence
from scheduler.step.drafts import Drafts
from scheduler.step.encoder_cache import EncoderCache
from scheduler.step.plan_draft import PlanDraft
from scheduler.step.scheduler_state import SchedulerState


class Shares:
    """Each call gives one sequence, which has its blocks, its share of the plan."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._kv = state.kv
        self._block_size = state.config.block_size
        self.drafts = Drafts()
        self.encoder_cache = EncoderCache(state.config)

    def decode(self, seq: Sequence, plan: PlanDraft) -> None:
        """One token; it may be the last one of a prompt, for which nothing is encoded."""
        start = seq.num_computed_tokens
        plan.budget.take_decode()
        seq.num_computed_tokens = end = start + 1
        # A block is found by its tokens: one that a plan in flight draws is published when it is known.
        if end % self._block_size == 0 and end <= len(seq.token_ids):
            self._publish(seq, start, end)
        if self.drafts.by_sequence and (drafts := self.drafts.take(seq)) is not None:
            self._decode_with_drafts(seq, start, drafts, plan)
            return
        plan.decodes.append(ScheduledSequence(seq.sequence_id, start, 1, True))  # noqa: FBT003  (a hot path)
        if seq.num_tokens + 1 < seq.max_length:  # as expect_token, without the call
            seq.num_tokens += 1

    def part(self, seq: Sequence, plan: PlanDraft) -> None:
        """As much of what it has left as there is budget for; nothing, if nothing is left."""
        share = plan.budget.take_chunk(seq, self.num_wanted(seq))
        if share:
            self.chunk(seq, share, plan)

    def chunk(self, seq: Sequence, share: int, plan: PlanDraft) -> None:
        start = seq.num_computed_tokens
        seq.num_computed_tokens = end = start + share
        self._state.counters.num_recomputed_tokens += max(min(end, seq.num_reached_tokens) - start, 0)
        if seq.encoder_inputs:
            self._encode(seq, start, end, plan)
        self._publish(seq, start, end)
        samples = end == seq.num_tokens
        plan.chunks.append(ScheduledSequence(seq.sequence_id, start, share, samples))
        if samples:
            seq.expect_token()

    def num_wanted(self, seq: Sequence) -> int:
        """All that is left; less if others would like a part of the step too."""
        limit, wanted = self._state.config.max_chunk_tokens, seq.num_uncomputed_tokens
        lines = self._state.lines
        if limit and not seq.is_indivisible and len(lines.running) + len(lines.waiting) > 1:
            wanted = min(wanted, limit)
        if seq.encoder_inputs:
            return self.encoder_cache.reach(seq, seq.num_computed_tokens, wanted)
        return wanted

    def forget_extras(self, seq: Sequence) -> None:
        """What it holds beside its blocks, now that it leaves the running line."""
        self.drafts.forget(seq)
        if seq.encoder_inputs:
            self.encoder_cache.release(seq)

    def _decode_with_drafts(
        self, seq: Sequence, start: int, drafts: tuple[int, ...], plan: PlanDraft
    ) -> None:
        """A share with as many drafts as nobody else goes short for; how many will hold, nobody knows yet."""
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
        """In what the step and the sequence may still have, and in blocks that no growth will ask for."""
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
                for each in self._state.lines.running
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
