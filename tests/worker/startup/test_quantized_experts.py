"""Experts of codes give the tokens of the numbers that they stand for, in layouts of families and files."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.families import MATRIX
from tests.quantized_checkpoints import FORMATS, Random
from tests.tiers import by_day
from tests.worker.family_formats import OPEN, build, likeliest, served
from tests.worker.family_trial import tiny_config
from worker.checkpoint.task_choice import generating_class

FAMILIES = ("qwen3_vl_moe", "llama4", "gpt_oss")
"""Families whose files have the experts of a layer in one tensor, with inputs before outputs."""
STACK = re.compile(r"experts\.(gate_up|down)_proj$")
CASES = [
    *((family, name, "one by one") for family in FAMILIES for name in ("int4", "float8")),
    *((family, name, "together") for family in FAMILIES for name in ("fp8", "modelopt nvfp4")),
]
BY_DAY = [
    ("qwen3_vl_moe", "int4", "one by one"),
    ("qwen3_vl_moe", "fp8", "together"),
    ("llama4", "int4", "one by one"),
    ("llama4", "modelopt nvfp4", "together"),
]


def plain_checkpoint(name: str, folder: Path) -> Any:
    """Write a family's checkpoint with inputs before outputs, and return its configuration."""
    [family] = [each for each in MATRIX if each.name == name]
    config = tiny_config(family)
    build(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tensors, hidden_size = load_file(folder / "model.safetensors"), config.get_text_config().hidden_size
    for stack in filter(STACK.search, tensors):
        if tensors[stack].shape[1 if stack.endswith("gate_up_proj") else 2] != hidden_size:
            tensors[stack] = tensors[stack].transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return config


def split(stack: str, matrix_NK: Tensor, *, is_interleaved: bool) -> dict[str, Tensor]:
    """Views of the linear layers that a matrix of an expert is made of, by their names."""
    if stack.endswith("down_proj"):
        return {"down_proj": matrix_NK}
    gate, up = (matrix_NK[::2], matrix_NK[1::2]) if is_interleaved else matrix_NK.chunk(2)
    return {"gate_proj": gate, "up_proj": up}


def quantized_stack(
    name: str, stack: str, tensor: Tensor, random: Random, *, layout: str, is_interleaved: bool
) -> dict[str, Tensor]:
    """Codes in the place of a stack, whose numbers are written into `tensor`."""
    matrices = tensor.transpose(1, 2)
    module, found = stack.rpartition(".")[0], dict[str, Tensor]()
    if layout == "one by one":
        for number, matrix_NK in enumerate(matrices):
            for part, numbers_NK in split(stack, matrix_NK, is_interleaved=is_interleaved).items():
                written = FORMATS[name].write(random, *numbers_NK.shape)
                numbers_NK.copy_(written.numbers_NK)
                found |= {f"{module}.{number}.{part}.{end}": each for end, each in written.tensors.items()}
        return found
    all_written = [FORMATS[name].write(random, *matrix_NK.shape) for matrix_NK in matrices]
    matrices.copy_(torch.stack([each.numbers_NK for each in all_written]))
    for end in all_written[0].tensors:
        whole = torch.stack([each.tensors[end] for each in all_written])
        key = stack if end == "weight" else f"{stack}_{end}"
        found[key] = whole.transpose(1, 2) if whole.dim() > 2 else whole
    return found


def quantize_experts(plain: Path, quantized: Path, config: Any, name: str, layout: str) -> None:
    """Write experts in a format, and the plain checkpoint anew with the numbers that the codes stand for."""
    shutil.copytree(plain, quantized)
    numbers, random = load_file(plain / "model.safetensors"), Random()
    codes = dict(numbers)
    is_interleaved = config.model_type == "gpt_oss"
    for stack in sorted(filter(STACK.search, numbers)):
        del codes[stack]
        codes |= quantized_stack(
            name, stack, numbers[stack], random, layout=layout, is_interleaved=is_interleaved
        )
    assert len(codes) > len(numbers)
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    codes = {key: each.contiguous() for key, each in codes.items()}
    save_file(codes, quantized / "model.safetensors", {"format": "pt"})
    content = json.loads((quantized / "config.json").read_text())
    content["quantization_config"] = FORMATS[name].config
    (quantized / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("case", by_day(CASES, BY_DAY), ids=" ".join)
def test_experts_that_families_keep_together_are_read(tmp_path: Path, case: tuple[str, str, str]) -> None:
    family, name, layout = case
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    config = plain_checkpoint(family, plain)
    quantize_experts(plain, quantized, config, name, layout)
    model = generating_class(config).from_pretrained(plain, dtype=torch.float32).eval()
    answers = served(quantized)
    expected = likeliest(model, answers, least_gap=OPEN)
    assert [ours[: len(theirs)] for ours, theirs in zip(answers, expected, strict=True)] == expected
    assert sum(map(len, expected)) > len(expected)
