"""The one loop that moves every sequence.

Owns: the order of things: arrivals, plan, execution, results, news. `EngineLoop.turn` can be read aloud.
Never: decides who runs (scheduler) or touches a tensor (worker).
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from engine.messages import (
    AddRequest,
    Beat,
    EndSequences,
    Explain,
    Explanation,
    Outputs,
    ResetPrefixCache,
    Shutdown,
    StepTimes,
    ToClient,
    ToEngine,
)
from engine.step_trace import StepTrace
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

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0
_MIN_BEAT_INTERVAL_S = 0.05
# A worker that fails again and again is broken (a CUDA context after a fault stays so): a new process
# is the only cure.
_MAX_FAILED_STEPS_IN_A_ROW = 3


class Executor(Protocol):
    """What the loop asks of a worker."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput: ...


class Mailbox(Protocol):
    """What the loop asks of a transport."""

    def receive(self, *, wait_s: float) -> list[ToEngine]: ...

    def send(self, message: ToClient) -> None: ...


class WorkerBroken(Exception):
    """The worker failed too often in a row; the process must be replaced."""


class EngineLoop:
    """Turns until a Shutdown arrives. Raises WorkerBroken; the process then ends and says so."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Executor,
        mailbox: Mailbox,
        clock: Callable[[], float],
        trace: StepTrace | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._mailbox = mailbox
        self._clock = clock
        self._trace = trace
        self._is_stopping = False
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
        """Move every scheduled sequence one step on; wait for work if there is none."""
        self._take_messages(wait_s=0.0 if self._scheduler.has_unfinished_requests else self._idle_wait_s())
        planned_s = self._clock()
        plan = self._plan(planned_s)
        if plan.is_empty:
            self._post(self._scheduler.take_outputs())
        else:
            result = self._execute(plan)
            if result is not None and not result.failures:
                # Aborts that came while the worker computed win over its results; not over its failures,
                # since what those wrote must be forgotten while it is known whose it was.
                self._take_messages(wait_s=0.0)
            self._post(self._update(plan, result))
        self._note(plan, planned_s)
        self._num_turns += 1
        self._beat()

    def _take_messages(self, *, wait_s: float) -> None:
        for message in self._mailbox.receive(wait_s=wait_s):
            match message:
                case AddRequest():
                    self._add(message)
                case EndSequences():
                    self._scheduler.finish_requests(message.sequence_ids, message.reason)
                    if self._trace is not None:
                        self._trace.note_ends(message.sequence_ids)
                case Explain():
                    reports = self._scheduler.report(now_s=self._clock())
                    self._mailbox.send(Explanation(question=message.question, reports=reports))
                case ResetPrefixCache():
                    self._scheduler.reset_prefix_cache()
                case Shutdown():
                    self._is_stopping = True

    def _add(self, request: AddRequest) -> None:
        now_s = self._clock()
        if self._trace is not None:
            self._trace.note_arrivals(request.sequence_ids)
        for index, sequence_id in enumerate(request.sequence_ids):
            seq = Sequence(
                sequence_id,
                request.prompt_token_ids,
                _params_of(request.params, index),
                request.terms,
                inputs=SequenceInputs(pooling=request.pooling),
                client_index=request.client_index,
            )
            try:
                self._scheduler.add_request(seq, now_s=now_s)
            except NeverFits as refusal:
                self._mailbox.send(Outputs([_rejected(sequence_id, str(refusal))]))

    def _plan(self, started_s: float) -> SchedulerOutput:
        plan = self._scheduler.schedule(now_s=started_s)
        self._schedule_s += self._clock() - started_s
        return plan

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """None if the whole step failed."""
        started_s = self._clock()
        try:
            result = self._worker.execute(plan)
        except Exception:
            self._num_failed_in_a_row += 1
            log.exception("step %d failed, with %d sequences in it", plan.step, len(plan.scheduled))
            return None
        self._num_failed_in_a_row = 0
        took_s = self._clock() - started_s
        self._execute_s += took_s
        self._scheduler.observe_step(plan, took_s)
        return result

    def _update(self, plan: SchedulerOutput, result: ModelRunnerOutput | None) -> OutputsByClient:
        started_s = self._clock()
        if result is None:
            outputs = self._scheduler.fail_step(plan, "the model failed on this request")
        else:
            outputs = self._scheduler.update_from_output(plan, result)
        self._update_s += self._clock() - started_s
        return outputs

    def _post(self, outputs: OutputsByClient) -> None:
        for news in outputs.values():  # one API process so far: all news goes the same way
            self._mailbox.send(Outputs(news))
        if self._num_failed_in_a_row >= _MAX_FAILED_STEPS_IN_A_ROW:
            raise WorkerBroken(f"{self._num_failed_in_a_row} steps failed in a row")

    def _note(self, plan: SchedulerOutput, planned_s: float) -> None:
        if self._trace is not None:
            stats = self._scheduler.stats()
            waiting = {stats.wait_reason.value: stats.num_waiting} if stats.num_waiting else {}
            self._trace.record(plan, now_s=planned_s, stats=stats, waiting=waiting, times=self._times())

    def _times(self) -> StepTimes:
        return StepTimes(schedule_s=self._schedule_s, execute_s=self._execute_s, update_s=self._update_s)

    def _idle_wait_s(self) -> float:
        """When idle: until the next beat is due."""
        if self._trace is not None:
            self._trace.flush()
        since_s = self._clock() - self._last_beat_s
        return max(0.0, _IDLE_WAIT_S - since_s)

    def _beat(self) -> None:
        now_s = self._clock()
        is_idle = not self._scheduler.has_unfinished_requests
        if not is_idle and now_s - self._last_beat_s < _MIN_BEAT_INTERVAL_S:
            return
        self._last_beat_s = now_s
        stats = self._scheduler.stats()
        self._mailbox.send(Beat(num_turns=self._num_turns, stats=stats, times=self._times()))


def _params_of(params: SamplingParams, index: int) -> SamplingParams:
    if index == 0:
        return params
    # One of them computes the log-probabilities of the prompt for all.
    return replace(params, seed=(params.seed + index) % 2**64, num_prompt_logprobs=None)


def _rejected(sequence_id: SequenceId, message: str) -> SequenceOutput:
    return SequenceOutput(sequence_id, (), FinishReason.REJECTED, message=message)
