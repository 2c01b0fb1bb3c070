"""A picture's file to pixels: every check before they are decoded, then one frame, upright, in RGB.

Never: runs outside of the process that prepares pictures: decoders are programs that strangers feed.
"""

import io
import warnings
from collections.abc import Mapping
from typing import Final

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

MAX_ASPECT: Final = 200
"""Longer side by shorter side: image processors refuse more."""


_MAX_SCANS: Final = 100
"""Passes over the pixels of a JPEG; encoders write ten or so."""
_BYTES_OF_CHANCE: Final = 2**14
"""Behind the picture there may be a film, where the mark of a scan comes by chance every 64 KiB."""
_TURNS: Final[Mapping[object, Image.Transpose]] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Ways to turn a picture by the orientation of its EXIF."""


class PictureRefused(Exception):
    """A picture that is not taken; the reason may be shown to clients."""


def decode(content: bytes, kind: str, *, max_pixels: int, least_side: int) -> Image.Image:
    """Decode a file of one kind. Raises PictureRefused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about strange metadata
            Image.MAX_IMAGE_PIXELS = max_pixels  # its own bound is another
            opened = Image.open(io.BytesIO(content), formats=(kind,))
            _check_size(*opened.size, max_pixels=max_pixels, least_side=least_side)
            if kind == "JPEG" and content.count(b"\xff\xda") > _MAX_SCANS + len(content) // _BYTES_OF_CHANCE:
                raise PictureRefused(f"it has more than {_MAX_SCANS} scans")
            # The further images of a phone's photograph (MPO) are its depth or light.
            if getattr(opened, "is_animated", False) and opened.format != "MPO":
                raise PictureRefused("it has several frames; send one of them")
            opened.load()
            return _in_rgb(_upright(opened))
    except Image.DecompressionBombError:
        raise PictureRefused(f"its header says more pixels than the {max_pixels} that are taken") from None
    except UnidentifiedImageError:
        raise PictureRefused(f"it is no {kind} file, though it begins as one") from None
    except (MemoryError, PictureRefused):
        raise
    except Exception as error:  # decoders raise anything for a file that is cut off or wrong
        raise PictureRefused(f"its {kind} file is broken or cut off") from error


def _check_size(width: int, height: int, *, max_pixels: int, least_side: int) -> None:
    if width * height > max_pixels:
        raise PictureRefused(f"it has {width} x {height} pixels; at most {max_pixels} in all are taken")
    if min(width, height) < least_side:
        raise PictureRefused(f"it has {width} x {height} pixels; a side must have {least_side} at least")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise PictureRefused(
            f"it has {width} x {height} pixels: one side is over {MAX_ASPECT} times the other"
        )


def _upright(image: Image.Image) -> Image.Image:
    """Turn a picture as its metadata says. Those that cannot be read say nothing, and the pixels count."""
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 -- of a file of strangers, for which no other viewer refuses it
        return image
    return image if turn is None else image.transpose(turn)


def _in_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode; what is transparent becomes white, as pages are."""
    if image.mode.startswith("I"):  # 16 bits; Pillow itself would cut off all above 255
        return Image.fromarray((np.asarray(image, dtype=np.uint32) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")
