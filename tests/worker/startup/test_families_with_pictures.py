"""Families that see pictures too: their text is served from whole checkpoints, as they are published."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from scripts.write_families_page import ASKED
from tests.families import MATRIX
from tests.tiers import by_day
from tests.worker.family_formats import build, formats_of, likeliest, served
from tests.worker.family_trial import tiny_config
from tests.worker.startup.test_forecast import StandInGpu
from worker.checkpoint.checkpoint_files import find_weights
from worker.checkpoint.task_choice import generating_class
from worker.devices.device import CpuDevice
from worker.load.build import build_model
from worker.load.model_kind import find_kind
from worker.pictures.eyes import has_eyes
from worker.survey.unloaded_model import foresee_layers
from worker.worker_config import AdapterLimits, WorkerConfig
from worker.worker_errors import FamilyRefused

WHOLE = {each.name: each for each in MATRIX if each.text_part}
PLAIN = ("mistral3", "qwen3_vl", *(name for name in WHOLE if name not in ASKED))
"""Families that test_family_matrix.py does not read whole, as it reads those that are asked for."""


@pytest.mark.parametrize("name", by_day(PLAIN, PLAIN[:1]))
def test_the_text_of_a_whole_checkpoint_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    model = build(tiny_config(WHOLE[name]))
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    answers = served(tmp_path)
    assert answers == likeliest(model, answers)


def test_a_text_part_that_does_not_say_whether_its_head_is_tied_may_be_quantized(tmp_path: Path) -> None:
    assert formats_of(WHOLE["qwen3_vl"], tmp_path, ["int4"]) == ["int4"]


@pytest.mark.parametrize(("has_tower", "num_ranks"), [(True, 1), (False, 1), (True, 2)])
def test_a_family_of_two_classes_is_text_alone_without_a_tower_and_where_it_is_divided(
    tmp_path: Path, has_tower: bool, num_ranks: int
) -> None:
    build(tiny_config(WHOLE["qwen3_5"])).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if has_tower or ".visual." not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    kind = find_kind(WorkerConfig(model_path=str(tmp_path), num_ranks=num_ranks))
    model, _ = build_model(kind, "float32", find_weights(tmp_path))
    assert hasattr(model, "get_image_features") is (has_tower and num_ranks == 1)
    assert has_tower or not has_eyes(model)


@pytest.mark.parametrize("split", [{}, {"num_ranks": 2}, {"num_stages": 2}], ids=str)
def test_adapters_update_towers_where_pictures_are_read_alone(tmp_path: Path, split: dict[str, int]) -> None:
    build(tiny_config(WHOLE["qwen3_vl"])).save_pretrained(tmp_path)
    limits = AdapterLimits(max_in_step=1, max_in_memory=1, max_rank=8)
    config = WorkerConfig(model_path=str(tmp_path), adapter_limits=limits, **split)
    for device in (CpuDevice(config), StandInGpu(config)):
        targets = foresee_layers(config, find_kind(config), device)[2]
        assert targets.reads_pictures is ("num_stages" not in split)


@pytest.mark.night
def test_without_the_libraries_of_a_tower_the_text_part_is_served_alone(tmp_path: Path) -> None:
    """The published files hold the tower; neither timm nor Pillow comes with the product."""
    [family] = [each for each in MATRIX if each.name == "gemma3n_text"]
    model = build(tiny_config(family))
    model.save_pretrained(tmp_path)
    write_as_part(tmp_path, model.config, "gemma3n", "model.vision_tower.timm_model.conv_stem.conv.weight")
    answers = served(tmp_path)
    assert answers == likeliest(model, answers)


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    [family] = [each for each in MATRIX if each.name == "deepseek_v3"]
    model = build(tiny_config(family))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2"}))
    answers = served(tmp_path)
    assert answers == likeliest(model, answers)


@pytest.mark.parametrize("model_type", ["diffusion_gemma", "blip"])
def test_a_family_that_generates_in_another_way_is_refused(model_type: str) -> None:
    with pytest.raises(FamilyRefused, match="do not generate text token by token"):
        generating_class(CONFIG_MAPPING[model_type]())


def write_as_part(folder: Path, config: Any, whole: str, tower: str) -> None:
    """Rewrite a saved text model as a part of a whole checkpoint, with a tensor of its tower."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed | {tower: torch.ones(2, 2)}, folder / "model.safetensors", metadata={"format": "pt"})
    text = {"model_type": whole, "text_config": config.to_dict(), "architectures": ["AnyOfThem"]}
    (folder / "config.json").write_text(json.dumps(text))
