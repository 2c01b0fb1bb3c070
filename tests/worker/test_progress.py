"""Whoever waits for a load hears of it, in its own thread."""

import threading
import time
from itertools import pairwise

import pytest

from worker.config import LoadProgress
from worker.progress import LoadStage, run_reporting


def test_work_that_never_reports_is_reported_at_least_every_half_second() -> None:
    times: list[float] = []
    run_reporting(lambda stage: time.sleep(1.2), lambda progress: times.append(time.monotonic()))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert len(times) >= 3
    assert max(gaps) < 0.5


def test_reports_carry_the_stage_and_come_from_the_calling_thread() -> None:
    seen: list[tuple[LoadProgress, int]] = []

    def work(stage: LoadStage) -> int:
        stage.name, stage.total_bytes, stage.done_bytes = "reading weights", 10, 5
        return 42

    assert run_reporting(work, lambda progress: seen.append((progress, threading.get_ident()))) == 42
    last, thread = seen[-1]
    assert (last.stage, last.fraction) == ("reading weights", 0.5)
    assert thread == threading.get_ident()


def test_an_error_of_the_work_reaches_the_caller() -> None:
    def work(stage: LoadStage) -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        run_reporting(work, lambda progress: None)
