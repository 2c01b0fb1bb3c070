"""Screenshots to one moving picture, an animated PNG, for README.md.

    PAGE_IMAGES=build/pictures python -m pytest tests/e2e/test_page_in_browser.py
    python scripts/moving_picture.py build/pictures/frame-*.png docs/images/page-moving.png

Owns: the palette that all frames share, and the pixels of a frame that differ from the one before.
Never: takes screenshots, or scales them.
Source: Portable Network Graphics, third edition (W3C), sections 9 (filters) and 11 (chunks).

Shapes: H rows, W columns, C channels, L bytes of a row.
"""

import argparse
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_NUM_COLOURS = 255
_SAME = 255
"""Index of the colour that lets the frame before shine through."""
_BITS = 4
"""Bits of a channel that are dropped where colours are counted: greys of letters are many and alike."""
_MILLISECONDS = 400
_LAST_MILLISECONDS = 2500


def read_png(data: bytes) -> Pixels:
    """Decode a screenshot, of 8 bits and RGB or RGBA, not interlaced, to RGB [H, W, 3]."""
    chunks = dict[bytes, bytes]()
    place = len(_SIGNATURE)
    while place < len(data):
        size, name = struct.unpack_from(">I4s", data, place)
        chunks[name] = chunks.get(name, b"") + data[place + 8 : place + 8 + size]
        place += size + 12
    width, height, depth, kind, _, _, is_interlaced = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    if depth != 8 or kind not in (2, 6) or is_interlaced:
        raise SystemExit("a screenshot has 8 bits and three or four channels, and is not interlaced")
    num_channels = 3 if kind == 2 else 4
    raw_HL = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    rows_HWC = np.zeros((height + 1, width + 1, num_channels), np.uint8)  # with a border of zeros
    for row, line in enumerate(raw_HL, start=1):
        _unfilter(int(line[0]), line[1:].reshape(width, num_channels), rows_HWC[row - 1], rows_HWC[row])
    return np.ascontiguousarray(rows_HWC[1:, 1:, :3])


def _unfilter(kind: int, line_WC: Pixels, above_WC: Pixels, row_WC: Pixels) -> None:
    """Undo the filter of one row into row_WC, whose first column is the border."""
    if kind == 0:
        row_WC[1:] = line_WC
    elif kind == 1:
        row_WC[1:] = np.cumsum(line_WC, axis=0, dtype=np.uint8)
    elif kind == 2:
        row_WC[1:] = line_WC + above_WC[1:]
    else:
        line, above = line_WC.astype(int).tolist(), above_WC.astype(int).tolist()
        left = [0] * line_WC.shape[1]
        for column, values in enumerate(line, start=1):
            left = [
                (value + _guess(kind, left[n], above[column][n], above[column - 1][n])) & 255
                for n, value in enumerate(values)
            ]
            row_WC[column] = left


def _guess(kind: int, left: int, above: int, corner: int) -> int:
    if kind == 3:
        return (left + above) // 2
    distances = (abs(above - corner), abs(left - corner), abs(left + above - 2 * corner))
    return (left, above, corner)[distances.index(min(distances))]


def palette_of(frames: Sequence[Pixels]) -> Pixels:
    """Choose the colours that are most frequent in all frames, [_NUM_COLOURS, 3]."""
    pixels = np.concatenate([frame.reshape(-1, 3) for frame in frames])
    coarse = (pixels >> _BITS).astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])
    _, group, counts = np.unique(coarse, return_inverse=True, return_counts=True)
    sums = np.stack([np.bincount(group, pixels[:, channel]) for channel in range(3)], axis=1)
    means = sums / counts[:, None]
    return means[np.argsort(-counts)[:_NUM_COLOURS]].round().astype(np.uint8)


def indexed(frame: Pixels, palette: Pixels) -> Pixels:
    """The index of the nearest colour for each pixel, [H, W]."""
    distinct, where = np.unique(frame.reshape(-1, 3), axis=0, return_inverse=True)
    distances = ((distinct[:, None].astype(int) - palette[None].astype(int)) ** 2).sum(-1)
    return distances.argmin(1).astype(np.uint8)[where].reshape(frame.shape[:2])


def animated(frames: Sequence[Pixels]) -> bytes:
    """Encode frames of one size; each after the first has only the pixels that differ."""
    palette = palette_of(frames)
    images = [indexed(frame, palette) for frame in frames]
    height, width = images[0].shape
    colours = np.vstack([palette, np.zeros((256 - len(palette), 3), np.uint8)])
    parts = [
        _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        _chunk(b"acTL", struct.pack(">II", len(images), 0)),
        _chunk(b"PLTE", colours.tobytes()),
        _chunk(b"tRNS", bytes([255] * _SAME + [0])),
        *_frames(images),
        _chunk(b"IEND", b""),
    ]
    return _SIGNATURE + b"".join(parts)


def _frames(images: Sequence[Pixels]) -> Iterator[bytes]:
    number = 0
    before = None
    for place, image in enumerate(images):
        shown, top, left = image, 0, 0
        if before is not None:
            rows, columns = np.nonzero(image != before)
            if not len(rows):
                rows = columns = np.array([0])
            top, left = int(rows.min()), int(columns.min())
            box = np.s_[top : int(rows.max()) + 1, left : int(columns.max()) + 1]
            shown = np.where(image[box] == before[box], _SAME, image[box]).astype(np.uint8)
        height, width = shown.shape
        milliseconds = _LAST_MILLISECONDS if place == len(images) - 1 else _MILLISECONDS
        control = struct.pack(">IIIIIHHBB", number, width, height, left, top, milliseconds, 1000, 0, 1)
        yield _chunk(b"fcTL", control)
        lines = np.hstack([np.zeros((height, 1), np.uint8), shown])
        data = zlib.compress(lines.tobytes(), 9)
        yield (
            _chunk(b"IDAT", data) if before is None else _chunk(b"fdAT", struct.pack(">I", number + 1) + data)
        )
        number += 1 if before is None else 2
        before = image


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="moving_picture.py", description=__doc__)
    parser.add_argument("screenshots", nargs="+", type=Path)
    parser.add_argument("picture", type=Path)
    given = parser.parse_args(words)
    frames = [read_png(path.read_bytes()) for path in sorted(given.screenshots)]
    given.picture.write_bytes(animated(frames))
    print(f"{len(frames)} frames, {given.picture.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
