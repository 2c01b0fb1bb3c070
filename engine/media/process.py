"""The process that prepares pictures: `python -m engine.media.process PARENT_PID`.

Owns: its limits on memory and time, which the kernel keeps whatever a file makes its decoder do; the image
processor of the checkpoint; the removal of shared memory where its parent has ended without.
Never: loads a tensor library: image processors of transformers need none, and start in a second without.
"""

import errno
import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.modules["torch"] = None  # type: ignore[assignment]

import numpy as np  # noqa: E402
from safetensors.numpy import save  # noqa: E402

from engine.media.decoding import PictureRefused, decode  # noqa: E402
from engine.media.families import FAMILIES, NOT_FOR_THE_TOWER, Seen  # noqa: E402
from engine.media.messages import (  # noqa: E402
    SHARED_MEMORY,
    Detail,
    PictureOrder,
    Preparation,
    PreparedPicture,
    most_seconds,
)
from engine.media.picture_files import kind_of  # noqa: E402
from engine.processes.child_process import leave_signals_to_parent  # noqa: E402
from engine.processes.frames import answer, read_message, take_standard_output  # noqa: E402

_MIN_MEMORY_BYTES = 4 * 2**30
"""Address space: a picture of 33 million pixels and its copies take a third."""
_BYTES_OF_PIXEL = 64
"""Address space for larger pictures."""
_NICENESS = 5
_MAX_REASON_CHARS = 240
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Older names for the bounds of `size` to those of today."""


def main() -> None:
    """Answer messages until standard input ends, which is when the parent does, however it ends."""
    leave_signals_to_parent()
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = take_standard_output()
    preparation = read_message(Preparation)
    if preparation is None:
        return
    try:
        preparer = _Preparer(preparation)
    except Exception as error:  # noqa: BLE001 -- files of strangers, read by transformers
        if _may_pass(error):
            sys.exit(f"pictures: {_one_line(error)}")  # the next picture begins another process
        answer(answers, PreparedPicture(refusal=_one_line(error)))
        return
    max_bytes = max(_MIN_MEMORY_BYTES, _BYTES_OF_PIXEL * preparation.max_pixels)
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    answer(answers, PreparedPicture())
    while (order := read_message(PictureOrder)) is not None:
        limit_s = int(time.process_time() + most_seconds(preparation.max_pixels)) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))
        answer(answers, preparer.prepare(order))
        del order
    for left in SHARED_MEMORY.glob(f"{preparation.prefix}*"):
        left.unlink(missing_ok=True)


class _Preparer:
    """The image processor of one checkpoint, and its family's rule."""

    def __init__(self, preparation: Preparation) -> None:
        """Raises any error for a checkpoint without a usable image processor, ValueError for wrong values."""
        from transformers import AutoImageProcessor  # not at the top: its errors are refusals

        folder = Path(preparation.folder)
        self._config = json.loads((folder / "config.json").read_bytes())
        self._rule = FAMILIES[preparation.family]
        self._max_pixels = preparation.max_pixels
        patch = (self._config.get("vision_config") or {}).get("patch_size") or 1
        self._least_side = int(min(patch) if isinstance(patch, list) else patch)
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        given = {_EDGES.get(name, name): value for name, value in preparation.processor_kwargs.items()}
        size = dict(getattr(self._processor, "size", None) or {})
        bounds = {name: given.pop(name) for name in _EDGES.values() if name in given}
        unknown = [*bounds.keys() - size.keys()]
        unknown += [each for each in given if not hasattr(self._processor, each)]
        if unknown:
            raise ValueError(f"the image processor of this checkpoint has no {unknown[0]}")
        self._arguments = {**self._rule.call, **given}
        if self._rule.is_given_patches:
            self._arguments["patch_size"] = Seen({}, self._config).pixels_of_token
        self._size = {name: value for name, value in {**size, **bounds}.items() if value is not None}
        if bounds:
            self._arguments["size"] = self._size

    def prepare(self, order: PictureOrder) -> PreparedPicture:
        """Decode a picture, and put what the tower gets into shared memory."""
        try:
            kind = kind_of(order.content)
            if kind is None:
                raise PictureRefused("it is no PNG, JPEG, WebP or GIF file")
            image = decode(order.content, kind, max_pixels=self._max_pixels, least_side=self._least_side)
            arguments = self._arguments if order.detail is Detail.AUTO else self._low_arguments()
            return self._stored(self._processor(images=[image], return_tensors="np", **arguments), order)
        except PictureRefused as error:
            return PreparedPicture(refusal=str(error))
        except MemoryError:
            return PreparedPicture(refusal="preparing it takes too much memory")
        except Exception as error:  # noqa: BLE001 -- the image processor's
            return PreparedPicture(refusal=f"the model's image processor refuses it: {_one_line(error)}")

    def _low_arguments(self) -> dict[str, Any]:
        arguments = {**self._arguments, **self._rule.low_detail}
        if self._rule.low_longest_edge is not None:
            bound = min(self._size["longest_edge"], self._rule.low_longest_edge)
            least = self._size.get("shortest_edge", 1)
            arguments["size"] = {**self._size, "longest_edge": max(bound, least)}
        return arguments

    def _stored(self, outputs: Mapping[str, Any], order: PictureOrder) -> PreparedPicture:
        arrays = {name: np.asarray(value) for name, value in outputs.items()}
        numbers = {name: array.tolist() for name, array in arrays.items() if name != "pixel_values"}
        tower = {name: _plain(array) for name, array in arrays.items() if name not in NOT_FOR_THE_TOWER}
        content = save(tower)
        if len(content) > order.max_bytes or not _write(order.segment, content):
            return PreparedPicture(lacks_room=True, num_bytes=len(content))
        grid = numbers["image_grid_thw"][0] if "image_grid_thw" in numbers else (0, 0, 0)
        pieces = self._rule.pieces(Seen(numbers, self._config))
        return PreparedPicture(pieces=pieces, num_bytes=len(content), grid=tuple(grid))


def _plain(array: Any) -> Any:
    """Return numbers in the types of the contract: float32 and integers, row by row."""
    return np.ascontiguousarray(array, dtype=np.float32 if array.dtype.kind == "f" else None)


def _write(segment: str, content: bytes) -> bool:
    """Write shared memory; False if there is no room.

    It is reserved first: a page that is missing later would end the process that touches it.
    """
    path = SHARED_MEMORY / segment
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as opened:
        try:
            os.posix_fallocate(descriptor, 0, len(content))
        except OSError as error:
            path.unlink()
            if error.errno != errno.ENOSPC:
                raise
            return False
        opened.write(content)
    return True


def _may_pass(error: Exception) -> bool:
    """Tell whether an error is the machine's, as too many open files are, and not the checkpoint's."""
    is_of_system = isinstance(error, OSError) and error.errno not in (None, errno.ENOENT, errno.EACCES)
    return is_of_system or isinstance(error, MemoryError)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__


if __name__ == "__main__":
    main()
