"""Trials of launches that begin early or warm the cache: right bit for bit, and faster, or not made."""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from triton import TritonError

from worker.devices.dependent_launch import dependent_launches, warm_launches
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


class Way(NamedTuple):
    """A way to launch the kernels of a step."""

    name: str
    open: Callable[[], AbstractContextManager[None]]


WHOLE = Way("as a whole", nullcontext)
EARLY = Way("early", dependent_launches)
WARM = Way("early, with weights brought into the cache", warm_launches)


def count_gains(steps: Iterable[StepOnTrial], device: Device, usual: Way, candidate: Way) -> int:
    """Count the steps, from the first on, that are faster in graphs of a candidate; waits for the device.

    0 where one of those that were tried is not right.
    """
    num_faster = 0
    try:
        for step in steps:
            is_faster = _gains(step, device, usual, candidate)
            if is_faster is None:
                return 0
            if not is_faster:
                break
            num_faster += 1
    except (TritonError, RuntimeError) as error:  # older devices have no such launches
        log.info("kernels are not launched %s: %s", candidate.name, first_line(error))
        return 0
    return num_faster


def _gains(step: StepOnTrial, device: Device, usual: Way, candidate: Way) -> bool | None:
    """Tell whether the candidate is faster; None where it computes otherwise."""

    def launch_by(way: Way) -> None:
        with way.open():
            step.launch()

    step.fill(0)
    by_usual, by_candidate = partial(launch_by, usual), partial(launch_by, candidate)
    find_fault = partial(_find_fault, step, by_usual, by_candidate, device)
    trial = TimedTrial([by_usual], [by_candidate], _LEAST_GAIN, find_fault)
    outcome, rows = trial.run(device), len(step.result)
    if outcome is None:
        return False
    if outcome.fault:
        words = (candidate.name, outcome.fault, rows)
        log.warning("kernels that are launched %s %s for %d rows: they are not", *words)
        return None
    kept = "taken" if outcome.is_faster else "left"
    log.info("a step of %d rows with kernels launched %s: %s: %s", rows, candidate.name, outcome.times, kept)
    return outcome.is_faster


def _find_fault(
    step: StepOnTrial, by_usual: Callable[[], None], by_candidate: Callable[[], None], device: Device
) -> str:
    """Tell whether a candidate differs. The device compares in the order of its work, and is asked last.

    So the next step is launched behind each, and of many results a few are kept.
    """
    expected = []
    one_by_one = device.capture(by_usual).replay
    for content in range(_NUM_CONTENTS):
        step.fill(content)
        one_by_one()
        expected.append(step.result.clone())
    replay = device.capture(by_candidate).replay
    differs = torch.zeros((), dtype=torch.bool, device=step.result.device)
    for turn in range(_NUM_REPLAYS):
        step.fill(turn % _NUM_CONTENTS)
        replay()
        differs |= (step.result != expected[turn % _NUM_CONTENTS]).any()
    return "compute otherwise" if differs else ""
