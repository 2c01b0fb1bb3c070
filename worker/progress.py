"""Progress of a load, reported at least every half second.

Owns: the thread that loads, the calls to `report` from the calling thread meanwhile, and the share of each
phase in the whole.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from enum import Enum
from itertools import accumulate
from typing import TypeVar

from worker.worker_config import LoadProgress

_INTERVAL_S = 0.25

Result = TypeVar("Result")


class LoadPhase(Enum):
    """Phases of a load, in order."""

    STARTING = "starting"
    READING = "reading weights"
    BUILDING = "building the model"
    COPYING = "copying weights"
    MEASURING = "measuring memory"
    COMPILING = "compiling CPU kernels, once"
    WARMING_UP = "warming up"
    CAPTURING = "capturing CUDA graphs"


# Shares of the time to load a checkpoint that is not in the page cache yet: a rough bar for a person.
_SHARES = {
    LoadPhase.STARTING: 0.05,
    LoadPhase.READING: 0.55,
    LoadPhase.BUILDING: 0.1,
    LoadPhase.COPYING: 0.1,
    LoadPhase.MEASURING: 0.05,
    LoadPhase.COMPILING: 0.0,
    LoadPhase.WARMING_UP: 0.1,
    LoadPhase.CAPTURING: 0.05,
}
_SHARES_BEFORE = dict(zip(_SHARES, accumulate(_SHARES.values(), initial=0.0), strict=False))


class LoadStage:
    """Present phase of a load. Written by the thread that loads, read by the one that reports."""

    def __init__(self) -> None:
        # One tuple, replaced whole: the reader never sees one phase with the bytes of another.
        self._now = (LoadPhase.STARTING, 0, 0, 0.0)

    def enter(self, phase: LoadPhase, *, total_bytes: int = 0) -> None:
        """Go on to a phase that counts `total_bytes`, or none.

        Weights are copied before or after memory is measured, and kernels compiled where they are needed
        first: the finished share never falls.
        """
        self._now = (phase, 0, total_bytes, max(_SHARES_BEFORE[phase], self.progress(0.0).fraction))

    def count(self, num_bytes: int) -> None:
        phase, done_bytes, total_bytes, share_before = self._now
        self._now = (phase, done_bytes + num_bytes, total_bytes, share_before)

    def progress(self, elapsed_s: float) -> LoadProgress:
        phase, done_bytes, total_bytes, share_before = self._now
        return LoadProgress(
            stage=phase.value,
            done_bytes=done_bytes,
            total_bytes=total_bytes,
            elapsed_s=elapsed_s,
            share_before=share_before,
            share=min(_SHARES[phase], 1.0 - share_before),
        )


def run_reporting(work: Callable[[LoadStage], Result], report: Callable[[LoadProgress], None]) -> Result:
    """Run `work` and return its result or raise its error; call `report` meanwhile, in this thread.

    A single forward pass of a large model takes longer than the interval, so the work cannot report
    by itself; and what `report` does (a socket, say) belongs to the calling thread.
    """
    started_s = time.monotonic()
    stage = LoadStage()
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work(stage))
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that waits
            outcome.set_exception(error)

    def report_now() -> None:
        report(stage.progress(time.monotonic() - started_s))

    # A daemon: a process that is stopped while it loads does not wait for the rest of the model.
    threading.Thread(target=run, name="tokenyard-load", daemon=True).start()
    while not outcome.done():
        report_now()
        wait([outcome], timeout=_INTERVAL_S)
    result = outcome.result()
    report_now()
    return result
