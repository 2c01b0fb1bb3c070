"""`tokenyard trace`: a file of steps becomes a table, a summary and a picture."""

import json
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from bench.trace.command import TraceSummary, main
from bench.trace.reading import TracedPreemption, TracedStep, TraceError, read_trace
from bench.trace.timeline import Cell, Timeline
from scheduler.messages import PreemptionCause
from tests.bench.traces import busy_world, traced, write_trace
from tests.fakes import make_sequence
from tests.world import World, small_config


def steps_of(path: Path) -> list[TracedStep]:
    return list(read_trace(path))


def timeline_of(steps: list[TracedStep], window: tuple[int, int] = (0, 10**9)) -> Timeline:
    timeline = Timeline(window, max_columns=1000)
    for step in steps:
        timeline.add(step)
    timeline.close()
    return timeline


def cells(steps: list[TracedStep], sequence_id: int) -> str:
    """One letter a column, from the first on in which the sequence is seen; P, D, w, or x for preempted."""
    letters = {Cell.PREFILL: "P", Cell.DECODE: "D", Cell.WAITING: "w", Cell.PREEMPTED: "x"}
    runs = timeline_of(steps).rows[sequence_id].runs
    return "".join(letters[run.cell] * (run.end - run.first) for run in runs)


def test_the_summary_agrees_with_the_scheduler(tmp_path: Path) -> None:
    world, path = busy_world(), tmp_path / "t"
    num_steps_before, preempted_before = world.scheduler.stats().num_steps, world.num_preemptions()
    write_trace(path, world)
    summary = TraceSummary()
    for step in read_trace(path):
        summary.add(step)
    stats = world.scheduler.stats()
    assert summary.num_steps == stats.num_steps - num_steps_before
    num_preempted = world.num_preemptions() - preempted_before
    assert summary.preemptions.total() == num_preempted > 0
    assert world.num_preemptions(PreemptionCause.DISPLACED) > 0
    assert 0 < summary.num_recomputed_tokens <= stats.num_recomputed_tokens
    assert 0.9 < summary.max_kv_use <= 1


def test_a_row_shows_waiting_prefill_decode_and_preemption(tmp_path: Path) -> None:
    world = World(small_config(num_blocks=4, max_num_batched_tokens=4))
    world.add(make_sequence(1, [1] * 6, max_tokens=4), make_sequence(2, [2] * 6, max_tokens=4))
    write_trace(tmp_path / "t", world)
    steps = steps_of(tmp_path / "t")
    # 1 takes 4, then its last 2 with the first 2 of 2, who gets 3 of each step beside 1's decode.
    assert cells(steps, 1) == "PPDDD"
    assert cells(steps, 2).startswith("wPP")
    assert "x" in cells(steps, 2)
    assert cells(steps, 2).count("P") + cells(steps, 2).count("D") >= 6


def test_a_row_ends_with_its_sequence(tmp_path: Path) -> None:
    world = World(small_config())
    world.add(make_sequence(1, [1] * 3, max_tokens=2), make_sequence(2, [2] * 3, max_tokens=6))
    write_trace(tmp_path / "t", world)
    steps = steps_of(tmp_path / "t")
    assert cells(steps, 1) == "PD"
    assert cells(steps, 2) == "PDDDDD"


def test_who_was_preempted_is_waited_for_though_it_was_released(tmp_path: Path) -> None:
    """A plan that only preempts releases nobody: the next one does, and that is no end."""
    first, second, *rest = steps_of(traced(tmp_path))
    gone = first.chunks[0][0]
    preemption = TracedPreemption(sequence_id=gone, cause="growth", beneficiary=99)
    second = replace(second, decodes=(), chunks=(), released=(), new=(), preemptions=(preemption,))
    third = replace(rest[0], decodes=(), chunks=(), released=(gone,), new=(), preemptions=())
    assert cells([first, second, third, third], gone) == "Pxxx"


def test_who_was_aborted_waits_no_longer(tmp_path: Path) -> None:
    first, second, *_ = steps_of(traced(tmp_path))
    first = replace(first, arrived=(77,))
    assert cells([first, second, second], 77) == "www"
    assert cells([first, second, replace(second, ended=(77,)), second], 77) == "ww"


