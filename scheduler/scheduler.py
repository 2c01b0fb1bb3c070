"""The scheduler: how many tokens of which sequence the next step computes, and what its result means.

Owns: the life of every sequence, from add_request to its one last output.
Sources: continuous batching (Orca), chunked prefill (Sarathi-Serve, arXiv:2403.02310), paged KV
(arXiv:2309.06180).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from scheduler.config import Fairness, SchedulerConfig
from scheduler.counters import GroupUse, SchedulerStats
from scheduler.draft_messages import DraftPasses
from scheduler.messages import (
    Encoded,
    FinishReason,
    GroupBlocks,
    ModelRunnerOutput,
    ReportPage,
    RequestCounts,
    ScheduledSequence,
    SchedulerOutput,
    SequenceId,
    SequenceOutput,
    SequenceReport,
    TokenLogprobs,
)
from scheduler.queues.compilations import Compilations
from scheduler.queues.deadlines import Deadlines
from scheduler.sequence import Sequence, Status
from scheduler.step.budget import SMALLEST_CHUNK_TOKENS
from scheduler.step.never_fits import NeverFits, refuse_beyond_limits, refuse_inputs_without_room
from scheduler.step.plan_draft import PlanDraft, plan_of_decodes
from scheduler.step.planner import Planner
from scheduler.step.rollback import Rollback
from scheduler.step.scheduler_state import SchedulerState, Watchdog, stats_of
from scheduler.step.token_shares import TokenShares

__all__ = ["NeverFits", "Outputs", "Scheduler"]

_output: Callable[[tuple[object, ...]], SequenceOutput]
_output = partial(tuple.__new__, SequenceOutput)  # half the time of the class's own constructor

Outputs = dict[int, list[SequenceOutput]]
"""Outputs by client_index."""


class Scheduler:
    """One step: `schedule`, then `update_from_output` with what the worker made of it.

    Every added sequence ends with exactly one output that carries a finish reason.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._state = state = SchedulerState.of(config)
        self.kv = state.kv
        self._has_accounts = config.fairness is Fairness.TENANT
        self._sequences: dict[SequenceId, Sequence] = {}
        self._queues = state.queues
        self._released: list[SequenceId] = []  # rows that the worker may free, sent with the next plan
        self._outputs: Outputs = {}
        self._deadlines = Deadlines()
        self._watchdog = Watchdog()
        self._counters = state.counters
        self._drafts = state.drafts
        self._in_flight = state.in_flight
        self._failed_in_flight: set[SequenceId] = set()  # their further failures change nothing
        self._shares = TokenShares(self._state)
        self._planner = Planner(self._state, self._shares, finish=self._finish)

    # The public calls.

    def add_request(self, seq: Sequence, *, now_s: float) -> None:
        """Queue one sequence; a request with n > 1 adds n of them, which share their prompt's blocks.

        Raises NeverFits if it cannot be served even alone, ValueError if its id is in use; the
        scheduler is then as if it had not been called.
        """
        if seq.sequence_id in self._sequences:
            raise ValueError(f"sequence {seq.sequence_id} exists already")
        self._refuse_if_it_never_fits(seq)
        seq.max_length = self._max_length(seq)
        self._counters.num_added += 1
        seq.admission = self._counters.num_added
        seq.admitted_s = now_s
        self._state.rank(seq)
        self._sequences[seq.sequence_id] = seq
        self._queues.add(seq)
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
        if self._drafts.trials is not None:
            self._drafts.trials.begin_turn(now_s, self._queues.running)
        decodes = self._planner.plan_decodes()
        if decodes is not None:
            return self._close_decodes(*decodes)
        return self._close(self._planner.plan(now_s=now_s))

    def update_draft_token_ids(self, drafts: Mapping[SequenceId, tuple[int, ...]]) -> None:
        """Take guesses at the tokens after the last known one.

        The next plan verifies as many as have room.
        """
        for sequence_id, token_ids in drafts.items():
            seq = self._sequences.get(sequence_id)
            if seq is not None:
                self._drafts.offer(seq, token_ids)

    def update_from_output(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> Outputs:
        """Take in the tokens that the worker sampled; results come in the order of the plans.

        Sequences that ended meanwhile are skipped. One that was preempted meanwhile gets its token all the
        same: it was sampled, and is not sampled again.
        """
        self._in_flight.take(plan)
        self._planner.note_memory_sufficed()
        sequences = self._sequences
        is_plain = not (plan.draft_token_ids or result.logprobs or result.prompt_logprobs)
        for sequence_id, num_tokens in result.num_followed.items():
            if sequence_id in sequences:
                self._drafts.note_followed(sequences[sequence_id], num_tokens)
        if result.encoded is not None:
            self._take_encoded(plan, result, result.encoded)
        for share in self._take_plain(plan.scheduled, result.token_ids) if is_plain else plan.scheduled:
            self._take_share(share, plan, result)
        return self.take_outputs()

    def fail_step(self, plan: SchedulerOutput, message: str) -> Outputs:
        """Fail every sequence of a plan that the worker failed on, with a share or with blocks only.

        Sequences that a later plan in flight admitted fail too, since they may share blocks that were never
        written. Nothing that these published is found any more. All others go on.
        """
        self._in_flight.take(plan)
        # One may have got blocks, or have been admitted, but for want of tokens no share: the worker's table
        # may miss it now.
        doomed = [*(share.sequence_id for share in plan.scheduled), *plan.new_blocks]
        for each in (plan, *self._in_flight):
            doomed += [new.sequence_id for new in each.new_sequences]
        for sequence_id in dict.fromkeys(doomed):
            seq = self._sequences.get(sequence_id)
            if seq is None:
                self._distrust(sequence_id)
            else:
                self._fail(seq, message)
        for preemption in plan.preemptions:  # it is unknown whether their copies were made
            seq = self._sequences.get(preemption.sequence_id)
            if seq is not None and seq.status is Status.SWAPPED:
                self.kv.drop_copy(seq)
                self._queues.lose_copy(seq)
        self.kv.forget_copies(plan.swap_out)
        return self.take_outputs()

    def roll_back(self, message: str) -> Outputs:
        """Undo all plans in flight: the device had too little memory for the oldest.

        Their results must not be taken in. Sequences in them wait again, as after a preemption, with all
        tokens reported so far, and the next plans are smaller. A sequence that was alone in a plan that
        cannot be made smaller fails with `message`.
        """
        plans = self._in_flight.take_all()
        self._counters.num_out_of_memory += 1
        rollback = Rollback(self._state, self._shares, plans, self._sequences)
        for sequence_id in rollback.ended_and_published():
            self._distrust(sequence_id)
        self._released += rollback.undo()
        first = plans[0]
        if len(first.scheduled) == 1 and self._is_smallest(first.scheduled[0]):
            self.finish_requests([first.scheduled[0].sequence_id], FinishReason.FAILED, message=message)
        elif first.scheduled:
            self._planner.note_memory_lacked(first)
        return self.take_outputs()

    def finish_requests(
        self, sequence_ids: Iterable[SequenceId], reason: FinishReason, *, message: str = ""
    ) -> None:
        """End sequences now, in any state; ids that are unknown or ended already are skipped."""
        for sequence_id in sequence_ids:
            seq = self._sequences.get(sequence_id)
            if seq is not None:
                self._finish(seq, reason, message)

    def reset_prefix_cache(self) -> None:
        """Forget all that was cached so far; running sequences keep their blocks."""
        self.kv.index.clear()

    def take_outputs(self) -> Outputs:
        """Outputs that were not delivered yet, for steps that had nothing to compute."""
        outputs, self._outputs = self._outputs, {}
        return outputs

    def get_request_counts(self) -> RequestCounts:
        return self._queues.counts()

    def observe_step(
        self, plan: SchedulerOutput, seconds: float, passes: DraftPasses = (), *, waited_s: float = 0.0
    ) -> None:
        """Learn how long the worker took for a plan, and for passes of a draft model.

        Before it the worker `waited_s`, since the plan needed the last result.
        """
        self._planner.observe_step(plan, seconds, waited_s)
        self._drafts.observe_passes(passes)

    @property
    def compilations(self) -> Compilations:
        """Grammars that the worker compiles during its steps; it reports each to `note_compiled`."""
        return self._queues.compilations

    def note_compiled(self, sequence_id: SequenceId) -> bool:
        """Let a sequence be admitted; False if it has ended meanwhile."""
        return self._queues.note_compiled(sequence_id)

    def report(self, page: ReportPage, *, now_s: float) -> list[SequenceReport]:
        """Reports on unfinished sequences, running ones first, and why each waits."""
        return [report for report in self.reports(page, now_s=now_s) if report is not None]

    def reports(self, page: ReportPage, *, now_s: float) -> Iterator[SequenceReport | None]:
        """Yield what `report` returns when the first is asked for, and None for others before the page."""
        return self._queues.reports(page, self._planner.reason_of, now_s=now_s)

    def running_sequences(self) -> list[Sequence]:
        """Running sequences in the order in which they are served.

        The sequences themselves are not copies.
        """
        return list(self._queues.running)

    def waiting_sequences(self) -> list[Sequence]:
        """Waiting sequences, swapped ones and those whose grammar is compiled too; in no particular order."""
        return self._queues.all_waiting()

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._sequences)

    def group_uses(self) -> list[GroupUse]:
        """Blocks by groups of layers."""
        return self._state.group_uses()

    def stats(self) -> SchedulerStats:
        return stats_of(self._state, self._planner.wait_reason)

    def _close(self, plan: PlanDraft) -> SchedulerOutput:
        self._released += plan.released
        if not self._is_step(plan):
            self._watch()
            return plan.finished(self._counters.num_steps, ())
        released, self._released = tuple(self._released), []
        return self._counted(plan.finished(self._counters.num_steps + 1, released))

    def _close_decodes(
        self, shares: list[ScheduledSequence], grown: dict[SequenceId, GroupBlocks]
    ) -> SchedulerOutput:
        released, self._released = tuple(self._released), []
        plan = plan_of_decodes(self._counters.num_steps + 1, released, tuple(shares), grown)
        if (choice := self._planner.draft_choice) is not None:
            plan = plan._replace(draft_choice=choice)
        return self._counted(plan)

    def _is_step(self, plan: PlanDraft) -> bool:
        return not plan.is_empty

    def _counted(self, plan: SchedulerOutput) -> SchedulerOutput:
        self._watchdog.note_progress()
        self._counters.num_steps += 1
        self._counters.num_scheduled_tokens += plan.num_scheduled_tokens
        self._in_flight.add(plan)
        return plan

    def _watch(self) -> None:
        """Fail a request if, with work to do and no plan in flight, several plans in a row are empty."""
        if not self._sequences or self._in_flight or self.compilations.num_under_way:
            self._watchdog.note_progress()
            return
        if not self._watchdog.is_stalled():
            return
        self._counters.num_stalls += 1
        first = self._queues.running[0] if self._queues.running else self._queues.waiting.peek()
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

    # Results.

    def _take_encoded(self, plan: SchedulerOutput, result: ModelRunnerOutput, encoded: Encoded) -> None:
        """Take in what was encoded; a sequence with an input that cannot be ends."""
        self._counters.num_encoded += encoded.num_computed
        self._counters.num_encoder_hits += encoded.num_found
        self._counters.encoder_s += encoded.seconds
        encoder_cache = self._shares.encoder_cache
        for sequence_id, offsets in encoded.offsets.items():
            encoder_cache.note_encoded(sequence_id, offsets, step=plan.step)
        encoder_cache.owed_s += max(encoded.seconds - plan.encoder_slice_s, 0.0)
        for sequence_id in plan.encoder_inputs:
            if sequence_id in result.failures and sequence_id in self._sequences:
                self._fail(self._sequences[sequence_id], result.failures[sequence_id])

    def _take_plain(
        self, shares: Iterable[ScheduledSequence], sampled: Mapping[SequenceId, tuple[int, ...]]
    ) -> Iterator[ScheduledSequence]:
        """Take tokens in the middle of outputs, as most are; yield the shares with more to them."""
        sequences, has_accounts = self._sequences, self._has_accounts
        client_index, of_client = -1, list[SequenceOutput]()
        for share in shares:
            sequence_id = share[0]
            seq, token_ids = sequences.get(sequence_id), sampled.get(sequence_id, ())
            if seq is None or len(token_ids) != 1 or seq.pending_start is not None:
                yield share
                continue
            known, token_id = seq.token_ids, token_ids[0]
            num_known = len(known) + 1
            if num_known >= seq.max_length or token_id in seq.params.stop_token_ids:
                yield share
                continue
            known.append(token_id)
            if has_accounts:
                self._queues.charge_generated(seq, 1)
            if seq.num_tokens != num_known or seq.num_computed_tokens != num_known - 1:
                self._settle(seq, 0)
            if seq.client_index != client_index:
                client_index = seq.client_index
                of_client = self._outputs.setdefault(client_index, [])
            of_client.append(
                _output((sequence_id, token_ids, None, (), None, "", (), b"", seq.num_preemptions, None))
            )

    def _take_share(self, share: ScheduledSequence, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        seq = self._sequences.get(share.sequence_id)
        if seq is None:
            if share.sequence_id in result.failures:
                self._distrust(share.sequence_id)
        elif token_ids := result.token_ids.get(share.sequence_id):
            self._take_tokens(seq, share, token_ids, plan, result)
        else:
            self._take_other(seq, share, result)

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
        reason = seq.take_tokens(token_ids)
        num_known = len(seq.token_ids)
        if reason is None:
            if seq.num_tokens != num_known or seq.num_computed_tokens != num_known - 1:
                self._settle(seq, len(token_ids) - 1)
        elif len(token_ids) > 1:  # tokens accepted behind the end are dropped, and are computed all the same
            seq.num_computed_tokens += (len(token_ids) - 1) * (seq.status is Status.RUNNING)
            token_ids, logprobs = token_ids[: num_known - num_before], logprobs[: num_known - num_before]
        if self._has_accounts:
            self._queues.charge_generated(seq, len(token_ids))
        start = seq.take_start() if seq.pending_start else None
        prompt_logprobs = self._new_prompt_logprobs(seq, share, result) if result.prompt_logprobs else ()
        num_preemptions = seq.num_preemptions
        output = SequenceOutput(
            seq.sequence_id, token_ids, reason, logprobs, start, "", prompt_logprobs, b"", num_preemptions
        )
        if plan.draft_token_ids and seq.prediction:
            output = output._replace(prediction=self._drafts.prediction_use(seq, token_ids, plan, result))
        if reason is None:
            self._post(seq, output)
        else:
            self._end(seq, reason, output)

    def _judge_drafts(self, seq: Sequence, token_ids: tuple[int, ...], plan: SchedulerOutput) -> bool:
        """Count drafts; False if the number of tokens is impossible, and the sequence has failed."""
        num_drafts = len(plan.draft_token_ids.get(seq.sequence_id, ()))
        if not 1 <= len(token_ids) <= 1 + num_drafts:
            self._fail(seq, f"the model returned {len(token_ids)} tokens for {num_drafts} drafts")
            return False
        self._counters.note_drafts(num_drafts, len(token_ids) - 1)
        if self._drafts.trials is not None:
            self._drafts.trials.note_accepted(seq, len(token_ids) - 1)
        return True

    def _settle(self, seq: Sequence, num_accepted: int) -> None:
        """Correct a plan that was made without knowing these tokens, and let others find the full blocks."""
        num_known = len(seq.token_ids)
        seq.num_tokens = max(seq.num_tokens, num_known)
        if seq.status is not Status.RUNNING:
            return
        # From the first known token that is computed, or will be by a plan in flight, but was not published
        # yet.
        start = seq.num_computed_tokens if num_accepted else num_known - 1
        seq.num_computed_tokens += num_accepted
        self.kv.index.publish(seq, start, min(seq.num_computed_tokens, num_known))

    def _take_other(self, seq: Sequence, share: ScheduledSequence, result: ModelRunnerOutput) -> None:
        """Take in a share that sampled no token."""
        sequence_id = seq.sequence_id
        if sequence_id in result.failures:
            self._fail(seq, result.failures[sequence_id])
        elif sequence_id in result.unfit:
            self._finish(seq, FinishReason.UNFIT, result.unfit[sequence_id])
        elif share.samples and sequence_id in result.pooled:
            self._finish(seq, FinishReason.STOP, pooled=result.pooled[sequence_id])
        elif share.samples:
            # A silent worker counts as a failed one: the sequence could never be scheduled again.
            self._fail(seq, "the model returned no token")
        elif prompt_logprobs := self._new_prompt_logprobs(seq, share, result):
            output = SequenceOutput(sequence_id, (), None, (), seq.take_start(), "", prompt_logprobs)
            self._post(seq, output)

    def _new_prompt_logprobs(
        self, seq: Sequence, share: ScheduledSequence, result: ModelRunnerOutput
    ) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt not reported before: after a preemption some are computed again."""
        computed = result.prompt_logprobs.get(share.sequence_id, ())
        unreported = computed[max(seq.num_reported_positions - share.start, 0) :]
        seq.num_reported_positions += len(unreported)
        return unreported

    def _post(self, seq: Sequence, output: SequenceOutput) -> None:
        self._outputs.setdefault(seq.client_index, []).append(output)

    # Ending.

    def _fail(self, seq: Sequence, message: str) -> None:
        """End a sequence whose last results cannot be trusted."""
        self._failed_in_flight.add(seq.sequence_id)
        self.kv.index.forget(seq)
        self._finish(seq, FinishReason.FAILED, message=message)

    def _distrust(self, sequence_id: SequenceId) -> None:
        """Empty the prefix cache if a sequence failed after its end: its blocks may still be found there.

        One that ended by failing has been forgotten already.
        """
        if sequence_id not in self._failed_in_flight:
            self.reset_prefix_cache()

    def _finish(self, seq: Sequence, reason: FinishReason, message: str = "", *, pooled: bytes = b"") -> None:
        """End a sequence with an output without a token."""
        start, num_preemptions = seq.take_start(), seq.num_preemptions
        output = SequenceOutput(seq.sequence_id, (), reason, (), start, message, (), pooled, num_preemptions)
        self._end(seq, reason, output)

    def _end(self, seq: Sequence, reason: FinishReason, output: SequenceOutput) -> None:
        """End a sequence, from any queue: there is no other way out."""
        before = seq.status
        self._queues.finish(seq)
        seq.finish_reason = reason
        if before is Status.RUNNING:
            self._shares.forget_extras(seq)
            if reason is not FinishReason.FAILED and not self._in_flight.verifies(seq.sequence_id):
                self.kv.keep_end(seq)
            self.kv.free(seq)
            self._released.append(seq.sequence_id)
        elif before is Status.SWAPPED:
            self.kv.drop_copy(seq)
        del self._sequences[seq.sequence_id]
        self._deadlines.forget(seq)
        self._post(seq, output)

    def _refuse_if_it_never_fits(self, seq: Sequence) -> None:
        refuse_beyond_limits(seq, self.config)
        refuse_inputs_without_room(seq, self.config)
        if not self.kv.can_ever_fit(seq.num_tokens):
            raise NeverFits(
                f"the prompt has {seq.num_tokens} tokens; the KV cache holds "
                f"{self.kv.pool.num_blocks * self.config.block_size}"
            )
