"""Who computes how many tokens in the next step.

Owns: the life of every sequence, from add_request to its one last output.
Never: tensors, clocks, tasks. `schedule` decides (planner.py), `update_from_output` learns what came of it.
Sources: continuous batching (Orca), chunked prefill (Sarathi-Serve, arXiv:2403.02310), paged KV
(arXiv:2309.06180).
"""

from collections.abc import Iterable, Mapping

from scheduler.blocks.kv_cache_manager import KVCacheManager
from scheduler.blocks.swap_space import SwapSpace
from scheduler.config import Fairness, SchedulerConfig
from scheduler.lines.deadlines import Deadlines
from scheduler.lines.fairness import GENERATED_TOKEN_COST
from scheduler.lines.request_lines import Lines
from scheduler.messages import (
    FinishReason,
    ModelRunnerOutput,
    RequestCounts,
    ScheduledSequence,
    SchedulerOutput,
    SchedulerStats,
    SequenceId,
    SequenceOutput,
    SequenceReport,
    TokenLogprobs,
)
from scheduler.policy import rank_of
from scheduler.sequence import Sequence, Status
from scheduler.step.counters import Counters
from scheduler.step.encoder_cache import EncoderCache
from scheduler.step.never_served import NeverFits, refuse_beyond_limits, refuse_inputs_without_room
from scheduler.step.plan_draft import PlanDraft
from scheduler.step.planner import Planner
from scheduler.step.plans_in_flight import PlansInFlight
from scheduler.step.reports import report_on
from scheduler.step.rollback import TakingBack
from scheduler.step.scheduler_state import SchedulerState
from scheduler.step.step_limit import SMALLEST_CHUNK_TOKENS
from scheduler.step.watchdog import Watchdog

__all__ = ["NeverFits", "Outputs", "Scheduler"]

Outputs = dict[int, list[SequenceOutput]]
"""By client_index."""


