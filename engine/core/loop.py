"""The engine's loop, which moves every sequence.

Owns: the order of a turn: arrivals, plan, launch, results, outputs. `EngineLoop.turn` can be read aloud.

A device that works asynchronously gets the next step before the result of the last one is taken in:

    host     plan 1 | plan 2 | result 1, plan 3 | result 2, plan 4 | ...
    device          | step 1 .......... | step 2 .......... | step 3 ...
"""

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import isfinite
from typing import NamedTuple

from engine.core.between_steps import AdapterLoads, GrammarAdmission
from engine.core.explanations import Explanations
from engine.core.interfaces import NOTHING_BESIDE, BegunStep, BesideSteps, Executor, Mailbox
from engine.core.request_names import RequestNames
from engine.core.step_trace import StepFacts, StepTrace
from engine.core.step_watch import StepWatch
from engine.logs.setup import num_dropped_lines
from engine.process_messages import (
    AddRequest,
    Beat,
    Begun,
    EndSequences,
    Explain,
    ForgetAdapter,
    ForgetQuestion,
    LoadAdapter,
    Outputs,
    PrefixChanges,
    ResetPrefixCache,
    Shutdown,
    StepTimes,
    Watch,
)
from scheduler.messages import (
    FinishReason,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
    SequenceId,
    SequenceInputs,
    SequenceOutput,
)
from scheduler.scheduler import NeverFits, Scheduler
from scheduler.scheduler import Outputs as OutputsByClient
from scheduler.sequence import Sequence
from scheduler.step.budget import SMALLEST_CHUNK_TOKENS
from worker.worker_errors import StepOutOfMemory

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0
_RESULT_WAIT_S = 0.001
_GRAMMAR_WAIT_S = 0.001
_MIN_BEAT_INTERVAL_S = 0.05
# A worker that fails again and again stays broken, as a CUDA context after a fault: only a new process helps.
_MAX_FAILED_STEPS_IN_A_ROW = 3
_TOO_LITTLE_MEMORY = "the device has too little memory to compute this request, even by itself"


class WorkerBroken(Exception):
    """The worker failed too often in a row; the process must be replaced."""


