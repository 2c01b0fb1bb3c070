"""The modules around a model's layers are replaced where ours return the same, and left alone elsewhere."""

from typing import Any

import pytest
import torch

from tests.worker.gpu.test_layers_fused import build
from worker.devices.device import open_device
from worker.gpu.toolkit import GpuToolkit
from worker.gpu.trials import triton_frame
from worker.gpu.trials.triton_frame import TableRotary, TritonNorm, table_bytes
from worker.model.layer_replacement import replace_layers
from worker.worker_config import WorkerConfig

LONGEST = 40


def replaced(name: str) -> tuple[Any, int]:
    """A model with our layers, and the bytes that were foreseen for its tables."""
    device = open_device(WorkerConfig(model_path="", device="cpu"))
    model = build(name)
    foreseen = table_bytes(model, LONGEST, torch.float32)
    replace_layers(model, GpuToolkit(device), device, max_model_len=LONGEST)
    return model, foreseen


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_rotations_are_looked_up_bit_for_bit_at_every_position(name):
    model, foreseen = replaced(name)
    rotary = model.model.rotary_emb
    assert isinstance(rotary, TableRotary)
    positions_1T = torch.arange(LONGEST + 1)[None].flip(1)  # one token may stand behind the context window
    x_1TH, held = torch.randn(1, LONGEST + 1, 8), 0
    types = (None,) if name == "llama" else ("full_attention", "sliding_attention")
    for layer_type in types:
        given = () if layer_type is None else (layer_type,)
        for found, expected in zip(
            rotary(x_1TH, positions_1T, *given), rotary.computed(x_1TH, positions_1T, *given), strict=True
        ):
            assert torch.equal(found, expected)
            held += found.nbytes
    assert held == foreseen


def test_positions_of_another_form_are_computed_as_before():
    model, _ = replaced("llama")
    rotary, positions_2T = model.model.rotary_emb, torch.tensor([[3, 50], [1, 60]])
    for found, expected in zip(
        rotary(torch.randn(2, 2, 8), positions_2T),
        rotary.computed(torch.randn(2, 2, 8), positions_2T),
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_tables_that_would_take_too_much_memory_are_not_made(monkeypatch):
    monkeypatch.setattr(triton_frame, "_MOST_TABLE_BYTES", 100)
    model, foreseen = replaced("llama")
    assert not foreseen
    assert not isinstance(model.model.rotary_emb, TableRotary)


def test_a_rotation_by_more_than_positions_stays(monkeypatch, caplog):
    model = build("llama")
    rotary = model.model.rotary_emb
    computed = rotary.forward

    def forward(x: Any, position_ids: Any) -> Any:
        return tuple(each * x.shape[1] for each in computed(x, position_ids))

    monkeypatch.setattr(rotary, "forward", forward)
    device = open_device(WorkerConfig(model_path="", device="cpu"))
    replace_layers(model, GpuToolkit(device), device, max_model_len=LONGEST)
    assert model.model.rotary_emb is rotary
    assert "depend on more than positions" in caplog.text


def test_the_norm_at_the_end_is_ours_and_any_other_stays():
    model, _ = replaced("llama")
    assert isinstance(model.model.norm, TritonNorm)
    model, _ = replaced("olmo2")  # none of its layers is replaced
    assert not isinstance(model.model.norm, TritonNorm)
