"""The engine's log names requests as their clients do."""

import json
import logging

from engine.core.loop import EngineLoop
from engine.core.request_names import RequestNames
from engine.core.step_trace import StepTrace
from engine.process_messages import AddRequest
from scheduler.messages import SamplingParams, SequenceId, ServiceTerms
from scheduler.scheduler import Scheduler
from tests.engine.core.test_loop import Desk
from tests.fakes import FakeWorker
from tests.world import small_config


def request(*numbers: int, request_id: str = "", trace_id: str = "") -> AddRequest:
    return AddRequest(
        sequence_ids=tuple(map(SequenceId, numbers)),
        prompt_token_ids=(1,),
        params=SamplingParams(),
        terms=ServiceTerms(),
        request_id=request_id,
        trace_id=trace_id,
    )


def named(names: RequestNames, *numbers: int) -> str:
    return names.of(map(SequenceId, numbers))


def test_sequences_of_one_request_are_named_once_with_its_trace() -> None:
    names = RequestNames()
    names.add(request(1, 2, request_id="r-1"))
    names.add(request(3, request_id="r-2", trace_id="ab"))
    names.add(request(4))
    assert named(names, 1, 2, 3, 4, 5) == "r-1, r-2 (trace ab), (no id)"


def test_a_line_names_a_few() -> None:
    names = RequestNames()
    for number in range(20):
        names.add(request(number, request_id=f"r-{number}"))
    assert named(names, *range(20)) == ", ".join(f"r-{number}" for number in range(8)) + " and 12 more"


def test_those_that_ended_are_forgotten_when_there_is_no_room() -> None:
    names = RequestNames(room=4)
    for number in range(4):
        names.add(request(number, request_id=f"r-{number}"))
    assert names.is_full
    names.keep([SequenceId(0), SequenceId(1), SequenceId(9)])
    assert not names.is_full
    assert named(names, 0, 1, 2) == "r-0, r-1, (no id)"


def test_room_grows_with_those_who_live_so_that_they_are_seldom_counted() -> None:
    names = RequestNames(room=2)
    for number in range(10):
        names.add(request(number, request_id=f"r-{number}"))
    names.keep(map(SequenceId, range(10)))
    assert not names.is_full


def test_a_failed_step_is_told_with_its_requests_and_the_trace_of_steps_knows_them(tmp_path, caplog) -> None:
    desk, worker = Desk(), FakeWorker(4)
    desk.letters.append([request(1, 2, request_id="r-1", trace_id="ab"), request(3, request_id="r-2")])
    trace = StepTrace(tmp_path / "steps")
    loop = EngineLoop(Scheduler(small_config()), worker, desk, lambda: desk.now_s, trace)
    worker.explode_next = True
    with caplog.at_level(logging.ERROR, logger="engine"):
        loop.turn()
    trace.close()
    (record,) = caplog.records
    assert record.getMessage().endswith("of r-1 (trace ab), r-2")
    (first, *_) = (tmp_path / "steps").read_text().splitlines()
    assert json.loads(first)["requests"] == [[1, "r-1", "ab"], [3, "r-2", ""]]
