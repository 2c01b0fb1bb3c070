"""Shares of decodes with drafts, and room for those that a draft model is asked for.

Owns: how many drafts a step and its blocks have room for; blocks into which a draft model may write ahead.
Source: speculative decoding, arXiv:2211.17192. A share of 1 + k tokens computes the last known token and k
drafts; the worker returns the drafts that the model would have sampled too, and one token more.
"""

from scheduler.messages import ScheduledSequence, SequenceId
from scheduler.sequence import Sequence
from scheduler.step.plan_draft import PlanDraft
from scheduler.step.scheduler_state import SchedulerState


class DraftShares:
    """Drafts take what no other sequence asks for in this step or the next."""

    def __init__(self, state: SchedulerState) -> None:
        self._kv = state.kv
        self._queues = state.queues
        self._in_flight = state.in_flight
        self._drafts = state.drafts

    def decode(self, seq: Sequence, start: int, drafts: tuple[int, ...], plan: PlanDraft) -> None:
        """Give a share with as many drafts as cost no other sequence anything.

        The worker says how many hold.
        """
        self._in_flight.hold()
        num_drafts = self._num_drafts_with_room(seq, len(drafts), plan)
        share = ScheduledSequence(seq.sequence_id, start, 1 + num_drafts, samples=True)
        if not num_drafts:
            plan.decodes.append(share)
            return
        fresh = self._kv.append(seq, num_lookahead=num_drafts)
        assert fresh is not None, "there was room for them"
        if fresh:
            plan.add_blocks(seq.sequence_id, fresh)
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
                for each in self._queues.running
                if each.num_tokens > each.num_slots
            )
        num_missing = self._kv.num_missing(seq, num_lookahead=num_drafts)
        if num_missing + plan.num_blocks_for_growth <= self._kv.pool.num_free:
            return num_drafts
        return seq.num_slots - seq.num_tokens

    def ask(self, plan: PlanDraft) -> None:
        """Ask a draft model for the drafts of the next step that are expected to pay, after all shares.

        None while prompts are computed: the next step would hardly verify them.
        """
        if not self._drafts.asks_now or len(plan.chunks) > len(plan.draft_token_ids):
            return
        decodes = {share.sequence_id for share in (*plan.decodes, *plan.chunks)}
        decoding = [seq for seq in self._queues.running if seq.sequence_id in decodes]
        wanted = self._drafts.ask(decoding, plan.draft_token_ids)
        if wanted:
            self._keep_room(wanted, plan)
        if plan.num_drafts_wanted:
            self._in_flight.hold()

    def _keep_room(self, wanted: dict[SequenceId, int], plan: PlanDraft) -> None:
        """Give blocks to drafts that are asked for, of those that no growth in the next step will ask for."""
        running = self._queues.running
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
                plan.add_blocks(seq.sequence_id, fresh)
            plan.num_drafts_wanted[seq.sequence_id] = num_drafts