class Scheduler:
    """One step: `schedule`, then `update_from_output` with what the worker made of it.

    Every added sequence ends with exactly one output that carries a finish reason.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv = KVCacheManager(config)
        self._rank = rank_of(config)
        self._has_accounts = config.fairness is Fairness.TENANT
        self._sequences: dict[SequenceId, Sequence] = {}
        self._lines = Lines(config)
        self._released: list[SequenceId] = []  # rows that the worker may free, told with the next plan
        self._outputs: Outputs = {}
        self._deadlines = Deadlines()
        self._watchdog = Watchdog()
        self._counters = Counters()
        self._in_flight = PlansInFlight(config.max_plans_in_flight)
        self._failed_in_flight: set[SequenceId] = set()  # their further failures tell nothing new
        state = SchedulerState(
            config=config,
            kv=self.kv,
            lines=self._lines,
            in_flight=self._in_flight,
            counters=self._counters,
        )
        self._state = state
        self._planner = Planner(state, finish=self._finish)

    # The public calls.

    def add_request(self, seq: Sequence, *, now_s: float) -> None:
        """Queue one sequence; a request with n > 1 adds n of them, which share their prompt's blocks.

        Raises NeverFits if it cannot be served even alone, ValueError if its id is in use; the
        scheduler is then as if it had not been called.
        """
        if seq.sequence_id in self._sequences:
            raise ValueError(f"sequence {seq.sequence_id} exists already")
        self._refuse_what_never_fits(seq)
        seq.max_length = self._max_length(seq)
        self._counters.num_added += 1
        seq.admission = self._counters.num_added
        seq.admitted_s = now_s
        seq.rank = self._rank(seq)
        self._sequences[seq.sequence_id] = seq
        self._lines.add(seq)
        self._deadlines.add(seq)

    @property
    def can_schedule(self) -> bool:
        """Whether one more plan may be made before a result comes."""
        return not self._in_flight.is_full

    def schedule(self, *, now_s: float) -> SchedulerOutput:
        """Plan the next step. The plan counts as computed from now on; results only add tokens."""
        if self._failed_in_flight and not self._in_flight:
            self._failed_in_flight.clear()
        for seq, limit in self._deadlines.expired(now_s=now_s):
            self._finish(seq, FinishReason.EXPIRED, message=limit.value)
        return self._close(self._planner.plan(now_s=now_s))

    def update_draft_token_ids(self, drafts: Mapping[SequenceId, tuple[int, ...]]) -> None:
        """Guesses at the tokens after the last known one; the next plan verifies as many as have room."""
        for sequence_id, token_ids in drafts.items():
            seq = self._sequences.get(sequence_id)
            if seq is not None:
                self._planner.shares.drafts.propose(seq, token_ids)

    def update_from_output(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> Outputs:
        """Take in what the worker drew; results come in the order of the plans.

        Sequences that ended meanwhile are passed over. One that was preempted meanwhile gets its token
        all the same: it was drawn, and is not drawn again.
        """
        self._in_flight.take(plan)
        self._planner.step_limit.fitted()
        sequences, drawn = self._sequences, result.token_ids
        for share in plan.scheduled:
            seq = sequences.get(share.sequence_id)
            if seq is None:
                if share.sequence_id in result.failures:
                    self._distrust(share.sequence_id)
                continue
            token_ids = drawn.get(share.sequence_id)
            if token_ids:
                self._take_tokens(seq, share, token_ids, plan, result)
            else:
                self._take_other(seq, share, result)
        return self.take_outputs()

    def fail_step(self, plan: SchedulerOutput, message: str) -> Outputs:
        """The worker failed on the whole plan: everyone in it fails, with a share or with blocks only.

        So does whoever was admitted by a later plan in flight, since it may share what was never written.
        Nothing that these published is found any more. All others go on.
        """
        self._in_flight.take(plan)
        # One may have got blocks but, for want of tokens, no share: the worker's table may miss them now.
        doomed = [*(share.sequence_id for share in plan.scheduled), *plan.new_blocks]
        for later in self._in_flight:
            doomed += [new.sequence_id for new in later.new_sequences]
        for sequence_id in doomed:
            seq = self._sequences.get(sequence_id)
            if seq is None:
                self._distrust(sequence_id)
            else:
                self._fail(seq, message)
        for preemption in plan.preemptions:  # whether their copies were made, nobody knows
            seq = self._sequences.get(preemption.sequence_id)
            if seq is not None and seq.status is Status.SWAPPED:
                self.kv.drop_copy(seq)
                self._lines.lose_copy(seq)
        self.kv.forget_copies(plan.swap_out)
        return self.take_outputs()

    def take_back(self, message: str) -> Outputs:
        """The device had too little memory for the oldest plan in flight: none of them was ever made.

        Their results must not be taken in. Everybody in them waits again, as after a preemption, with all
        tokens told so far, and the next plans are smaller. One that was alone in a plan that cannot be made
        smaller fails with `message`.
        """
        plans = self._in_flight.take_all()
        self._counters.num_out_of_memory += 1
        taking_back = TakingBack(self._state, self._planner.shares, plans, self._sequences)
        for sequence_id in taking_back.ended_and_published():
            self._distrust(sequence_id)
        self._released += taking_back.undo()
        first = plans[0]
        if len(first.scheduled) == 1 and self._is_smallest(first.scheduled[0]):
            self.finish_requests([first.scheduled[0].sequence_id], FinishReason.FAILED, message=message)
        elif first.scheduled:
            self._planner.step_limit.did_not_fit(first.num_scheduled_tokens)
        return self.take_outputs()

    def finish_requests(
        self, sequence_ids: Iterable[SequenceId], reason: FinishReason, *, message: str = ""
    ) -> None:
        """End these now, wherever they are; ids that are unknown or ended already are passed over."""
        for sequence_id in sequence_ids:
            seq = self._sequences.get(sequence_id)
            if seq is not None:
                self._finish(seq, reason, message)

    def reset_prefix_cache(self) -> None:
        """Let nothing that was cached so far be found again; running sequences keep their blocks."""
        self.kv.reset_prefix_cache()

    def take_outputs(self) -> Outputs:
        """What was not delivered yet, for steps that had nothing to compute."""
        outputs, self._outputs = self._outputs, {}
        return outputs

    def get_request_counts(self) -> RequestCounts:
        return self._lines.counts()

    def observe_step(self, plan: SchedulerOutput, seconds: float) -> None:
        """How long the worker took for a plan; what follows is decided by such figures."""
        num_decoded = len(plan.scheduled) + sum(map(len, plan.draft_token_ids.values()))
        self._planner.step_time.observe(
            plan.num_scheduled_tokens, seconds, has_prefill=plan.num_scheduled_tokens > num_decoded
        )

    def report(self, *, now_s: float) -> list[SequenceReport]:
        """Every live sequence, and why it waits."""
        waiting = list(self._lines.waiting)
        return report_on(self._lines.running, waiting, self._planner.wait_reason, now_s=now_s)

    def tenant_service(self) -> dict[str, float]:
        """What each tenant had so far, by cost; empty without fairness."""
        return self._lines.tenant_service()

    @property
    def swap_space(self) -> SwapSpace:
        return self.kv.swap_space

    def running_sequences(self) -> list[Sequence]:
        """In the order in which they are served; the sequences themselves are not copies."""
        return list(self._lines.running)

    def waiting_sequences(self) -> list[Sequence]:
        """Swapped ones too; in no particular order."""
        return list(self._lines.waiting)

    def plans_in_flight(self) -> list[SchedulerOutput]:
        """Oldest first."""
        return list(self._in_flight)

    @property
    def encoder_cache(self) -> EncoderCache:
        return self._planner.shares.encoder_cache

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._sequences)

    def stats(self) -> SchedulerStats:
        counts = self.get_request_counts()
        return SchedulerStats(
            num_running=counts.running,
            num_waiting=counts.waiting,
            wait_reason=self._planner.wait_reason,
            num_swapped=counts.swapped,
            num_used_blocks=self.kv.pool.num_used,
            num_blocks=self.kv.pool.num_blocks,
            num_used_host_blocks=self.swap_space.num_used,
            num_host_blocks=self.swap_space.num_blocks,
            num_steps=self._counters.num_steps,
            num_stalls=self._counters.num_stalls,
            num_out_of_memory=self._counters.num_out_of_memory,
            preemptions=self._counters.preemptions(),
            num_swap_space_full=self._planner.preemptor.num_swap_space_full,
            num_prefix_queries=self._counters.num_prefix_queries,
            num_prefix_hits=self._counters.num_prefix_hits,
            num_prefix_host_hits=self._counters.num_prefix_host_hits,
            num_kept_host_blocks=self.kv.num_kept_blocks,
            num_recomputed_tokens=self._counters.num_recomputed_tokens,
            num_draft_tokens=self._counters.num_draft_tokens,
            num_accepted_tokens=self._counters.num_accepted_tokens,
        )

    def _close(self, plan: PlanDraft) -> SchedulerOutput:
        self._released += plan.released
        if plan.is_empty:
            self._watch()
            return plan.finished(self._counters.num_steps, ())
        self._watchdog.sees_a_stall(has_work=False)
        self._counters.num_steps += 1
        released, self._released = tuple(self._released), []
        finished = plan.finished(self._counters.num_steps, released)
        self._in_flight.add(finished)
        return finished

    def _watch(self) -> None:
        """Work, nothing under way and nothing planned must not be, and must never become a hang."""
        has_work = bool(self._sequences) and not self._in_flight
        if not self._watchdog.sees_a_stall(has_work=has_work):
            return
        self._counters.num_stalls += 1
        first = self._lines.running[0] if self._lines.running else self._lines.waiting.peek()
        self._finish(first, FinishReason.FAILED, message="the scheduler cannot serve this request")

    def _max_length(self, seq: Sequence) -> int:
        if seq.pooling is not None:
            return seq.num_prompt_tokens
        return min(seq.num_prompt_tokens + seq.params.max_tokens, self.config.max_model_len)

    def _is_smallest(self, share: ScheduledSequence) -> bool:
        """Whether a step with this share alone cannot be made smaller."""
        seq = self._sequences.get(share.sequence_id)
        is_indivisible = seq is not None and seq.is_indivisible
        return is_indivisible or share.num_tokens <= SMALLEST_CHUNK_TOKENS

    # Learning what came of it.

    def _take_tokens(
        self,
        seq: Sequence,
        share: ScheduledSequence,
        token_ids: tuple[int, ...],
        plan: SchedulerOutput,
        result: ModelRunnerOutput,
    ) -> None:
        if (plan.draft_token_ids or len(token_ids) != 1) and not self._judge_drafts(seq, token_ids, plan):
            return
        logprobs = result.logprobs.get(seq.sequence_id, ()) if result.logprobs else ()
        num_before = len(seq.token_ids)
        reason = _append(seq, token_ids)
        num_known = len(seq.token_ids)
        if reason is None:
            if seq.num_tokens != num_known or seq.num_computed_tokens != num_known - 1:
                self._settle(seq, len(token_ids) - 1)
        elif len(token_ids) > 1:  # what was accepted behind the end is nobody's
            token_ids, logprobs = token_ids[: num_known - num_before], logprobs[: num_known - num_before]
        if self._has_accounts:
            self._lines.charge(seq.tenant, GENERATED_TOKEN_COST * len(token_ids))
        start, seq.pending_start = seq.pending_start, None
        news = self._news_of_prompt(seq, share, result) if result.prompt_logprobs else ()
        num_preemptions = seq.num_preemptions
        output = SequenceOutput(
            seq.sequence_id, token_ids, reason, logprobs, start, "", news, b"", num_preemptions
        )
        if reason is None:
            self._tell(seq, output)
        else:
            self._end(seq, reason, output)

    def _judge_drafts(self, seq: Sequence, token_ids: tuple[int, ...], plan: SchedulerOutput) -> bool:
        """Count them; False if so many tokens cannot be, and the sequence has failed."""
        num_drafts = len(plan.draft_token_ids.get(seq.sequence_id, ()))
        if not 1 <= len(token_ids) <= 1 + num_drafts:
            self._fail(seq, f"the model returned {len(token_ids)} tokens for {num_drafts} drafts")
            return False
        self._counters.num_draft_tokens += num_drafts
        self._counters.num_accepted_tokens += len(token_ids) - 1
        return True

    def _settle(self, seq: Sequence, num_accepted: int) -> None:
        """Correct what was planned without knowing its tokens, and let others find its full blocks."""
        num_known = len(seq.token_ids)
        seq.num_tokens = max(seq.num_tokens, num_known)
        if seq.status is not Status.RUNNING:
            return
        # What of the known tokens is computed, or will be by a plan in flight, but was not published yet.
        start = seq.num_computed_tokens if num_accepted else num_known - 1
        seq.num_computed_tokens += num_accepted
        self.kv.publish(seq, start, min(seq.num_computed_tokens, num_known))

    def _take_other(self, seq: Sequence, share: ScheduledSequence, result: ModelRunnerOutput) -> None:
        """Of a share that drew no token."""
        sequence_id = seq.sequence_id
        if sequence_id in result.failures:
            self._fail(seq, result.failures[sequence_id])
        elif share.samples and sequence_id in result.pooled:
            self._take_pooled(seq, result.pooled[sequence_id])
        elif share.samples:
            # A silent worker counts as a failed one: the sequence could never be scheduled again.
            self._fail(seq, "the model returned no token")
        elif news := self._news_of_prompt(seq, share, result):
            self._tell(seq, SequenceOutput(sequence_id, (), None, (), seq.take_start(), "", news))

    def _take_pooled(self, seq: Sequence, pooled: bytes) -> None:
        """The one output of a sequence that generates nothing."""
        reason = FinishReason.STOP
        output = SequenceOutput(
            seq.sequence_id,
            (),
            reason,
            start=seq.take_start(),
            pooled=pooled,
            num_preemptions=seq.num_preemptions,
        )
        self._end(seq, reason, output)

    def _news_of_prompt(
        self, seq: Sequence, share: ScheduledSequence, result: ModelRunnerOutput
    ) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt not told before: what a preemption made compute again was."""
        computed = result.prompt_logprobs.get(share.sequence_id, ())
        news = computed[max(seq.num_told_positions - share.start, 0) :]
        seq.num_told_positions += len(news)
        return news

    def _tell(self, seq: Sequence, output: SequenceOutput) -> None:
        self._outputs.setdefault(seq.client_index, []).append(output)

    # Ending.

    def _fail(self, seq: Sequence, message: str) -> None:
        """What it computed last cannot be trusted."""
        self._failed_in_flight.add(seq.sequence_id)
        self.kv.forget(seq)
        self._finish(seq, FinishReason.FAILED, message=message)

    def _distrust(self, sequence_id: SequenceId) -> None:
        """It failed after it ended; unless it ended by failing, what it published can still be found."""
        if sequence_id not in self._failed_in_flight:
            self.reset_prefix_cache()

    def _finish(self, seq: Sequence, reason: FinishReason, message: str = "") -> None:
        output = SequenceOutput(
            seq.sequence_id,
            (),
            reason,
            start=seq.take_start(),
            message=message,
            num_preemptions=seq.num_preemptions,
        )
        self._end(seq, reason, output)

    def _end(self, seq: Sequence, reason: FinishReason, output: SequenceOutput) -> None:
        """The one way out, from any queue."""
        before = seq.status
        self._lines.finish(seq)
        seq.finish_reason = reason
        if before is Status.RUNNING:
            self._planner.shares.forget_extras(seq)
            self.kv.free(seq)
            self._released.append(seq.sequence_id)
        elif before is Status.SWAPPED:
            self.kv.drop_copy(seq)
        del self._sequences[seq.sequence_id]
        self._deadlines.forget(seq)
        self._tell(seq, output)

    def _refuse_what_never_fits(self, seq: Sequence) -> None:
        refuse_beyond_limits(seq, self.config)
        refuse_inputs_without_room(seq, self.config)
        if not self.kv.can_ever_fit(seq.num_tokens):
            raise NeverFits(
                f"the prompt has {seq.num_tokens} tokens; the KV cache holds "
                f"{self.kv.pool.num_blocks * self.config.block_size}"
            )


def _append(seq: Sequence, token_ids: tuple[int, ...]) -> FinishReason | None:
    """Add them to what is known, up to the one that ends it."""
    known, stop_token_ids = seq.token_ids, seq.params.stop_token_ids
    for token_id in token_ids:
        known.append(token_id)
        if token_id in stop_token_ids:
            return FinishReason.STOP
        if len(known) >= seq.max_length:
            return FinishReason.LENGTH
    return None
