"""The states of a model's weights, and what each way between them does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from worker.devices.device import CpuDevice
from worker.devices.weight_life import WeightLife, WeightState
from worker.progress import LoadStage
from worker.worker_config import WorkerConfig

DEVICE = CpuDevice(WorkerConfig(model_path=""))


class Codes:
    """Codes that note what is done with them."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def free(self, _model: nn.Module) -> None:
        self.calls.append("free")

    def keep(self, _model: nn.Module) -> None:
        self.calls.append("keep")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({"weight": torch.ones(512, 512)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def stored_model(path: Path) -> nn.Linear:
    """A layer whose weight is pages of the file."""
    model = nn.Linear(512, 512, bias=False).requires_grad_(False)
    model.weight.data = load_file(path)["weight"]
    return model


def address(model: Any) -> int:
    return int(model.weight.data_ptr())


def test_stored_weights_are_to_come_and_are_copied_when_they_settle(path: Path) -> None:
    model = stored_model(path)
    life, mapped = WeightLife(model, DEVICE, [path], loaded_bytes=1 << 30), address(model)
    assert (life.state, life.bytes_to_come) == (WeightState.STORED, 512 * 512 * 4)
    assert WeightLife(model, DEVICE, [path], loaded_bytes=1000).bytes_to_come == 1000, (
        "rounded, they take less"
    )
    life.settle(LoadStage())
    assert (life.state, life.bytes_to_come) == (WeightState.MOVED, 0)
    assert address(model) != mapped
    assert bool((model.weight == 1).all())


def test_codes_are_freed_while_kernels_take_over_and_what_is_left_is_kept(path: Path) -> None:
    codes = Codes()
    life = WeightLife(stored_model(path), DEVICE, [path], codes)
    life.offer()
    assert (life.state, codes.calls) == (WeightState.OFFERED, ["free"])
    life.settle(LoadStage())
    assert (life.state, codes.calls) == (WeightState.MOVED, ["free", "keep"])


def test_weights_that_moved_before_kernels_came_are_not_copied_again(path: Path) -> None:
    model, codes = stored_model(path), Codes()
    life = WeightLife(model, DEVICE, [path], codes)
    life.move(LoadStage())
    moved = address(model)
    life.offer()
    assert life.state is WeightState.OFFERED_AGAIN
    life.settle(LoadStage())
    assert address(model) == moved
    assert codes.calls == ["free", "keep"]


def test_weights_are_offered_once_until_they_settle(path: Path) -> None:
    life = WeightLife(stored_model(path), DEVICE, [path])
    life.offer()
    with pytest.raises(KeyError):
        life.offer()
