"""Tokens of steps in flight, on their way to ranks that do not sample."""

from typing import Any

import pytest

from engine.core.worker_steps import LedStep, ReportedSteps, StageSteps
from scheduler.messages import ModelRunnerOutput, SchedulerOutput
from worker.ranks.stage import Stage

NOTHING = ModelRunnerOutput(token_ids={}, logprobs={}, failures={})
PLAN = SchedulerOutput(0, (), (), {}, (), 0)


class Step:
    """A step that takes its tokens from its stage, as one of a rank that does not sample does."""

    def __init__(self, sampled: list[int], stage: Stage) -> None:
        self.sampled, self._stage = sampled, stage
        self.num_results = 0
        self.learnt: list[int] = []

    def result(self) -> ModelRunnerOutput:
        self.num_results += 1
        if self.sampled:
            self.learnt = self._stage.sampled.popleft()
        return NOTHING


class Worker:
    def __init__(self, steps: list[Any]) -> None:
        self._steps = iter(steps)

    def launch(self, plan: SchedulerOutput) -> Any:
        del plan
        return next(self._steps)


class LeadingStep:
    def __init__(self, sampled: list[int]) -> None:
        self.sampled: list[int] = []
        self._later = sampled
        self.num_results = 0

    def result(self) -> ModelRunnerOutput:
        self.num_results += 1
        self.sampled = self._later
        return NOTHING


def test_tokens_of_steps_in_flight_are_told_once_each_in_their_order() -> None:
    """The second step samples none; results are asked for twice."""
    reported: list[list[int]] = []
    steps = [LeadingStep([3, 4]), LeadingStep([]), LeadingStep([5])]
    led = [LedStep(step, reported.append) for step in steps]
    assert reported == [], "they are not known before there is a result"
    for each in led:
        each.result()
        each.result()
    assert reported == [[3, 4], [], [5]]
    assert [step.num_results for step in steps] == [1, 1, 1]


@pytest.mark.parametrize(("runs_ahead", "has_plan", "num_reported"), [(0, 1, 2), (1, 1, 1), (1, 0, 2)])
def test_a_result_waits_for_the_launch_of_a_plan_that_is_there_where_the_device_works_ahead(
    runs_ahead: int, has_plan: int, num_reported: int
) -> None:
    reported: list[list[int]] = []
    worker = Worker([LeadingStep([3, 4]), LeadingStep([5])])
    steps = ReportedSteps(
        worker, lambda _output, token_ids: reported.append(token_ids), runs_ahead=bool(runs_ahead)
    )
    steps.launch(PLAN)
    steps.launch(PLAN)
    steps.report(lambda: bool(has_plan))
    assert reported == [[3, 4], [5]][:num_reported]
    steps.report(lambda: False)
    assert reported == [[3, 4], [5]]


def test_a_rank_learns_of_each_step_what_it_sampled() -> None:
    stage = Stage(0, 1)
    steps = [Step([3, 4], stage), Step([], stage), Step([5], stage)]
    following = StageSteps(Worker(steps), stage)
    following.launch(PLAN)
    following.launch(PLAN)
    following.learn([3, 4])
    following.launch(PLAN)
    following.learn([])
    following.learn([5])
    assert [step.learnt for step in steps] == [[3, 4], [], [5]]
    assert [step.num_results for step in steps] == [1, 1, 1]
