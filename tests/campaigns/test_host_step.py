"""Cost of a step for the host: measured without a GPU, with a count of the calls to one."""

from pathlib import Path

import pytest
import torch

from campaigns.gpu import host_step
from campaigns.gpu.cli import Settings
from campaigns.gpu.host_step import WAYS, Step
from campaigns.gpu.null_device import Asked, CountedOperations, NullGpu
from campaigns.gpu.results import Record, read_record

pytestmark = pytest.mark.night


@pytest.fixture(autouse=True)
def _small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_step, "_VOCAB_SIZE", 640)


def asked_by(way: str) -> Asked:
    return host_step._count(Step(WAYS[way], num_sequences=3, context=20, num_steps=4))


@pytest.mark.parametrize("way", ["greedy", "drawn"])
def test_a_step_in_which_nobody_edits_is_one_copy_up_one_graph_and_one_copy_down(way: str) -> None:
    asked, num_steps = asked_by(way), host_step._NUM_COUNTED
    assert (asked.graphs, asked.copies_up, asked.copies_down) == (num_steps, num_steps, num_steps)
    assert asked.kernels == 0
    assert asked.pinned == 0, "what a result came down to takes the next one but one"


def test_penalties_bring_a_few_kernels_and_one_more_copy_however_many_rows_have_them() -> None:
    asked, num_steps = asked_by("penalties"), host_step._NUM_COUNTED
    assert asked.kernels == 7 * num_steps, "copy, penalties, three to draw, count, remember"
    assert (asked.copies_up, asked.copies_down) == (2 * num_steps, num_steps)


def test_operations_are_counted_as_a_gpu_is_asked_for_them() -> None:
    device = NullGpu()
    pinned, there = device.pinned(4, torch.int64), torch.zeros(4, dtype=torch.int64)
    with CountedOperations(device):
        there[:2].copy_(pinned[:2])
        pinned.copy_(there)
        there.view(2, 2).add_(1)
        torch.empty(3)
    assert (device.asked.copies_up, device.asked.copies_down, device.asked.kernels) == (1, 1, 1)


def test_every_batch_and_way_has_a_line_and_its_phases_are_about_all_of_it(tmp_path: Path) -> None:
    settings = Settings(out=tmp_path, is_smoke=True)
    host_step.run(Record(tmp_path, "host"), settings)
    times, counts = read_record(tmp_path, "host")["tables"]
    assert [row[:2] for row in times["rows"]] == [row[:2] for row in counts["rows"]]
    assert {row[1] for row in times["rows"]} == set(WAYS)
    for row in times["rows"]:
        assert float(row[2]) > 0
        assert len(row) == len(times["columns"])
    assert counts["rows"][0][-1] == "0 to 0 us"
