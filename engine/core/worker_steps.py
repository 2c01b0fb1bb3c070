"""Steps of a worker: those of ranks that wait for tokens which another one samples, and checked ones.

Owns: the steps that wait for their tokens, oldest first; and the check that each token is in the vocabulary.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from engine.core.interfaces import BegunStep, Executor, SampledStep, SamplingExecutor
from scheduler.messages import ModelRunnerOutput, SchedulerOutput, SequenceId

if TYPE_CHECKING:
    from worker.ranks.stage import Stage


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
        if self._output is None:
            self._output = self._step.result()
            self._report(self._step.sampled)
        return self._output


class CheckedWorker:
    """An executor that checks the tokens that `worker` samples.

    A token outside the vocabulary would fail the next step of the whole batch at the embedding, on a GPU for
    good; so its sequence fails alone, at once.
    """

    def __init__(self, worker: Executor, *, vocab_size: int) -> None:
        self._worker = worker
        self._vocab_size = vocab_size

    def launch(self, plan: SchedulerOutput) -> BegunStep:
        return _CheckedStep(self._worker.launch(plan), self._vocab_size)


class _CheckedStep:
    def __init__(self, launched: BegunStep, vocab_size: int) -> None:
        self._launched = launched
        self._vocab_size = vocab_size

    def result(self) -> ModelRunnerOutput:
        output = self._launched.result()
        impossible = self._impossible(output.token_ids)
        if not impossible:
            return output
        kept = {key: value for key, value in output.token_ids.items() if key not in impossible}
        return replace(output, token_ids=kept, failures={**output.failures, **impossible})

    def _impossible(self, sampled: Mapping[SequenceId, tuple[int, ...]]) -> dict[SequenceId, str]:
        """Find sequences with impossible tokens, each with its error message."""
        all_ids = list(chain.from_iterable(sampled.values()))
        if not all_ids or (min(all_ids) >= 0 and max(all_ids) < self._vocab_size):
            return {}
        return {
            sequence_id: f"the model drew a token that is none of its {self._vocab_size}"
            for sequence_id, token_ids in sampled.items()
            if min(token_ids, default=0) < 0 or max(token_ids, default=0) >= self._vocab_size
        }
