"""The trace of steps: what a line says, when it is written, and that it never stops the engine."""

import errno
import io
import logging
from pathlib import Path

import orjson
import pytest

from engine.core.step_trace import StepFacts, StepTrace
from engine.process_messages import AddRequest, StepTimes
from scheduler.config import SchedulerConfig
from scheduler.counters import SchedulerStats
from scheduler.messages import SamplingParams, SchedulerOutput, SequenceId, ServiceTerms
from scheduler.scheduler import Scheduler
from tests.bench.traces import arrival
from tests.fakes import make_sequence
from tests.world import World, small_config

EMPTY = SchedulerOutput(
    step=1, released=(), new_sequences=(), new_blocks={}, scheduled=(), num_scheduled_tokens=0
)


def lines(path: Path) -> list[dict]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def stats() -> SchedulerStats:
    config = SchedulerConfig(
        num_blocks=4, block_size=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16
    )
    return Scheduler(config).stats()


def plan_of(num_prompt_tokens: int) -> SchedulerOutput:
    world = World(small_config())
    world.add(make_sequence(7, list(range(num_prompt_tokens))))
    return world.step()


def record(trace: StepTrace, plan: SchedulerOutput, *, now_s: float = 0.0, execute_s: float = 0.0) -> None:
    times = StepTimes(execute_s=execute_s)
    trace.record(plan, StepFacts(now_s=now_s, stats=stats(), waiting={"blocks": 2}, times=times))


def test_a_line_tells_the_shares_the_counts_and_the_reasons_for_waiting(tmp_path: Path) -> None:
    world = World(small_config())
    world.add(make_sequence(1, list(range(6))), make_sequence(2, list(range(20, 25))))
    trace = StepTrace(tmp_path / "t")
    request = AddRequest(
        sequence_ids=(SequenceId(1), SequenceId(2)),
        prompt_token_ids=(0,),
        params=SamplingParams(max_tokens=1),
        terms=ServiceTerms(),
        request_id="r",
    )
    trace.note_arrivals(request)
    for step in (1, 2):
        plan = world.step()
        times = StepTimes(schedule_s=0.1 * step, execute_s=step, update_s=0.2 * step)
        trace.record(
            plan,
            StepFacts(now_s=10.0 + step, stats=world.scheduler.stats(), waiting={"slots": 1}, times=times),
        )
    trace.note_ends([SequenceId(2)])
    record(trace, world.step())
    trace.close()
    first, second, third = lines(tmp_path / "t")
    assert first["chunks"] == [[1, 0, 6], [2, 0, 5]]
    assert first["decodes"] == []
    assert first["arrived"] == first["new"] == [1, 2]
    assert first["requests"] == [[1, "r", ""]]
    assert (first["num_tokens"], first["num_decodes"], first["num_context_tokens"]) == (11, 0, 11)
    assert second["decodes"] == [[1, 6], [2, 5]]
    assert (second["step"], second["num_context_tokens"], second["num_running"]) == (2, 13, 2)
    assert second["arrived"] == second["new"] == []
    assert second["waiting"] == {"slots": 1}
    assert (second["num_used_blocks"], second["num_blocks"]) == (4, 8)
    assert third["ended"] == [2]


def test_a_line_holds_the_times_of_its_own_step(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "t")
    for execute_s in (1.5, 4.0):
        record(trace, plan_of(3), execute_s=execute_s)
    trace.close()
    assert [line["execute_s"] for line in lines(tmp_path / "t")] == [1.5, 2.5]


def test_a_preemption_tells_cause_and_beneficiary(tmp_path: Path) -> None:
    world = World(small_config(num_blocks=4))
    world.add(make_sequence(1, [1] * 7, max_tokens=8), make_sequence(2, [2] * 7, max_tokens=8))
    trace = StepTrace(tmp_path / "t")
    while world.scheduler.has_unfinished_requests:
        record(trace, world.step())
    trace.close()
    told = [each for line in lines(tmp_path / "t") for each in line["preemptions"]]
    assert {"sequence_id": 2, "cause": "growth", "beneficiary": 1}.items() <= told[0].items()


def test_lines_are_written_once_a_second_and_at_the_end(tmp_path: Path) -> None:
    path, plan = tmp_path / "t", plan_of(3)
    trace = StepTrace(path)
    record(trace, plan, now_s=5.0)
    for now_s in (5.1, 5.9):
        record(trace, plan, now_s=now_s)
    assert len(lines(path)) == 1
    record(trace, plan, now_s=6.1)
    assert len(lines(path)) == 4
    record(trace, plan, now_s=6.2)
    trace.close()
    trace.close()
    assert len(lines(path)) == 5


def test_a_step_without_work_is_no_line(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "t")
    record(trace, EMPTY)
    trace.close()
    assert lines(tmp_path / "t") == []


def test_a_new_engine_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for _ in range(2):
        trace = StepTrace(tmp_path / "t")
        record(trace, plan_of(3))
        trace.close()
    assert len(lines(tmp_path / "t")) == 2


class FullDisk:
    """Takes ten bytes, then nothing more."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.is_closed = False

    def write(self, data: bytes) -> int:
        self.num_calls += 1
        if self.num_calls > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return 10

    def close(self) -> None:
        self.is_closed = True


def test_a_full_disk_ends_the_trace_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace, disk = StepTrace(tmp_path / "t"), FullDisk()
    trace._file.close()
    trace._file = disk
    with caplog.at_level(logging.ERROR):
        for second in range(5):
            record(trace, plan_of(3), now_s=10.0 * second)
            trace.note_arrivals(arrival(SequenceId(second)))
        trace.close()
    assert [entry.getMessage().endswith("No space left on device") for entry in caplog.records] == [True]
    assert disk.is_closed
    assert disk.num_calls == 2


def test_what_a_disk_takes_in_parts_arrives_whole(tmp_path: Path) -> None:
    class Piecemeal(io.BytesIO):
        def write(self, data: bytes) -> int:
            return super().write(data[:100])

    trace, disk = StepTrace(tmp_path / "t"), Piecemeal()
    trace._file.close()
    trace._file = disk
    record(trace, plan_of(3))
    line = disk.getvalue()
    assert len(line) > 200
    assert orjson.loads(line)["step"] == 1
    trace.close()


def test_a_trace_stops_at_its_largest_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = StepTrace(tmp_path / "t", max_file_bytes=2000)
    for second in range(50):
        record(trace, plan_of(3), now_s=10.0 * second)
    assert 1000 < (tmp_path / "t").stat().st_size <= 2000
    assert "largest size" in caplog.text
    assert all(line["step"] == 1 for line in lines(tmp_path / "t"))


def test_a_file_that_cannot_be_opened_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        StepTrace(tmp_path / "missing" / "t")
