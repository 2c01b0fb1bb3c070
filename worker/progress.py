"""Loading, told to whoever waits for it at least every half second.

Owns: the thread that loads, and the calls to `report` from the thread that asked, while it does.
Never: knows what is loaded.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from worker.config import LoadProgress

_INTERVAL_S = 0.25

Result = TypeVar("Result")


class LoadStage:
    """Where loading stands. Written by the thread that loads, read by the one that reports."""

    def __init__(self) -> None:
        self.name = "starting"
        self.done_bytes = 0
        self.total_bytes = 0


class _Outcome(Generic[Result]):
    def __init__(self) -> None:
        self.results: list[Result] = []
        self.error: BaseException | None = None


def run_reporting(work: Callable[[LoadStage], Result], report: Callable[[LoadProgress], None]) -> Result:
    """Run `work` and return its result or raise its error; call `report` meanwhile, in this thread.

    A single forward pass of a large model takes longer than the interval, so the work cannot report
    by itself; and what `report` does (a socket, say) belongs to the calling thread.
    """
    started_s = time.monotonic()
    stage = LoadStage()
    outcome: _Outcome[Result] = _Outcome()

    def run() -> None:
        try:
            outcome.results.append(work(stage))
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that waits
            outcome.error = error

    def report_now() -> None:
        elapsed_s = time.monotonic() - started_s
        report(
            LoadProgress(
                stage=stage.name,
                done_bytes=stage.done_bytes,
                total_bytes=stage.total_bytes,
                elapsed_s=elapsed_s,
            )
        )

    # A daemon: a process that is told to stop while it loads shall not wait for the rest of the model.
    thread = threading.Thread(target=run, name="tokenyard-load", daemon=True)
    thread.start()
    while thread.is_alive():
        report_now()
        thread.join(_INTERVAL_S)
    if outcome.error is not None:
        raise outcome.error
    report_now()
    return outcome.results[0]
