"""Trial of launches that begin early: right bit for bit, and faster, or not made.

Owns: the comparison of steps launched both ways, and their times.
Never: launches a kernel of its own, or knows a step (gpu/runner.py).
"""

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from triton import TritonError

from worker.devices.dependent_launch import dependent_launches
from worker.devices.device import Device
from worker.devices.trial import first_line

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
    step.fill(0)
    seconds_whole = device.seconds_of(step.launch)
    if seconds_whole is None:
        return False  # nothing is gained where time tells nothing
    rows = len(step.result)
    if _computes_otherwise(step, device):
        log.warning("kernels that are launched early compute otherwise for %d rows: they are not", rows)
        return None
    with dependent_launches():
        seconds = device.seconds_of(step.launch)
    is_faster = seconds is not None and seconds * _LEAST_GAIN < seconds_whole
    log.info(
        "a step of %d rows with kernels launched early: %.1f us for %.1f us: %s",
        rows,
        (seconds or 0.0) * 1e6,
        seconds_whole * 1e6,
        "taken" if is_faster else "left",
    )
    return is_faster


def _computes_otherwise(step: StepOnTrial, device: Device) -> bool:
    """Whether early launches differ. The device compares in the order of its work, and is asked at the end.

    So the next step is launched behind each, and of many results a few are kept.
    """
    expected = []
    one_by_one = device.capture(step.launch).replay
    for content in range(_NUM_CONTENTS):
        step.fill(content)
        one_by_one()
        expected.append(step.result.clone())
    with dependent_launches():
        replay = device.capture(step.launch).replay
    differs = torch.zeros((), dtype=torch.bool, device=step.result.device)
    for turn in range(_NUM_REPLAYS):
        step.fill(turn % _NUM_CONTENTS)
        replay()
        differs |= (step.result != expected[turn % _NUM_CONTENTS]).any()
    return bool(differs)
