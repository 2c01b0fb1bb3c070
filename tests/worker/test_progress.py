"""A caller that waits for a load hears of it, in its own thread."""

import threading
import time
from itertools import pairwise, permutations

import pytest

from worker.progress import LoadPhase, LoadStage, run_reporting
from worker.worker_config import LoadProgress


def test_work_that_never_reports_is_reported_at_least_every_half_second() -> None:
    times: list[float] = []
    run_reporting(lambda stage: time.sleep(1.2), lambda progress: times.append(time.monotonic()))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert len(times) >= 3
    assert max(gaps) < 0.5


def test_reports_carry_the_stage_and_come_from_the_calling_thread() -> None:
    seen: list[tuple[LoadProgress, int]] = []

    def work(stage: LoadStage) -> int:
        stage.enter(LoadPhase.READING, total_bytes=10)
        stage.count(2)
        stage.count(3)
        return 42

    assert run_reporting(work, lambda progress: seen.append((progress, threading.get_ident()))) == 42
    last, thread = seen[-1]
    assert (last.stage, last.done_bytes, last.total_bytes) == ("reading weights", 5, 10)
    assert thread == threading.get_ident()


def test_the_fraction_grows_from_stage_to_stage_and_the_last_one_never_says_all() -> None:
    load = LoadStage()
    fractions = [load.progress(0.0).fraction]
    for stage in LoadPhase:
        load.enter(stage, total_bytes=4)
        fractions.append(load.progress(0.0).fraction)
        load.count(4)
        fractions.append(load.progress(0.0).fraction)
    assert fractions[0] == 0.0
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1.0)


def test_the_fraction_never_falls_in_whatever_order_the_stages_come() -> None:
    """On CPUs kernels are compiled and memory is measured before weights are copied."""
    for order in permutations((LoadPhase.COPYING, LoadPhase.MEASURING, LoadPhase.COMPILING)):
        load = LoadStage()
        fractions = []
        for stage in (LoadPhase.READING, LoadPhase.BUILDING, *order, LoadPhase.WARMING_UP):
            load.enter(stage, total_bytes=4)
            fractions.append(load.progress(0.0).fraction)
            load.count(2)
            fractions.append(load.progress(0.0).fraction)
        assert fractions == sorted(fractions)
        assert fractions[-1] < 1.0


def test_bytes_are_those_of_the_stage_and_all_of_them_read_is_not_all_done() -> None:
    load = LoadStage()
    load.enter(LoadPhase.READING, total_bytes=100)
    load.count(100)
    read = load.progress(0.0)
    assert (read.done_bytes, read.total_bytes) == (100, 100)
    assert read.fraction < 0.7
    load.enter(LoadPhase.BUILDING)
    built = load.progress(0.0)
    assert (built.done_bytes, built.total_bytes) == (0, 0)
    assert built.fraction == pytest.approx(read.fraction)


def test_an_error_of_the_work_reaches_the_caller() -> None:
    def work(stage: LoadStage) -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        run_reporting(work, lambda progress: None)
