"""The prototype of a step in one kernel, where there is no GPU: its arguments, and its source on the CPU."""

import ctypes
import json
from pathlib import Path

import pytest

from campaigns.gpu import catalogue
from campaigns.gpu.cli import Settings
from campaigns.gpu.one_kernel import chain, launching, probe
from campaigns.gpu.one_kernel.launching import Kernel, argument_types
from campaigns.gpu.results import LINES, Record, read_record


def test_arguments_have_the_widths_of_the_source_and_none_is_forgotten() -> None:
    pointer, word, long = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
    assert argument_types("exchanges") == [pointer, word, word, pointer]
    assert argument_types("warm") == [pointer, long, word]
    assert argument_types("chain") == [None]
    with pytest.raises(ValueError, match="argument"):
        Kernel(None, "exchanges").launch(2, 1024, 3)


def test_a_refused_launch_is_a_row_and_the_rest_is_measured(tmp_path, monkeypatch) -> None:
    class Refusing(Kernel):
        def launch(self, *values: int, **others: int) -> None:
            if self._name == "cluster_barriers":
                raise RuntimeError("CUDA error 912")
            super().launch(*values, **others)

    monkeypatch.setattr(probe, "Kernel", Refusing)
    settings = Settings(out=tmp_path, is_smoke=True)
    probe.run_exchange(Record(tmp_path, "exchange"), settings)
    [table] = read_record(tmp_path, "exchange")["tables"]
    found = {row[0]: row[2] for row in table["rows"]}
    assert found["cluster_barriers"] == "CUDA error 912"
    assert found["exchanges"].endswith(" us")
    lines = [json.loads(line) for line in (tmp_path / LINES).read_text().splitlines()]
    assert [line["row"]["What"] for line in lines if "row" in line] == [row[0] for row in table["rows"]]


def test_the_parts_of_a_quarter_of_an_hour_end_within_one_command() -> None:
    for names in catalogue.QUARTERS.values():
        assert names[0] == "device", "there are no floors without its rates"
        assert sum(catalogue.BY_NAME[name].limit_s for name in names) <= 590


@pytest.mark.night
def test_the_kernel_has_the_same_bits_in_any_order_of_its_threads(tmp_path: Path) -> None:
    chain.run(Record(tmp_path, "chain"), Settings(out=tmp_path, is_smoke=True))
    rehearsed, _ = read_record(tmp_path, "chain")["tables"]
    assert [row[0].endswith("the same bits") for row in rehearsed["rows"]] == [False, True, True]


@pytest.mark.night
def test_the_kernels_compile_for_a_hopper_gpu() -> None:
    try:
        cubin = launching.compile_cubin()
    except launching.NotCompiled as error:
        if "neither" in str(error):
            pytest.skip(str(error))
        raise
    assert cubin.startswith(b"\x7fELF")
