"""The parts `throughput-...` and `tune` of `python -m campaigns.gpu`, tried out without a GPU."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import SkipTest

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from bench.load.report import summarize
from bench.load.request_record import CUT_OFF
from campaigns.gpu import catalogue, cli, shapes, stand_ins
from campaigns.gpu.cli import Settings
from campaigns.gpu.driving import Drive, scheduler_config
from campaigns.gpu.launches import LastLaunch
from campaigns.gpu.results import Record, read_record
from campaigns.gpu.served import part as served_part
from campaigns.gpu.served.loads import Load, Request
from campaigns.gpu.served.readers import Readers, ReadersFailed
from campaigns.gpu.tune import part as tune_part
from campaigns.gpu.tune.candidates import Candidate, Question
from tests.campaigns.test_gpu import ClosableWorker, facts, fake_worker
from tests.checkpoints import write_tokenizer


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_tokenizer(folder)
    return folder


def new_drive() -> Drive:
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    return Drive(ClosableWorker(8), scheduler_config(facts(), **limits))  # type: ignore[arg-type]


def test_requests_are_kept_in_flight_and_each_token_is_read_as_text(tokenizer_folder: Path) -> None:
    requests = [Request(prompt=[number, 5, 7], max_tokens=6) for number in (1, 2, 3, 4, 5)]
    with Readers(tokenizer_folder) as readers:
        records = Load(new_drive(), readers, within_s=30).run_closed(requests, concurrency=2)
        again = Load(new_drive(), readers, within_s=30).run_closed(requests[:1], concurrency=2)
    summary = summarize(records, num_planned=5)
    assert (summary.num_completed, summary.num_output_tokens) == (5, 30)
    assert all(
        each.ttft_s and each.tpot_s and each.ttft_s + 5 * each.tpot_s <= each.e2e_s + 1e-6 for each in records
    )
    assert all(len(each.chunk_gaps_s) == 5 for each in records)
    assert [each.num_output_tokens for each in again] == [6]


def test_an_open_load_adds_requests_when_they_arrive(tokenizer_folder: Path) -> None:
    requests = [Request(prompt=[1, 2], max_tokens=3, arrival_s=arrival_s) for arrival_s in (0.0, 0.2, 0.21)]
    with Readers(tokenizer_folder) as readers:
        records = Load(new_drive(), readers, within_s=30).run_open(requests)
    assert all(each.start_s >= request.arrival_s for each, request in zip(records, requests, strict=True))
    assert records[0].e2e_s < 0.2
    assert sum(each.num_output_tokens for each in records) == 9


def test_a_load_that_takes_too_long_is_cut_off_and_gives_its_rows_back(tokenizer_folder: Path) -> None:
    drive = new_drive()
    with Readers(tokenizer_folder) as readers:
        records = Load(drive, readers, within_s=0.0).run_closed(
            [Request(prompt=[1], max_tokens=9)], concurrency=1
        )
        assert records == []
        load = Load(drive, readers, within_s=0.0)
        load._send(Request(prompt=[1], max_tokens=9), late_s=0.0)
        drive.turn()
        records = load._records()
    assert [each.outcome for each in records] == [CUT_OFF]
    assert not drive.scheduler.has_unfinished_requests


def test_readers_without_a_tokenizer_say_so(tmp_path: Path) -> None:
    with pytest.raises(ReadersFailed):
        Readers(tmp_path)


def test_throughput_is_told_as_the_load_client_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_part, "open_worker", fake_worker)
    served_part.run(Record(tmp_path, "served"), Settings(out=tmp_path, is_smoke=True))
    [table] = read_record(tmp_path, "served")["tables"]
    assert [row[0] for row in table["rows"]][:2] == ["1 in flight", "2 in flight"]
    assert table["rows"][2][0] == "2 of 2 to 6 tokens in and out"
    assert table["rows"][3][0].endswith("arrive per second")
    assert [row[2] for row in table["rows"]] == ["0"] * 4
    assert all(float(row[3]) > 0 and row[5].endswith("ms") for row in table["rows"])


def slow(seconds: float) -> Callable[[], object]:
    return lambda: time.sleep(seconds)


def does_not_fit() -> None:
    raise OutOfResources(300_000, 232_448, "shared memory")


def test_the_fastest_choice_stands_beside_the_one_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates = [
        Candidate(name="now", serves=True, calls=[slow(0.02)]),
        Candidate(name="better", serves=False, calls=[slow(0.001)]),
        Candidate(name="too large", serves=False, calls=[does_not_fit]),
    ]
    question = Question(kernel="norm", load="tiny", make=lambda: candidates)
    monkeypatch.setattr(tune_part, "questions", lambda *_, **__: [question])
    tune_part.run(Record(tmp_path, "tune"), Settings(out=tmp_path, is_smoke=True))
    best, everything = read_record(tmp_path, "tune")["tables"]
    [row] = best["rows"]
    assert (row[2], row[4]) == ("now", "better")
    assert "shared memory" in everything["rows"][2][3]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> LastLaunch:
    for kind in (JITFunction, InterpretedFunction):
        monkeypatch.setattr(kind, "run", kind.run)
    return LastLaunch()


@triton.jit
def _nothing(x, count):  # type: ignore[no-untyped-def]
    pass


def test_the_last_launch_is_told_by_the_shapes_of_its_inputs(launches: LastLaunch) -> None:
    assert launches.describe() == ""
    _nothing[(1,)](torch.zeros(5, 200), 3)
    assert launches.describe().startswith("_nothing(x=5x200:float32, count=3")


@pytest.mark.usefixtures("launches")
def test_a_part_that_fails_names_the_error_and_the_last_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> None:
        _nothing[(1,)](torch.zeros(5, 200), 3)
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmany more words")

    module = ModuleType("broken_part")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "broken_part", module)
    broken = catalogue.Part(name="broken", title="Broken", module="broken_part", limit_s=9, needs=())
    assert cli._run_inside(broken, Settings(out=tmp_path, is_smoke=True), Record(tmp_path, "broken")) == 1
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith(
        "RuntimeError: CUDA error: an illegal memory access was encountered; the last launch was"
    )
    assert "_nothing(x=5x200:float32" in last


def run_options(out: Path, **options: Any) -> Any:
    return SimpleNamespace(out=out, patience=1.0, pack=None, **options)


def test_an_error_of_the_device_is_looked_for_once_more_kernel_by_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def run(_part: object, _options: object, limit_s: float, **settings: Any) -> tuple[str, bool]:
        begun.append((limit_s, settings))
        return ("Failed after 1 s: AcceleratorError: CUDA error: misaligned address", True)

    monkeypatch.setattr(cli, "_run", run)
    broken = catalogue.Part(name="broken", title="Broken", module="", limit_s=9, needs=())
    assert cli._run_all([broken], run_options(tmp_path, within=20.0, smoke=False)) == 1  # type: ignore[arg-type]
    assert [settings for _, settings in begun] == [{}, {"suffix": "-again"}]
    assert (
        "misaligned address Again with CUDA_LAUNCH_BLOCKING=1: Failed"
        in (tmp_path / "results.md").read_text()
    )


def test_a_checkpoint_is_written_once_and_not_taken_for_whole_when_it_was_cut_off(tmp_path: Path) -> None:
    begun = tmp_path / "tiny.begun"
    begun.mkdir()
    (begun / "model.safetensors").write_bytes(b"half of it")
    folder = shapes.checkpoint("tiny", tmp_path)
    assert (folder / "config.json").exists()
    assert not begun.exists()
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert (shapes.checkpoint("tiny", tmp_path) / "model.safetensors").stat().st_mtime_ns == written


def test_the_process_that_begins_the_parts_loads_none_of_what_they_need() -> None:
    """A stand-in of a package, say, would make it look for that package in vain."""
    packages = {"torch", "numpy", "triton", "llguidance"}
    code = f"import sys, campaigns.gpu.cli; sys.exit(bool({packages} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_part_for_which_too_little_time_is_left_is_skipped(tmp_path: Path) -> None:
    long = catalogue.Part(name="long", title="Long", module="", limit_s=99, needs=(), least_s=50)
    assert cli._run_all([long], run_options(tmp_path, within=5.0, smoke=True)) == 0  # type: ignore[arg-type]
    assert "Skipped: 5 s were left." in (tmp_path / "results.md").read_text()


def test_a_test_that_asks_for_a_grammar_where_there_are_none_is_skipped() -> None:
    stand_ins._Named(limit=3)
    with pytest.raises(SkipTest, match="llguidance"):
        stand_ins._Named("a tokenizer")
