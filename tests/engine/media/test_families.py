"""Every family's rule against the text that transformers' own processor puts into a prompt."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")

import transformers
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from engine.errors import RequestRejected
from engine.media.families import FAMILIES, NOT_FOR_THE_TOWER, Seen
from engine.media.pictures import PictureMarks, PicturePreparer, place, refuse_marks
from engine.media.segments import StoredPicture
from engine.options.media_options import MediaConfig
from engine.types import VisionFacts
from scheduler.input_messages import EncoderInput, Payload
from tests.engine.media.made_pictures import noise
from tests.for_each import for_each


class Pixtral:
    """The rule of Pixtral's documentation: its processor cannot be imported without torchvision."""

    @staticmethod
    def replace_image_token(kept: SimpleNamespace, outputs: Any, number: int) -> str:
        height, width = outputs["image_sizes"][number]
        rows = [kept.image_token * len(range(0, width, 32)) for _ in range(0, height, 32)]
        return "[IMG_BREAK]".join(rows) + "[IMG_END]"


_TOKENS = {
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
}
_IMAGE = "<|image|>"
_GRID = {"vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
_TILES = {"scale_factor": 2, "vision_config": {"image_size": 64, "patch_size": 8}}
_TILED = {"size": {"longest_edge": 192}, "max_image_size": {"longest_edge": 64}}
_MERGES = SimpleNamespace(image_processor=SimpleNamespace(merge_size=2), image_token=_IMAGE)
_FAKE = {"fake_image_token": "<fake_token_around_image>", "image_token": _IMAGE, "image_seq_len": 16}
_FRAMED = {**_TOKENS, "image_token": _IMAGE}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Any, dict[str, Any]]] = {
    # Family: image processor, its settings, config.json, the processor, and what that keeps.
    "qwen3_vl": ("Qwen2VL", {"patch_size": 16, "merge_size": 2}, _GRID, Qwen3VLProcessor, vars(_MERGES)),
    "glm4v": ("Glm4v", {"patch_size": 14, "merge_size": 2}, _GRID, Glm4vProcessor, vars(_MERGES)),
    "gemma3": (
        *("Gemma3", {"size": {"height": 64, "width": 64}}, {"mm_tokens_per_image": 16}, Gemma3Processor),
        {"full_image_sequence": f"\n\n<boi>{_IMAGE * 16}<eoi>\n\n"},
    ),
    "gemma4": ("Gemma4", {"patch_size": 8, "max_soft_tokens": 70}, {}, Gemma4Processor, _FRAMED),
    "internvl": (
        *("GotOcr2", {"size": {"height": 64, "width": 64}}, {"image_seq_length": 16}, InternVLProcessor),
        {**_FRAMED, "image_seq_length": 16},
    ),
    "mistral3": (
        *("Pixtral", {"size": {"longest_edge": 256}, "patch_size": 16}),
        *({"spatial_merge_size": 2, "vision_config": {"patch_size": 16}}, Pixtral),
        {"image_token": _IMAGE},
    ),
    "smolvlm": ("SmolVLM", _TILED, _TILES, SmolVLMProcessor, {**_FAKE, "global_image_token": "<global-img>"}),
    "idefics3": (
        "Idefics3",
        _TILED,
        _TILES,
        Idefics3Processor,
        {**_FAKE, "global_image_tag": "<global-img>"},
    ),
}


@for_each([(family, size) for family in CASES for size in ((180, 120), (64, 64), (90, 600))])
def test_a_picture_is_written_as_transformers_writes_it(case) -> None:
    family, size = case
    name, settings, config, processor, kept = CASES[family]
    rule = FAMILIES[family]
    arguments = dict(rule.call)
    if rule.is_given_patches:
        arguments["patch_size"] = Seen({}, config).pixels_of_token
    image_processor = getattr(transformers, f"{name}ImageProcessorPil")(**settings)
    outputs = image_processor(images=[noise(*size)], return_tensors="np", **arguments)
    expected = processor.replace_image_token(SimpleNamespace(**kept), outputs, 0)
    seen = Seen({key: np.asarray(value).tolist() for key, value in outputs.items()}, config)
    written = "".join(_IMAGE * each if isinstance(each, int) else each for each in rule.pieces(seen))
    assert rule.frame.format(image=written, **_TOKENS) == expected
    tower = set(outputs) - NOT_FOR_THE_TOWER
    assert tower <= {
        *("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids", "pixel_attention_mask")
    }


def test_every_rule_is_one_of_those_that_were_compared() -> None:
    assert {id(rule) for rule in FAMILIES.values()} - {id(FAMILIES[family]) for family in CASES} == set()


def stored(content: str, *pieces: int | str) -> StoredPicture:
    return StoredPicture(Payload(content, f"s-{content}", 1, (0, 0, 0)), pieces)


def letters(text: str) -> list[int]:
    return [ord(each) for each in text]


def test_pictures_stand_in_place_of_their_tokens_in_order() -> None:
    rows = stored("b", 2, "x", 2, "y")
    token_ids, inputs = place((1, 9, 2, 9, 3), 9, [stored("a", 3), rows], letters)
    x, y = letters("xy")
    assert token_ids == (1, 9, 9, 9, 2, 9, 9, x, 9, 9, y, 3)
    assert inputs == (EncoderInput(1, 3, "a"), EncoderInput(5, 5, "b"))
    tiles = place((9,), 9, [stored("a", "x", 1, "y", 1, "x")], letters)
    assert tiles == ((x, 9, y, 9, x), (EncoderInput(1, 3, "a"),))


def test_a_template_without_a_place_for_each_picture_is_refused() -> None:
    for prompt in ((1, 2), (9, 9)):
        with pytest.raises(RequestRejected, match="places for 1 pictures"):
            place(prompt, 9, [stored("a", 3)], letters)


def test_words_of_the_model_in_a_text_are_not_a_pictures_place() -> None:
    marks = PictureMarks("<boi>", "x", "<|image|>")
    for text in ("so <boi> it", "<|image|>"):
        for inside in (text, [{"role": "user", "content": text}], {"a": [{text: 1}]}):
            with pytest.raises(RequestRejected, match="field: a text has"):
                refuse_marks(marks, inside, "field")
    refuse_marks(marks, [{"role": "user", "content": "a picture <image>", "n": 5}], "field")


def test_marks_are_the_tokenizers_and_absent_where_it_names_none() -> None:
    def marks(family: str, named: dict[str, str]) -> PictureMarks | None:
        facts = VisionFacts(family=family, image_token_id=7, num_cache_tokens=1)
        return PicturePreparer("", MediaConfig(), named, "<{}>".format).marks(facts)

    assert marks("gemma3", _TOKENS) == PictureMarks("<boi>", "\n\n<boi><7><eoi>\n\n", "<7>")
    assert marks("gemma3", {}) is None
    assert marks("qwen3_vl", {}) == PictureMarks("<7>", "<7>", "<7>")
