"""Quantized checkpoints that would not be computed exactly are refused in one line that names the tensor."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quantized_checkpoints import write_quantized
from tests.worker.conftest import load_worker
from worker.worker_errors import StartupError

MODULE = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quantized("llama", "int4", tmp_path_factory.mktemp("refused"))[0]


def refusal(folder: Path, **options: object) -> str:
    with pytest.raises(StartupError) as refused:
        load_worker(folder, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def changed(
    checkpoint: Path, folder: Path, *, config: Callable[[dict], None] | None = None, **tensors: Tensor | None
) -> Path:
    """Copy a checkpoint with another config or with tensors of MODULE replaced or, by None, left out."""
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    stored = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor is None:
            del stored[f"{MODULE}.{name}"]
        else:
            stored[f"{MODULE}.{name}"] = tensor
    save_file(stored, folder / "model.safetensors")
    if config is not None:
        content = json.loads((folder / "config.json").read_text())
        config(content["quantization_config"])
        (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"weight_scale": None}, f"{MODULE}.weight_scale is missing"),
        ({"weight_packed": torch.zeros(64, 7, dtype=torch.int32)}, f"{MODULE}.weight_packed is [64, 7]"),
        ({"weight_scale": torch.ones(64, 3)}, f"{MODULE}.weight_scale is [64, 3]"),
        ({"weight_packed": torch.zeros(64, 8)}, f"{MODULE}.weight_packed is float32"),
        (
            {"weight_packed": None, "weight_scale": None, "weight_shape": None},
            "has no weights for 1 parameters, model.layers.0.self_attn.q_proj.weight first",
        ),
    ],
)
def test_tensors_that_contradict_the_model_are_named(
    checkpoint: Path, tmp_path: Path, tensors: dict[str, Tensor | None], named: str
) -> None:
    assert named in refusal(changed(checkpoint, tmp_path, **tensors))


def test_codes_under_names_that_the_model_does_not_have_are_named(checkpoint: Path, tmp_path: Path) -> None:
    folder = changed(checkpoint, tmp_path)
    stored = load_file(folder / "model.safetensors")
    save_file({f"module.{name}": each for name, each in stored.items()}, folder / "model.safetensors")
    assert "module.model.layers.0.mlp.down_proj.weight_packed is part of a quantized weight" in refusal(
        folder
    )


def test_codes_of_which_the_config_has_no_word_name_the_module(checkpoint: Path, tmp_path: Path) -> None:
    folder = changed(checkpoint, tmp_path, config=lambda found: found.update(config_groups={}))
    assert ".weight_packed is quantized, and quantization_config does not say how" in refusal(folder)


def test_an_unknown_method_names_those_that_are_supported(checkpoint: Path, tmp_path: Path) -> None:
    folder = changed(checkpoint, tmp_path, config=lambda found: found.update(quant_method="hqq"))
    said = refusal(folder)
    assert "hqq" in said
    assert "awq, bitsandbytes, compressed-tensors, fp8, gguf, gptq, modelopt, mxfp4, mxfp8, torchao" in said


def test_a_truncated_file_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = changed(checkpoint, tmp_path)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])
    assert "its header promises" in refusal(folder)


def test_activations_in_int8_are_refused_where_nothing_is_in_codes(checkpoint: Path) -> None:
    plain = checkpoint.parent / "llama plain int4"
    assert "--activations int8 has no effect" in refusal(plain, activations="int8")
    load_worker(checkpoint, activations="int8")


def test_rounding_needs_the_kernels(checkpoint: Path) -> None:
    for options in ({"quantization": "int4"}, {"quantize_head": "int8"}, {"activations": "int8"}):
        assert "needs the CPU kernels" in refusal(checkpoint, cpu_kernels="off", **options)