class _NotLaunched:
    """A step that failed at launch; its error is raised after the results of the steps before it."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> ModelRunnerOutput:
        raise self._error


class _StepUnderWay(NamedTuple):
    plan: SchedulerOutput
    planned_s: float
    launched_s: float
    launched: BegunStep

    @property
    def is_launched(self) -> bool:
        return not isinstance(self.launched, _NotLaunched)


class EngineLoop:
    """The loop, which turns until a Shutdown arrives. Raises WorkerBroken, which ends the process."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Executor,
        mailbox: Mailbox,
        clock: Callable[[], float],
        trace: StepTrace | None = None,
        beside: BesideSteps = NOTHING_BESIDE,
    ) -> None:
        self._scheduler = scheduler
        self._adapters = AdapterLoads(scheduler, beside.adapters)
        self._grammars = GrammarAdmission(scheduler, beside.grammars)
        self._worker = worker
        self._mailbox = mailbox
        self._clock = clock
        self._trace = trace
        self._has_result = beside.has_result
        self._rank_times_s = beside.rank_times_s
        self._names = RequestNames()
        self._watch = StepWatch(scheduler, mailbox.send, self._names)
        self._explanations = Explanations(scheduler, mailbox.send)
        self._under_way: deque[_StepUnderWay] = deque()
        self._last_result_s = self._paused_s = float("-inf")
        self._is_stopping = False
        self._waits_for_grammars = False
        self._num_turns = 0
        self._num_failed_in_a_row = 0
        self._last_beat_s = float("-inf")
        self._schedule_s = self._execute_s = self._update_s = 0.0

    def run(self) -> None:
        try:
            while not self._is_stopping:
                self.turn()
        finally:
            if self._trace is not None:
                self._trace.close()

    def turn(self) -> None:
        """Launch one step and take in the results that are due; when idle, wait for messages."""
        self._take_messages(wait_s=self._wait_s())
        self._explanations.go_on(now_s=self._clock())
        plan = self._plan_with_arrivals()
        self._waits_for_grammars = plan.is_empty and self._grammars.is_busy and not self._under_way
        for _ in range(self._num_results_due(plan)):
            self._take_result()
        while self._under_way and not self._scheduler.can_schedule:  # drafts wait for several
            self._take_result()
        self._post(self._scheduler.take_outputs())
        self._post_prefix_changes()
        self._watch.look(now_s=self._clock())
        self._num_turns += 1
        self._beat()

    @property
    def _is_idle(self) -> bool:
        is_busy = self._scheduler.has_unfinished_requests or self._under_way or self._explanations.are_due
        return not is_busy

    def _plan_with_arrivals(self) -> SchedulerOutput:
        """Launch one step; if there is none while others are computed, one for what arrives meanwhile.

        No beat is posted meanwhile, so that a step that stands still is noticed.
        """
        plan = self._plan_and_launch()
        while plan.is_empty and self._may_plan_beside_steps and not self._has_result(_RESULT_WAIT_S):
            if self._take_messages(wait_s=0.0):
                plan = self._plan_and_launch()
        return plan

    @property
    def _may_plan_beside_steps(self) -> bool:
        return bool(self._under_way) and self._scheduler.can_schedule and not self._is_stopping

    def _take_messages(self, *, wait_s: float) -> bool:
        """Act on all messages; return whether there were any."""
        messages = self._mailbox.receive(wait_s=wait_s)
        for message in messages:
            match message:
                case AddRequest():
                    self._add(message)
                case EndSequences():
                    self._end(message)
                case Explain() | ForgetQuestion():
                    self._explanations.take(message)
                case Watch():
                    self._watch.renew(now_s=self._clock(), lease_s=message.lease_s, times=self._times())
                case LoadAdapter():
                    self._mailbox.send(self._adapters.load(message))
                    self._note_pause()
                case ForgetAdapter():
                    self._adapters.forget(message)
                case ResetPrefixCache():
                    self._scheduler.reset_prefix_cache()
                case Shutdown():
                    self._is_stopping = True
        return bool(messages)

    def _end(self, message: EndSequences) -> None:
        self._scheduler.finish_requests(message.sequence_ids, message.reason)
        self._watch.note_ends(message.sequence_ids)
        if self._trace is not None:
            self._trace.note_ends(message.sequence_ids)

    def _add(self, request: AddRequest) -> None:
        now_s = self._clock()
        self._watch.note_arrivals(request)
        if self._trace is not None:
            self._trace.note_arrivals(request)
        self._name(request)
        self._adapters.introduce(request)
        begun = request.begun or tuple(Begun(index, ()) for index in range(len(request.sequence_ids)))
        for sequence_id, before in zip(request.sequence_ids, begun, strict=True):
            seq = Sequence(
                sequence_id,
                request.prompt_token_ids,
                _params_of(request.params, before.index),
                request.terms,
                inputs=SequenceInputs(
                    pooling=request.pooling,
                    adapter=request.adapter,
                    prediction=request.prediction,
                    restore_at=request.restore_at,
                    generated=before.token_ids,
                    num_reported_positions=before.num_reported_positions,
                    encoder_inputs=request.encoder_inputs,
                    payloads=request.payloads,
                ),
            )
            try:
                self._scheduler.add_request(seq, now_s=now_s)
            except NeverFits as refusal:
                self._mailbox.send(Outputs([_rejected(sequence_id, str(refusal))]))

    def _name(self, request: AddRequest) -> None:
        """Remember the names of a request, for the log."""
        if self._names.is_full:
            live = (*self._scheduler.running_sequences(), *self._scheduler.waiting_sequences())
            self._names.keep(seq.sequence_id for seq in live)
        self._names.add(request)

    def _plan_and_launch(self) -> SchedulerOutput:
        planned_s = self._clock()
        plan = self._scheduler.schedule(now_s=planned_s)
        self._grammars.exchange()  # before the launch, which may compute the step
        launched_s = self._clock()
        self._schedule_s += launched_s - planned_s
        if plan.is_empty:
            self._trace_step(plan, planned_s)
        else:
            self._under_way.append(_StepUnderWay(plan, planned_s, launched_s, self._launch(plan)))
        return plan

    def _launch(self, plan: SchedulerOutput) -> BegunStep:
        try:
            return self._worker.launch(plan)
        except Exception as error:  # noqa: BLE001 - raised again, in its turn
            return _NotLaunched(error)

    def _num_results_due(self, plan: SchedulerOutput) -> int:
        """Count the steps whose results are needed before the next plan."""
        if not self._under_way:
            return 0
        if not self._under_way[-1].is_launched:
            return len(self._under_way)  # no step may follow it
        return 1 if plan.is_empty or not self._scheduler.can_schedule else 0

    def _take_result(self) -> None:
        """Wait for the oldest step, and update the scheduler by its result."""
        if not self._under_way:
            return
        step = self._under_way.popleft()
        try:
            result = step.launched.result()
        except StepOutOfMemory:
            self._take_back(step)
        except Exception:  # noqa: BLE001 - `_fail` logs it
            self._fail(step)
        else:
            self._num_failed_in_a_row = 0
            self._observe(step, result)
            if not result.failures:
                # Aborts that came during the step win over its results. They must not win over failures:
                # the KV that failed sequences wrote is forgotten while they are still known.
                self._take_messages(wait_s=0.0)
            self._update(step, lambda: self._scheduler.update_from_output(step.plan, result))
            if result.draft_token_ids:
                self._scheduler.update_draft_token_ids(result.draft_token_ids)

    def _observe(self, step: _StepUnderWay, result: ModelRunnerOutput) -> None:
        """Measure the step on the device, which begins it when the step before is done.

        Drafts for the next one are made behind it, in passes of their own. Launches encode first: a slice in
        the next one's counts as long as this step's own. Not measured are a step before the first such
        launch, and one during which the loop paused: when they were done is not known.
        """
        now_s = self._clock()
        began_s = max(step.launched_s, self._last_result_s)
        took_s = now_s - began_s
        waited_s = max(step.launched_s - self._last_result_s, 0.0) if isfinite(self._last_result_s) else 0.0
        self._last_result_s = now_s
        self._execute_s += took_s
        has_slice = bool(step.plan.encoder_slice_s)
        num_slices = int(has_slice and began_s == step.launched_s)
        num_slices += any(each.plan.encoder_slice_s for each in self._under_way)
        if step.launched_s < self._paused_s or num_slices > has_slice:
            return
        took_s -= sum(seconds for _, seconds in result.draft_passes)
        if result.encoded is not None:
            took_s -= num_slices * result.encoded.seconds
        self._scheduler.observe_step(step.plan, took_s, result.draft_passes, waited_s=waited_s)

    def _fail(self, step: _StepUnderWay) -> None:
        """Fail the sequences of a step. Called within an except clause, for the log."""
        self._num_failed_in_a_row += 1
        self._last_result_s = self._clock()
        scheduled = step.plan.scheduled
        names = self._names.of(share.sequence_id for share in scheduled)
        log.exception("step %d failed, with %d sequences in it, of %s", step.plan.step, len(scheduled), names)
        self._update(step, lambda: self._scheduler.fail_step(step.plan, "the model failed on this request"))

    def _take_back(self, step: _StepUnderWay) -> None:
        """Undo a step that ran out of memory, and the steps launched after it once they have ended."""
        log.warning(
            "too little memory for step %d, with %d tokens of %d sequences: it is made again in parts",
            *(step.plan.step, step.plan.num_scheduled_tokens, len(step.plan.scheduled)),
        )
        behind, self._under_way = self._under_way, deque()
        for later in behind:
            with suppress(Exception):
                later.launched.result()
        self._update(step, lambda: self._retry_in_parts(step.plan))
        for later in behind:
            self._trace_step(later.plan, later.planned_s)

    def _retry_in_parts(self, plan: SchedulerOutput) -> OutputsByClient:
        outputs = self._scheduler.roll_back(_TOO_LITTLE_MEMORY)
        ends = (output.finish_reason for of_client in outputs.values() for output in of_client)
        has_failed = FinishReason.FAILED in ends
        if has_failed and plan.num_scheduled_tokens <= SMALLEST_CHUNK_TOKENS:
            self._num_failed_in_a_row += 1  # the smallest step failed: a new process may have memory
        return outputs

    def _update(self, step: _StepUnderWay, update: Callable[[], OutputsByClient]) -> None:
        """Update the scheduler by the end of a step, and post the outputs."""
        started_s = self._clock()
        outputs = update()
        self._update_s += self._clock() - started_s
        self._post(outputs)
        self._trace_step(step.plan, step.planned_s)

    def _post(self, outputs: OutputsByClient) -> None:
        for of_client in outputs.values():  # one API process
            self._mailbox.send(Outputs(of_client))
        if self._num_failed_in_a_row >= _MAX_FAILED_STEPS_IN_A_ROW:
            raise WorkerBroken(f"{self._num_failed_in_a_row} steps failed in a row")

    def _post_prefix_changes(self) -> None:
        journal = self._scheduler.kv.index.main_cache.journal
        if journal is not None and (changes := journal.take()):
            self._mailbox.send(PrefixChanges(changes))

    def _trace_step(self, plan: SchedulerOutput, planned_s: float) -> None:
        if self._trace is None and not self._watch.is_on:
            return
        stats = self._scheduler.stats()
        waiting = {stats.wait_reason.value: stats.num_waiting} if stats.num_waiting else {}
        facts = StepFacts(planned_s, stats, waiting, self._times())
        for recorder in (self._watch, self._trace):
            if recorder is not None:
                recorder.record(plan, facts)

    def _times(self) -> StepTimes:
        exchange_s, wait_s = self._rank_times_s()
        return StepTimes(
            schedule_s=self._schedule_s,
            execute_s=self._execute_s,
            update_s=self._update_s,
            exchange_s=exchange_s,
            wait_s=wait_s,
        )

    def _wait_s(self) -> float:
        """Return the time to wait for messages before the next plan."""
        if self._is_idle:
            return self._idle_wait_s()
        if not self._waits_for_grammars:
            return 0.0
        self._note_pause()
        return _GRAMMAR_WAIT_S

    def _note_pause(self) -> None:
        """Note a pause of the loop, which counts neither as a step's time nor as its wait."""
        self._paused_s = self._clock()
        if not self._under_way:
            self._last_result_s = float("-inf")

    def _idle_wait_s(self) -> float:
        """Return the time until the next beat or view is due; flush the trace, since the loop is idle."""
        self._note_pause()
        if self._trace is not None:
            self._trace.flush()
        now_s = self._clock()
        beat_due_s = self._last_beat_s + _IDLE_WAIT_S
        return max(0.0, min(beat_due_s, self._watch.due_s) - now_s)

    def _beat(self) -> None:
        now_s = self._clock()
        is_idle = not self._scheduler.has_unfinished_requests
        if not is_idle and now_s - self._last_beat_s < _MIN_BEAT_INTERVAL_S:
            return
        self._last_beat_s = now_s
        stats = self._scheduler.stats()
        num_dropped = num_dropped_lines()
        self._mailbox.send(
            Beat(
                num_turns=self._num_turns,
                stats=stats,
                times=self._times(),
                num_dropped_log_lines=num_dropped,
                adapters=self._adapters.report(),
                groups=tuple(self._scheduler.group_uses()),
            )
        )


def _params_of(params: SamplingParams, index: int) -> SamplingParams:
    if index == 0:
        return params
    # The first sequence computes the log-probabilities of the prompt for all.
    return replace(params, seed=(params.seed + index) % 2**64, num_prompt_logprobs=None)


def _rejected(sequence_id: SequenceId, message: str) -> SequenceOutput:
    return SequenceOutput(sequence_id, (), FinishReason.REJECTED, message=message)
