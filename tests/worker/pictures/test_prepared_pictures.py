"""A picture's file, as the API process prepares it, read by the tower of each family."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

pytest.importorskip("PIL")

from engine.media.families import FAMILIES as RULES
from engine.media.messages import Detail
from engine.media.pictures import PicturePreparer, place
from engine.options.media_options import MediaConfig
from tests.engine.media.made_pictures import picture
from tests.worker.pictures.seeing import FAMILIES, IMAGE
from worker.devices.device import CpuDevice
from worker.pictures.eyes import FAMILIES as SEEING
from worker.pictures.eyes import Eyes
from worker.steps.pictures import read_payload
from worker.worker_config import VisionFacts, WorkerConfig

_OF_PATCHES = {"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 1024, "longest_edge": 32768}}
_SQUARE = {"size": {"height": 64, "width": 64}}
_TILED = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}
_PROCESSORS: dict[tuple[str, ...], dict[str, Any]] = {
    ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"): {
        "image_processor_type": "Qwen2VLImageProcessor",
        **_OF_PATCHES,
    },
    ("glm4v", "glm4v_moe"): {"image_processor_type": "Glm4vImageProcessor", **_OF_PATCHES},
    ("gemma3",): {"image_processor_type": "Gemma3ImageProcessor", **_SQUARE},
    ("gemma4",): {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 8, "max_soft_tokens": 70},
    ("internvl",): {"image_processor_type": "GotOcr2ImageProcessor", **_SQUARE},
    ("mistral3",): {"image_processor_type": "PixtralImageProcessorFast", "size": {"longest_edge": 128}},
    ("smolvlm",): {"image_processor_type": "SmolVLMImageProcessor", **_TILED},
    ("idefics3",): {"image_processor_type": "Idefics3ImageProcessor", **_TILED},
}
"""Settings of a processor, by the families that have it."""


def test_pictures_of_every_family_with_eyes_can_be_prepared() -> None:
    assert RULES.keys() >= SEEING
    assert {name for names in _PROCESSORS for name in names} >= SEEING


def eyes_of(name: str, folder: Path) -> Eyes:
    """A family's tower; its configuration is written into the folder."""
    config = FAMILIES[name].config()
    if name == "gemma4":
        config.vision_config.position_embedding_size = 256  # patches of a side: enough for a tall picture
    config.save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    return Eyes(model, CpuDevice(WorkerConfig(model_path="", num_threads=1)))


@pytest.mark.night
@pytest.mark.parametrize("names", _PROCESSORS, ids="-".join)
async def test_a_tower_makes_a_row_for_each_image_token_of_a_prepared_picture(names, tmp_path) -> None:
    """Pictures of one processor, with one rule, are read by the towers of all its families."""
    towers = [eyes_of(name, tmp_path) for name in names]
    assert len({id(RULES[name]) for name in names}) == 1
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(_PROCESSORS[names]))
    facts = VisionFacts(family=names[-1], image_token_id=IMAGE, num_cache_tokens=1)
    preparer = PicturePreparer(str(tmp_path), MediaConfig(), {}, str)
    lease = preparer.new_lease()
    try:
        for detail, (width, height) in product(Detail, ((180, 120), (64, 64), (40, 300))):
            file = picture(width, height)
            stored = await preparer.prepare(file, detail, facts, lease, param="field")
            token_ids, (item,) = place((1, IMAGE, 2), IMAGE, [stored], lambda text: [3] * len(text))
            num_rows = token_ids.count(IMAGE)
            assert set(token_ids[item.offset : item.end]) <= {IMAGE, 3}
            for name, eyes in zip(names, towers, strict=True):
                payload = read_payload(stored.payload)
                assert len(eyes.read(payload, num_rows).embeds_PH) == num_rows, name
    finally:
        await preparer.close()
