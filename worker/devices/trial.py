"""Trials at load: a way to compute against the usual one, the error of a result, the text of a failure."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worker.devices.device import Device

ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Relative error of one rounding more or less."""


class Outcome(NamedTuple):
    """The result of a trial."""

    fault: str
    """Difference between the results; empty where the candidate is right."""
    is_faster: bool = False
    times: str = ""
    """The candidate's time and the usual one."""


class TimedTrial(NamedTuple):
    """A candidate for a computation, to be taken where it is right, and faster than the usual way.

    Each is one call or more, one after the other over weights that no cache holds together.
    """

    usual: Sequence[Callable[[], object]]
    candidate: Sequence[Callable[[], object]]
    least_gain: float
    """Factor by which the candidate must be faster."""
    find_fault: Callable[[], str] = str
    """Compare the results; the text is empty where they are equal."""

    def run(self, device: Device) -> Outcome | None:
        """Time both as graphs; None where time tells nothing. Raises as `Device.capture` does."""
        usual_s = _seconds_of(self.usual, device)
        if usual_s is None:
            return None
        fault = self.find_fault()
        candidate_s = None if fault else _seconds_of(self.candidate, device)
        if candidate_s is None:
            return Outcome(fault) if fault else None
        times = f"{candidate_s * 1e6:.1f} us for {usual_s * 1e6:.1f} us"
        return Outcome("", candidate_s * self.least_gain < usual_s, times)


def _seconds_of(calls: Sequence[Callable[[], object]], device: Device) -> float | None:
    def work() -> None:
        for call in calls:
            call()

    seconds = device.seconds_of(work)
    return None if seconds is None else seconds / len(calls)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the size of the difference over the size of `expected`; infinite where a number is NaN."""
    size = expected.norm().clamp_min(torch.finfo(expected.dtype).tiny)
    return float(((found - expected).norm() / size).nan_to_num(torch.inf))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