def test_the_picture_is_well_formed_and_keeps_to_its_limits(tmp_path: Path) -> None:
    drawn = timeline_of(steps_of(traced(tmp_path)), (3, 9)).draw(max_rows=3)
    root = ElementTree.fromstring(str(drawn))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert "more are not drawn" in texts[0]
    rows = {element.get("y") for element in root.iter() if element.tag.endswith("rect")}
    kv_band = [each for each in root.iter() if "KV blocks" in (each.text or "")]
    tops = {f"{72 + 14 * place}" for place in range(3)}
    assert tops <= rows, "a row for each of the first three"
    assert len(kv_band) == 7, "a bar for each step"


def test_the_window_knows_what_happened_before_it(tmp_path: Path) -> None:
    steps = steps_of(traced(tmp_path))
    whole, part = timeline_of(steps), timeline_of(steps, (5, 8))
    assert part.step_numbers == [5, 6, 7, 8]
    assert set(part.rows) == {n for n, row in whole.rows.items() if row.runs[0].first < 8 - steps[0].step + 1}
    narrow = Timeline((0, 10**9), max_columns=3)
    for step in steps:
        narrow.add(step)
    assert narrow.num_left_out == len(steps) - 3


def test_the_command_prints_a_table_and_a_summary_and_draws(tmp_path: Path, capsys) -> None:
    picture = tmp_path / "t.svg"
    assert main([str(traced(tmp_path)), "--svg", str(picture), "--steps", "3:6"]) == 0
    out = capsys.readouterr().out
    assert "Preemptions" in out
    assert "displaced, recomputed" in out
    assert len([line for line in out.splitlines() if line.lstrip()[:1].isdecimal() and "%" in line]) == 4
    assert picture.read_text().startswith("<svg")


def test_a_line_cut_off_at_the_end_is_passed_over(tmp_path: Path) -> None:
    path = traced(tmp_path)
    num_steps = len(steps_of(path))
    path.write_bytes(path.read_bytes()[:-20])
    assert len(steps_of(path)) == num_steps - 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no steps"),
        ('{"step": 1}\n', "t:1: not a line of a step trace"),
        ("no json\n", "t:1: not a line of a step trace"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "t"
    path.write_text(content)
    with pytest.raises(TraceError, match=message):
        steps_of(path)


def test_mistakes_end_with_2(tmp_path: Path, capsys) -> None:
    path = str(traced(tmp_path))
    assert main([str(tmp_path / "missing")]) == 2
    assert main([path, "--steps", "9000:9001"]) == 2
    assert main([path, "--steps", "nine"]) == 2
    assert main([path, "--svg", str(tmp_path / "missing" / "t.svg")]) == 2
    err = capsys.readouterr().err
    assert "No such file" in err
    assert "no steps with such numbers" in err


def test_the_picture_has_time_kv_use_and_an_arrow_for_each_preemption(tmp_path: Path) -> None:
    steps = steps_of(traced(tmp_path))
    drawn = timeline_of(steps).draw(max_rows=100)
    text = str(drawn)
    assert "time since the first of these steps, s" in text
    assert text.count("of the KV blocks in use") == len(steps)
    given = [each for step in steps for each in step.preemptions if each.beneficiary != each.sequence_id]
    assert given
    assert text.count(" blocks to ") == len(given)
    ElementTree.fromstring(text)


def test_perfetto_gets_every_step_share_and_preemption_in_the_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    trace = traced(tmp_path)
    assert main([str(trace), "--perfetto", str(path)]) == 0
    events = json.loads(path.read_bytes())["traceEvents"]
    steps = steps_of(trace)
    own = [each for each in events if each["ph"] == "X" and each["pid"] == 1]
    assert [each["args"]["step"] for each in own] == [step.step for step in steps]
    assert all(one["ts"] <= other["ts"] for one, other in pairwise(own))
    assert sum(each["ph"] == "X" and each["pid"] == 2 for each in events) == sum(
        len(list(step.shares())) for step in steps
    )
    starts = [each for each in events if each["ph"] == "s"]
    ends = [each for each in events if each["ph"] == "f"]
    assert len(starts) == len(ends) == sum(len(step.preemptions) for step in steps) > 0
