"""Failing and unfinished parts of `python -m campaigns.gpu`, tried out without a GPU."""

import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import SkipTest

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from campaigns.gpu import catalogue, cli, shapes, stand_ins
from campaigns.gpu.cli import Settings
from campaigns.gpu.launches import LastLaunch
from campaigns.gpu.results import Record, read_record


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


@pytest.mark.usefixtures("launches")
def test_what_the_trials_of_a_start_say_is_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(*_: object) -> None:
        for name in ("trials.skinny", "state_kernels.executor"):
            logging.getLogger(f"worker.gpu.{name}").info("1.0 us for 2.0 us")

    caplog.set_level("INFO")
    module = ModuleType("trying_part")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trying_part", module)
    trying = catalogue.Part(name="trying", title="Trying", module="trying_part", limit_s=9, needs=())
    assert cli._run_inside(trying, Settings(out=tmp_path, is_smoke=True), Record(tmp_path, "trying")) == 0
    [table] = read_record(tmp_path, "trying")["tables"]
    assert table["rows"] == [["1.0 us for 2.0 us"]] * 2


def run_options(out: Path, **options: Any) -> Any:
    return SimpleNamespace(out=out, patience=1.0, **options)


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
