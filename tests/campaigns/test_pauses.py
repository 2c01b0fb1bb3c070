"""The places of pauses, and the reading of a stream of which each read is timed."""

import os
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from bench.trace.reading import TracedStep
from campaigns.pauses.cli import PAGE_HEAD, page_table
from campaigns.pauses.crowds import BODIES, CROWDED_BODIES, GRAMMARS, REPLIES
from campaigns.pauses.neighbour import Counters, Meters, Neighbour, Pause, Readings
from campaigns.pauses.places import longest_gap_s, place_of, steps_of_neighbour
from campaigns.pauses.verdict import ALONE, Row, faults_of, why_not_judged

ROOT = Path(__file__).resolve().parents[2]
NOTHING = {name: 0.0 for name in Counters.__struct_fields__}


def pause(began_s: float, lasted_s: float, **spent: float) -> Pause:
    return Pause(began_s=began_s, lasted_s=lasted_s, spent=Counters(**{**NOTHING, **spent}))


def step(time_s: float, execute_s: float, *decodes: tuple[int, int]) -> TracedStep:
    of_type: dict[Any, Any] = {int: 0, float: 0.0, dict[str, int]: {}}
    nothing = {name: of_type.get(kind, []) for name, kind in get_type_hints(TracedStep).items()}
    return msgspec.convert(
        {**nothing, "time_s": time_s, "execute_s": execute_s, "decodes": decodes}, TracedStep
    )


def test_a_pause_lies_in_the_engine_as_far_as_no_step_ends_in_it() -> None:
    steps = [step(9.0, 0.5), step(10.0, 0.125), step(10.5, 0.25), step(11.5, 0.25)]
    assert longest_gap_s(pause(10.0, 1.0), steps) == 0.625
    assert longest_gap_s(pause(10.875, 0.5), steps) == 0.5


def test_steps_of_the_neighbour_are_those_of_the_one_long_sequence() -> None:
    before, other, after = (
        step(1.0, 0.1, (7, 399), (8, 20)),
        step(2.0, 0.1, (8, 21)),
        step(3.0, 0.1, (7, 400)),
    )
    assert steps_of_neighbour([before, other, after]) == [before, after]


def test_a_pause_is_described_in_milliseconds() -> None:
    line = place_of(pause(10.0, 0.2, reader_waited_s=0.19, api_ran_s=0.03), [step(10.0, 0.15)])
    assert line.startswith("200 ms: no step for 150, 0 steps with the neighbour, none for 200, ")
    assert "the API process's ran 30" in line
    assert "the reader waited 190" in line


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel counts no waiting")
def test_pauses_are_those_between_events_and_not_before_the_first() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                while b"BODY" not in connection.recv(4096):
                    pass
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                for event in (b"data: 1\n\n", b"data: 2\n\ndata: 3\n\n"):
                    time.sleep(0.05)
                    connection.sendall(event)

        server = threading.Thread(target=serve)
        server.start()
        port = listener.getsockname()[1]
        readings = Neighbour(port, Meters(os.getpid(), os.getpid())).read(b"BODY", 0.01)
        server.join()
    assert readings.num_events == 3
    (only,) = readings.pauses
    assert only.lasted_s >= 0.04
    assert only.spent.api_ran_s >= 0


def row(*pauses: Pause, **ends: int) -> Row:
    replies = Counter({name.removeprefix("status_"): num for name, num in ends.items()})
    return Row(Readings(num_events=len(pauses), pauses=list(pauses)), replies)


QUIET = row(pause(1.0, 0.01), pause(2.0, 0.09, reader_waited_s=0.085))


def test_a_row_breaks_the_promise_by_one_long_pause_of_the_server_and_is_named() -> None:
    held = row(pause(1.0, 0.01), pause(2.0, 0.3, reader_waited_s=0.25), status_200=3, status_429=1)
    broken = row(pause(1.0, 0.01), pause(2.0, 0.13, reader_waited_s=0.01), status_400=9)
    assert not faults_of({ALONE: QUIET, "held": held})
    (fault,) = faults_of({ALONE: QUIET, "held": held, "broken": broken})
    assert fault == "broken: a pause of 120 ms, more than 100"


def test_a_stream_that_brings_nothing_and_replies_that_fail_are_faults_too() -> None:
    rows = {ALONE: QUIET, "stalled": row(), "failed": row(pause(1.0, 0.01), status_0=2, status_500=1)}
    assert faults_of(rows) == [
        "stalled: the stream brought nothing",
        "failed: replies by status {'0': 2, '500': 1}",
    ]


def test_where_the_stream_that_is_alone_pauses_nothing_is_judged() -> None:
    assert not why_not_judged({ALONE: QUIET})
    assert "60 ms" in why_not_judged({ALONE: row(pause(1.0, 0.06))})
    assert why_not_judged({ALONE: row()}), "nothing was read at all"


def test_the_table_for_the_page_is_in_the_form_of_the_page() -> None:
    table = page_table({ALONE: QUIET, "an echo": row(pause(1.0, 0.03, reader_waited_s=0.01))}, 0.5)
    assert table == f"{PAGE_HEAD}\n| none | 4 | 89 | 90 | 10 |\n| an echo | 2 | 30 | 30 | 20 |"
    page = (ROOT / "docs" / "security.md").read_text()
    assert f"\n\n{PAGE_HEAD}\n| none | " in page


def test_no_two_rows_have_one_name_and_each_large_body_comes_from_four_as_well() -> None:
    kinds = (GRAMMARS, BODIES, CROWDED_BODIES, REPLIES)
    assert len({name for kind in kinds for name in kind} | {ALONE}) == sum(map(len, kinds)) + 1
    assert [crowd.num_clients for crowd in CROWDED_BODIES.values()] == [4] * len(BODIES)
    assert all(len(crowd.body()) < 4 * 2**20 for kind in kinds for crowd in kind.values())
