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


def _with_chunks(*chunks: tuple[bytes, bytes]) -> bytes:
    """Write a PNG with more chunks before its pixels."""
    png = picture()
    place = png.index(b"IDAT") - 4
    return png[:place] + b"".join(_chunk(kind, content) for kind, content in chunks) + png[place:]


def _with_segments(*segments: tuple[int, bytes]) -> bytes:
    """Write a JPEG with more segments before its pixels, each with the number of its marker."""
    jpeg = file_of(noise(64, 48), "JPEG")
    written = [struct.pack(">BBH", 255, marker, len(content) + 2) + content for marker, content in segments]
    return jpeg[:2] + b"".join(written) + jpeg[2:]


def _webp_on(width: int, height: int, *, flags: int = 0) -> bytes:
    """Write a WebP whose header says how large its canvas is."""
    header = bytes([flags, 0, 0, 0]) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", len(header)) + header + file_of(noise(64, 48), "WEBP")[12:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


def further_hostile_files() -> dict[str, bytes]:
    """Files of the kinds that hostile_files has too few of: bombs in metadata, other kinds, other frames."""
    png, jpeg, gif = picture(), file_of(noise(64, 48), "JPEG"), file_of(noise(64, 48), "GIF")
    bomb, size = zlib.compress(bytes(2**26), 1), struct.pack(">HH", 48, 64)
    phone = file_of(noise(64, 48), "MPO", save_all=True, append_images=[noise(64, 48)])
    moving = file_of(noise(64, 48), "WEBP", save_all=True, append_images=[noise(64, 48, seed=1)])
    frames = struct.pack(">II", 2**31, 0)
    return {
        "a png whose profile is a bomb": _with_chunks((b"iCCP", b"x\0\0" + bomb)),
        "a png whose text is a bomb": _with_chunks((b"zTXt", b"x\0\0" + bomb)),
        "a png whose other text is a bomb": _with_chunks((b"iTXt", b"x\0\1\0\0\0" + bomb)),
        "a png of 70 large texts": _with_chunks(*[(b"zTXt", b"x\0\0" + zlib.compress(bytes(2**20)))] * 70),
        "a png of 32 megapixels without them": png_of(8000, 4000, bytes(100)),
        "a png of two headers": _with_chunks((b"IHDR", struct.pack(">IIBBBBB", 5000, 5000, 8, 2, 0, 0, 0))),
        "a png without its palette": png_of(64, 48, bytes(65 * 48), color=3),
        "a png whose last chunk is short": png[:-12] + _chunk(b"gAMA", b"\1") + png[-12:],
        "a png of two billion frames": _with_chunks((b"acTL", frames)),
        "a png of one column": png_of(1, 65_500, bytes(4 * 65_500)),
        "a png of one row": png_of(65_500, 1, bytes(3 * 65_500 + 1)),
        "a png behind a mark of order": b"\xef\xbb\xbf" + png,
        "a png behind a line": b"\n" + png,
        "a jpeg in a png": png[:8] + jpeg,
        "a png in a jpeg": jpeg[:3] + png,
        "a jpeg without rows": jpeg.replace(size, struct.pack(">HH", 0, 64), 1),
        "a jpeg of 12 bits": jpeg.replace(b"\x08" + size, b"\x0c" + size, 1),
        "a jpeg of 255 colors": jpeg.replace(size + b"\3", size + b"\xff", 1),
        "a phone's file without its end": phone[:-5000],
        "a gif of 4 gigapixels": gif[:6] + bytes([255] * 4) + gif[10:],
        "a gif that is a program": b"GIF89a/*" + bytes(100),
        "a webp of 268 megapixels": _webp_on(2**14, 2**14),
        "a webp of 2**48 pixels": _webp_on(2**24, 2**24),
        "a webp that says it moves": _webp_on(64, 48, flags=2),
        "a moving webp": moving,
        "an avif": b"\0\0\0\x1cftypavif" + bytes(50),
        "a heic": b"\0\0\0\x18ftypheic" + bytes(50),
        "a jpeg 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(50),
        "an svg, compressed": b"\x1f\x8b\x08" + bytes(60),
        "an svg that reads a file": b'<!DOCTYPE svg [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg>&x;</svg>',
        "a photoshop file": b"8BPS\0\1" + bytes(50),
        "a ppm": b"P6 64 48 255\n" + bytes(64 * 48 * 3),
    }


def strange_files() -> dict[str, bytes]:
    """Files of 64 x 48 pixels that are odd, and whose pixels can be read."""
    png, gif = picture(), file_of(noise(64, 48), "GIF")
    in_circle = b"II*\0" + struct.pack("<IHHHIII", 8, 1, 0x8769, 4, 1, 8, 8)
    return {
        "more pixels than its header says": png_of(64, 48, bytes(2**26)),
        "one bit": png_of(64, 48, bytes(9 * 48), depth=1, color=0),
        "16 bits with transparency": png_of(64, 48, bytes((64 * 8 + 1) * 48), depth=16, color=6),
        "metadata that are none": _with_chunks((b"eXIf", b"II*\0 none at all")),
        "metadata in a circle": _with_segments((0xE1, b"Exif\0\0" + in_circle)),
        "metadata of 65535 fields": _with_segments((0xE1, b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(60))),
        "a profile in 60 parts": _with_segments(
            *[(0xE2, b"ICC_PROFILE\0" + bytes([number, 255]) + bytes(60_000)) for number in range(1, 61)]
        ),
        "a zip behind it": png + b"PK\3\4" + bytes(100),
        "a page within it": _with_chunks((b"tEXt", b"x\0<script>alert(1)</script>")),
        "20,000 texts": _with_chunks(*[(b"tEXt", b"x\0y")] * 20_000),
        "inks": file_of(noise(64, 48).convert("CMYK"), "JPEG"),
        "a screen without a side": gif[:6] + bytes(4) + gif[10:],
        "a canvas of its own": _webp_on(64, 48),
    }
