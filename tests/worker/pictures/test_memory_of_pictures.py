"""Memory that a model with eyes holds back for pictures, at its start and in the forecast of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.worker.pictures.seeing import FAMILIES, Reference
from worker.devices.device import CpuDevice, Reserve
from worker.load.model_kind import find_kind
from worker.load.weight_files import weight_bytes
from worker.pictures import eyes
from worker.pictures.eyes import MOST_PLACES, bytes_of_pictures
from worker.ranks.ranks import ALONE
from worker.startup import kernel_choice
from worker.survey.forecast import forecast
from worker.worker_config import WorkerConfig

SEEING: Any = SimpleNamespace(config=FAMILIES["qwen3_vl"].config(), get_image_features=None)


def test_rows_of_pictures_are_counted_with_those_that_are_added_behind_layers_and_the_towers_own() -> None:
    rows, tower = MOST_PLACES * 64 * (1 + 2) * 2, 32 * eyes._BYTES_BESIDE
    assert bytes_of_pictures(SEEING, torch.bfloat16) == rows + tower
    reading: Any = SimpleNamespace(config=SEEING.config.text_config, get_image_features=None)
    assert bytes_of_pictures(reading, torch.bfloat16) == 0


def test_a_gpu_holds_memory_back_for_pictures() -> None:
    torch_alone = WorkerConfig(model_path="", gpu_kernels="off")
    loaded: Any = SimpleNamespace(
        model=SEEING, checkpoint_len=64, vocab_size=600, dtype=torch.bfloat16, ranks=ALONE
    )
    found = kernel_choice._ON_GPU.reserve(torch_alone, loaded)
    assert found == Reserve(buffer_bytes=bytes_of_pictures(SEEING, torch.bfloat16))


def test_the_forecast_counts_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[int] = []
    budget = CpuDevice.foreseen_budget_bytes
    monkeypatch.setattr(
        CpuDevice, "foreseen_budget_bytes", lambda device, num: (noted.append(num), budget(device, num))[1]
    )
    Reference("qwen3_vl", tmp_path)
    config = WorkerConfig(model_path=str(tmp_path), device="cpu", kv_cache_bytes=1 << 20, num_threads=1)
    kind, device = find_kind(config), CpuDevice(config)
    num_weight_bytes = weight_bytes(config, kind, device)
    forecast(config, kind, device, num_weight_bytes)
    assert noted == [num_weight_bytes + bytes_of_pictures(SEEING, torch.float32)]
