"""The steps of one rank, and the tokens that one rank samples for all others.

Owns: the steps that wait for their tokens, oldest first.
Never: samples.
"""

from collections import deque
from typing import TYPE_CHECKING

from engine.core.loop import Executor, Launched
from scheduler.messages import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from worker.ranks.stage import Stage


class StageSteps:
    """Steps of a rank that does not sample. All ranks of a stage carry out the same."""

    def __init__(self, worker: Executor, stage: "Stage") -> None:
        self._worker = worker
        self._stage = stage
        self._pending: deque[Launched] = deque()

    def launch(self, plan: SchedulerOutput) -> None:
        """Compute a step, and send hidden states on."""
        self._pending.append(self._worker.launch(plan))

    def learn(self, token_ids: list[int]) -> None:
        """Take in the tokens of the oldest step, before a later one reads them."""
        if token_ids:
            self._stage.sampled.append(token_ids)
        self._pending.popleft().result()


def compute_last(
    worker: Executor, stage: "Stage", plan: SchedulerOutput
) -> tuple[ModelRunnerOutput, list[int]]:
    """Compute a step on the rank that samples; returns its result, and the tokens for all others."""
    output = worker.launch(plan).result()
    return output, take_sampled(stage)


def take_sampled(stage: "Stage") -> list[int]:
    """Take the tokens of the step that this rank computed last; none if it sampled none."""
    return stage.sampled.popleft() if stage.sampled else []
