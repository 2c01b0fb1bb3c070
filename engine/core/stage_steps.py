"""The steps of one rank, and the tokens that one rank samples for all others.

Owns: the steps that wait for their tokens, oldest first.
Never: samples.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from engine.core.loop import BegunStep, Executor
from scheduler.messages import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from worker.ranks.stage import Stage


class SampledStep(BegunStep, Protocol):
    """A step on the rank that samples."""

    @property
    def sampled(self) -> list[int]:
        """Tokens that it sampled, once there is a result."""


class SamplingExecutor(Protocol):
    """See Executor: the worker of the rank that samples."""

    def launch(self, plan: SchedulerOutput) -> SampledStep: ...


class StageSteps:
    """Steps of a rank that does not sample. All ranks of a stage carry out the same."""

    def __init__(self, worker: Executor, stage: "Stage") -> None:
        self._worker = worker
        self._stage = stage
        self._pending: deque[BegunStep] = deque()

    def launch(self, plan: SchedulerOutput) -> None:
        """Compute a step, and send hidden states on."""
        self._pending.append(self._worker.launch(plan))

    def learn(self, token_ids: list[int]) -> None:
        """Take in the tokens of the oldest step, before a later one reads them."""
        if token_ids:
            self._stage.sampled.append(token_ids)
        self._pending.popleft().result()


class ReportedSteps:
    """Steps of the rank of the last stage that samples. Results are reported in the order of steps."""

    def __init__(
        self,
        worker: SamplingExecutor,
        report: Callable[[ModelRunnerOutput, list[int]], None],
        *,
        runs_ahead: bool,
    ) -> None:
        """Pass each result, and the tokens for all other ranks, to `report`."""
        self._worker, self._report = worker, report
        self._most_in_flight = 1 if runs_ahead else 0
        self._pending: deque[SampledStep] = deque()

    def launch(self, plan: SchedulerOutput) -> None:
        self._pending.append(self._worker.launch(plan))

    def report(self, has_plan: Callable[[], bool]) -> None:
        """Report all steps; but the last waits where the device works ahead and there is a plan to launch."""
        while self._pending and (len(self._pending) > self._most_in_flight or not has_plan()):
            step = self._pending.popleft()
            self._report(step.result(), step.sampled)


class LedStep:
    """A step that rank 0 has begun, and that ranks which do not sample wait to learn of."""

    def __init__(self, step: SampledStep, report: Callable[[list[int]], None]) -> None:
        """Pass the tokens to `report`, once they are known. Results are collected in the order of steps."""
        self._step, self._report = step, report
        self._output: ModelRunnerOutput | None = None

    def result(self) -> ModelRunnerOutput:
        """See Launched."""
        if self._output is None:
            self._output = self._step.result()
            self._report(self._step.sampled)
        return self._output
