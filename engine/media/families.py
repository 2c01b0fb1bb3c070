"""Families of models that read pictures: how each writes one into a prompt.

Owns: one row for each family: the mark that its chat template puts for a picture, the text around it, and
the tokens that stand for the picture itself.
Never: reads a picture or a checkpoint. Names of tokens are those of tokenizer_config.json.
Source: the processors of transformers, which tests hold these rules against.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple

Pieces = tuple[int | str, ...]
"""Numbers of image tokens, and texts between them."""

NOT_FOR_THE_TOWER: Final = frozenset(
    {"num_crops", "num_patches", "num_soft_tokens_per_image", "rows", "cols"}
)
"""Outputs of image processors that are for the prompt alone."""


class Seen(NamedTuple):
    """A picture as its image processor has seen it."""

    outputs: Mapping[str, Any]
    """All but the pixels, as lists, by name."""
    config: Mapping[str, Any]
    """The checkpoint's config.json."""

    @property
    def vision(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.config.get("vision_config") or {}
        return found

    @property
    def pixels_of_token(self) -> int:
        """Side of the square of pixels that one token of a Pixtral tower stands for."""
        return int(self.vision.get("patch_size", 16) * self.config.get("spatial_merge_size", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureRule:
    """The way in which one family writes a picture."""

    pieces: Callable[[Seen], Pieces]
    """The tokens in place of one image token."""
    mark: str = "{image}"
    """The template's mark for a picture; {image} is the image token, other names are the tokenizer's."""
    frame: str = "{image}"
    """Text that takes the place of the mark before the prompt is tokenized."""
    call: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the image processor for any picture."""
    is_given_patches: bool = False
    """The image processor does not know the size of a token's square, which config.json has."""
    low_detail: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for pictures of low detail."""
    low_longest_edge: int | None = None
    """Bound of the processor's `size` for these; None: it stays."""


def _of_grid(seen: Seen) -> Pieces:
    return (prod(seen.outputs["image_grid_thw"][0]) // seen.vision.get("spatial_merge_size", 2) ** 2,)


def _of_gemma3(seen: Seen) -> Pieces:
    return (seen.config.get("mm_tokens_per_image", 256),)


def _of_gemma4(seen: Seen) -> Pieces:
    return (seen.outputs["num_soft_tokens_per_image"][0],)


def _of_internvl(seen: Seen) -> Pieces:
    return (seen.config.get("image_seq_length", 256) * seen.outputs["num_patches"][0],)


def _of_pixtral(seen: Seen) -> Pieces:
    height, width = seen.outputs["image_sizes"][0]
    num_columns = width // seen.pixels_of_token
    row = (num_columns, "[IMG_BREAK]")
    return (*(row * (height // seen.pixels_of_token - 1)), num_columns, "[IMG_END]")


def _of_tiles(seen: Seen) -> Pieces:
    """Tiles row by row, each behind its place, and the whole picture at the end."""
    side = seen.vision.get("image_size", 224) // seen.vision.get("patch_size", 32)
    num_tokens = side**2 // seen.config.get("scale_factor", 2) ** 2
    num_rows, num_columns = seen.outputs["rows"][0][0], seen.outputs["cols"][0][0]
    edge, line_end = "<fake_token_around_image>", ""
    pieces: list[int | str] = []
    for row in range(1, num_rows + 1):
        for column in range(1, num_columns + 1):
            pieces += [f"{line_end}{edge}<row_{row}_col_{column}>", num_tokens]
            line_end = ""
        line_end = "\n"
    return (*pieces, f"{line_end}{line_end}{edge}<global-img>", num_tokens, edge)


_LOW_SIDE: Final = 512
"""Side of the largest square picture of low detail, as OpenAI's reference has it."""
_GRID: Final = PictureRule(pieces=_of_grid, low_longest_edge=_LOW_SIDE**2)
_TILES: Final = PictureRule(
    pieces=_of_tiles,
    call={"return_row_col_info": True},
    low_detail={"do_image_splitting": False},
)

FAMILIES: Final[Mapping[str, PictureRule]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _GRID),
    **dict.fromkeys(("glm4v", "glm4v_moe"), _GRID),
    **dict.fromkeys(("smolvlm", "idefics3"), _TILES),
    "mistral3": PictureRule(pieces=_of_pixtral, is_given_patches=True, low_longest_edge=_LOW_SIDE),
    "gemma3": PictureRule(
        pieces=_of_gemma3,
        mark="{boi_token}",
        frame="\n\n{boi_token}{image}{eoi_token}\n\n",
        call={"do_pan_and_scan": False},
    ),
    "gemma4": PictureRule(
        pieces=_of_gemma4,
        frame="{boi_token}{image}{eoi_token}",
        low_detail={"max_soft_tokens": 70},
    ),
    "internvl": PictureRule(
        pieces=_of_internvl,
        frame="{start_image_token}{image}{end_image_token}",
        call={"crop_to_patches": True},
        low_detail={"crop_to_patches": False},
    ),
}
"""Rules by the whole model's `model_type`."""
