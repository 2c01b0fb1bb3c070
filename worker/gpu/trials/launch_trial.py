"""Trial of launches that begin early: right bit for bit, and faster, or not made."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from triton import TritonError

from worker.devices.dependent_launch import dependent_launches
from worker.devices.device import Device
from worker.devices.trial import TimedTrial, first_line

log = logging.getLogger(__name__)

_LEAST_GAIN = 1.01
_NUM_CONTENTS = 3
"""Steps of different content, one after the other: a value that is read too early belongs to another step."""
_NUM_REPLAYS = 30


class StepOnTrial(NamedTuple):
    """One step, which can be launched again and again."""

    fill: Callable[[int], None]
    """Give the step one of several contents."""
    launch: Callable[[], None]
    result: Tensor
    """Memory in which each launch leaves its result."""


def count_gains_by_early_launches(steps: Iterable[StepOnTrial], device: Device) -> int:
    """Count the steps, from the first on, that are faster in graphs of such launches; waits for the device.

    0 where one of those that were tried is not right.
    """
    num_faster = 0
    try:
        for step in steps:
            is_faster = _gains(step, device)
            if is_faster is None:
                return 0
            if not is_faster:
                break
            num_faster += 1
    except (TritonError, RuntimeError) as error:  # older devices have no such launches
        log.info("kernels are not launched early: %s", first_line(error))
        return 0
    return num_faster


def _gains(step: StepOnTrial, device: Device) -> bool | None:
    """Tell whether early launches are faster; None where they compute otherwise."""

    def launch_early() -> None:
        with dependent_launches():
            step.launch()

    step.fill(0)
    trial = TimedTrial(
        [step.launch], [launch_early], _LEAST_GAIN, partial(_find_fault, step, launch_early, device)
    )
    outcome, rows = trial.run(device), len(step.result)
    if outcome is None:
        return False
    if outcome.fault:
        log.warning("kernels that are launched early %s for %d rows: they are not", outcome.fault, rows)
        return None
    kept = "taken" if outcome.is_faster else "left"
    log.info("a step of %d rows with kernels launched early: %s: %s", rows, outcome.times, kept)
    return outcome.is_faster


def _find_fault(step: StepOnTrial, launch_early: Callable[[], None], device: Device) -> str:
    """Tell whether early launches differ. The device compares in the order of its work, and is asked last.

    So the next step is launched behind each, and of many results a few are kept.
    """
    expected = []
    one_by_one = device.capture(step.launch).replay
    for content in range(_NUM_CONTENTS):
        step.fill(content)
        one_by_one()
        expected.append(step.result.clone())
    replay = device.capture(launch_early).replay
    differs = torch.zeros((), dtype=torch.bool, device=step.result.device)
    for turn in range(_NUM_REPLAYS):
        step.fill(turn % _NUM_CONTENTS)
        replay()
        differs |= (step.result != expected[turn % _NUM_CONTENTS]).any()
    return "compute otherwise" if differs else ""
