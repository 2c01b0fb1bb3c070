"""Pictures, files that are none, and a checkpoint's folder for them."""

import io
import json
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from engine.media.pictures import PicturePreparer
from engine.options.media_options import MediaConfig
from engine.types import VisionFacts

SEEN = VisionFacts(family="qwen3_vl", image_token_id=9, num_cache_tokens=4096)


def pictures_of(folder: Path, config: MediaConfig | None = None) -> PicturePreparer:
    """Open a checkpoint that `write_checkpoint` has written."""
    return PicturePreparer(str(write_checkpoint(folder)), config or MediaConfig(), {}, "<|image_pad|>".format)


def write_checkpoint(folder: Path) -> Path:
    """Write the files of a Qwen3-VL that say how it sees: patches of 8 pixels, four to a token."""
    config = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 8, "spatial_merge_size": 2}}
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 8,
        "merge_size": 2,
        "size": {"shortest_edge": 16 * 16 * 4, "longest_edge": 16 * 16 * 4096},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def noise(width: int, height: int, *, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def file_of(image: Image.Image, kind: str = "PNG", **how: object) -> bytes:
    written = io.BytesIO()
    image.save(written, kind, **how)
    return written.getvalue()


def picture(width: int = 64, height: int = 48, *, seed: int = 0) -> bytes:
    return file_of(noise(width, height, seed=seed))


def _chunk(kind: bytes, content: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + check


def png_of(width: int, height: int, pixels: bytes, *, depth: int = 8, color: int = 2) -> bytes:
    """Write a PNG whose header says what it likes."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    body = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(pixels)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def hostile_files() -> dict[str, bytes]:
    """Thirty files that claim to be pictures, and are not to be taken."""
    png, jpeg = picture(), file_of(noise(64, 48), "JPEG")
    gif, webp = file_of(noise(64, 48), "GIF"), file_of(noise(64, 48), "WEBP")
    moving = [noise(32, 32, seed=seed) for seed in range(3)]
    return {
        "nothing": b"",
        "a text": b"a cat on a mat",
        "an svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        "a page": b"<html><img src=x></html>",
        "a zip": b"PK\x03\x04" + bytes(64),
        "a pdf": b"%PDF-1.7\n" + bytes(64),
        "a tiff": file_of(noise(64, 48), "TIFF"),
        "a bmp": file_of(noise(64, 48), "BMP"),
        "an icon": file_of(noise(64, 48), "ICO"),
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 48\n",
        "a png's first bytes": png[:8],
        "a png's header": png[:33],
        "half a png": png[: len(png) // 2],
        "a png of zeros": png[:40] + bytes(len(png) - 40),
        "a png with a wrong sum": png[:60] + bytes([png[60] ^ 255]) + png[61:],
        "a png of 10 gigapixels": png_of(100_000, 100_000, bytes(64)),
        "a png of 4 gigapixels each side": png_of(2**31 - 1, 2**31 - 1, b""),
        "a png without a side": png_of(0, 64, b""),
        "a png of one pixel": png_of(1, 1, bytes(4)),
        "a png as thin as a hair": png_of(8, 3000, bytes(25 * 3000)),
        "a png of too few pixels": png_of(64, 48, bytes(100)),
        "a png of an odd depth": png_of(64, 48, bytes(9264), depth=5),
        "a jpeg's first bytes": jpeg[:3],
        "half a jpeg": jpeg[: len(jpeg) // 2],
        "a jpeg of 4 gigapixels": jpeg.replace(
            struct.pack(">HH", 48, 64), struct.pack(">HH", 65535, 65535), 1
        ),
        "a gif's first bytes": gif[:6],
        "half a gif": gif[: len(gif) // 2],
        "a moving gif": file_of(moving[0], "GIF", save_all=True, append_images=moving[1:]),
        "half a webp": webp[: len(webp) // 2],
        "a webp of nothing": b"RIFF\xff\xff\xff\xffWEBPVP8 " + bytes(32),
    }
