"""The messages between the API process and the process that prepares pictures."""

from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

SHARED_MEMORY = Path("/dev/shm")
"""The folder in which the kernel shows shared memory by its name."""
_PREPARING_S = 5.0
"""Processor time for one picture: one of 33 million pixels takes some 2 s."""
_PIXELS_OF_IT = 33_177_600


def most_seconds(max_pixels: int) -> float:
    """Return the processor time that one picture may take: others wait meanwhile."""
    return _PREPARING_S * max(1.0, max_pixels / _PIXELS_OF_IT)


class Detail(StrEnum):
    """The amount of detail that a picture is read with."""

    AUTO = "auto"  # as the checkpoint says
    LOW = "low"  # the fewest tokens that the image processor has a way to


class Preparation(msgspec.Struct, frozen=True, kw_only=True):
    """The model's way with pictures, sent to the process once."""

    folder: str
    """The checkpoint folder, which holds preprocessor_config.json or processor_config.json."""
    family: str
    processor_kwargs: dict[str, Any]
    """The operator's values for the image processor."""
    max_pixels: int
    prefix: str
    """Beginning of the names of all shared memory, which the process removes when its parent has ended."""


class PictureOrder(msgspec.Struct, frozen=True, kw_only=True):
    content: bytes
    """A file: PNG, JPEG, WebP or GIF."""
    detail: Detail
    segment: str
    """Name for the shared memory."""
    max_bytes: int
    """Room for it."""


class PreparedPicture(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a Preparation and to each PictureOrder."""

    refusal: str = ""
    """The reason, which may be shown to clients; empty if there is none."""
    lacks_room: bool = False
    """There was no room in shared memory for `num_bytes`."""
    pieces: tuple[int | str, ...] = ()
    """Prompt tokens of the picture in their order: numbers of image tokens, and texts between them."""
    num_bytes: int = 0
    """Size of the shared memory."""
    grid: tuple[int, int, int] = (0, 0, 0)
    """Frames, rows and columns of patches, where the family has such a grid; else zeros."""
