"""The header of a GGUF file: its metadata, and where each tensor lies.

Owns: the parsing, bounded by the file's own length, the sizes of the types of blocks, and of which tensors a
weight is made.
Source: the GGUF specification, versions 2 and 3. The package gguf reads it too, but takes 10 s and 0.5 GB for
the tokens of a large vocabulary.
"""

import math
import mmap
import re
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from worker.checkpoint.gguf.layouts import Change
from worker.worker_errors import StartupError, refused_as

_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_ALIGNMENT = 1 << 16
_MOST_DIMENSIONS = 4
_MOST_ENTRIES = 1 << 22
"""Limit of a list, and of tensors; vocabularies have some hundred thousand of tokens and merges."""
_STRING, _ARRAY = 8, 9
_SCALARS = {
    number: struct.Struct(f"<{code}")
    for number, code in enumerate(("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d"))
    if code
}
"""Types of values by their numbers."""
damaged = partial(StartupError, fix="download it again")
other_file = partial(StartupError, fix="take another GGUF file")
other_form = partial(StartupError, fix="take the model's safetensors")
"""Refusals, by what the operator is to do."""
MAGIC = b"GGUF"
BLOCKS = "gguf"
"""Last name of a weight of the model that is stored as blocks of codes."""
WEIGHTS = "model.gguf"
"""Name of the link to a file in its folder (folder.py), to the first part if there are several."""
_LINKS = "model*.gguf"
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MOST_PARTS = 1000


class GgufType(Enum):
    """Types of tensors that are read: their number in a file, weights of a block, and bytes of a block.

    Then, of what is loaded of them, bits of a weight, weights of a group, and numbers for each group.
    """

    F32 = (0, 1, 4, 32, 1, 0)
    F16 = (1, 1, 2, 16, 1, 0)
    Q4_0 = (2, 32, 18, 4, 32, 1)
    Q4_1 = (3, 32, 20, 4, 32, 2)
    Q5_0 = (6, 32, 22, 8, 32, 1)
    Q5_1 = (7, 32, 24, 8, 32, 2)
    Q8_0 = (8, 32, 34, 8, 32, 1)
    Q4_K = (12, 256, 144, 4, 32, 2)
    Q5_K = (13, 256, 176, 8, 32, 2)
    Q6_K = (14, 256, 210, 8, 16, 1)
    IQ4_NL = (20, 32, 18, 4, 32, 1)
    IQ4_XS = (23, 256, 136, 4, 32, 1)
    BF16 = (30, 1, 2, 16, 1, 0)
    MXFP4 = (39, 32, 17, 4, 32, 1)

    @property
    def block_size(self) -> int:
        return self.value[1]

    @property
    def block_bytes(self) -> int:
        return self.value[2]

    @property
    def is_plain(self) -> bool:
        """Whether the numbers stand for themselves."""
        return self.block_size == 1


_TYPES = {each.value[0]: each for each in GgufType}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor as the header describes it."""

    type: GgufType
    shape: tuple[int, ...]
    """The last dimension is the one whose numbers lie together, as torch has it."""
    path: Path
    """The file, which is one of several for a model in parts."""
    start: int
    """First byte in the file."""
    num_bytes: int

    def matrices(self) -> list["GgufTensor"]:
        """Divide a stack of matrices, which lie one behind the other."""
        count, *shape = self.shape
        size = self.num_bytes // max(1, count)
        return [
            replace(self, shape=tuple(shape), start=self.start + number * size, num_bytes=size)
            for number in range(count)
        ]


@dataclass(frozen=True, slots=True)
class GgufWeight:
    """One weight of the model: the tensors that it is made of, and the change of their numbers."""

    name: str
    """The model's name for it; the last part is BLOCKS where codes stay as they are."""
    tensors: tuple[GgufTensor, ...]
    change: Change

    @property
    def has_codes(self) -> bool:
        return self.name.endswith(f".{BLOCKS}")


_NO_DEFAULT = object()


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A header that was read."""

    path: Path
    num_bytes: int
    metadata: dict[str, Any]
    """Numbers, texts, truth values, and lists of one of them."""
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    @property
    def num_layers(self) -> int:
        """Layers of the model, without those that predict further tokens."""
        found = self.number("block_count")
        if found > len(self.tensors):
            raise other_file(f"{self.path.name} has {len(self.tensors)} tensors for {found} layers")
        further = self.number("nextn_predict_layers", 0)
        if further and further >= found:
            raise other_file(f"{self.architecture}.nextn_predict_layers is {further} of {found} layers")
        return found - further

    def value(self, key: str, default: Any = _NO_DEFAULT) -> Any:
        """Look a key of the architecture up. Raises StartupError where it is missing."""
        found = self.metadata.get(f"{self.architecture}.{key}", default)
        if found is _NO_DEFAULT:
            raise damaged(f"{self.path.name} has no {self.architecture}.{key} in its metadata")
        return found

    def number(self, key: str, default: Any = _NO_DEFAULT) -> int:
        """Look a count up, which may be written once for each layer. Raises StartupError."""
        found = self.value(key, default)
        if isinstance(found, list) and found and len(set(found)) == 1:
            found = found[0]
        if not isinstance(found, int) or found < 0:
            raise other_file(f"{self.architecture}.{key} is {str(found)[:80]}, and not one number")
        return found

    def by_layer(self, key: str) -> list[Any]:
        """Look a list up that has a value for each layer, or one value for all. Raises StartupError."""
        found = self.value(key)
        if not isinstance(found, list):
            found = [found] * self.num_layers
        if len(found) < self.num_layers:
            raise other_file(f"{self.architecture}.{key} is for {len(found)} of {self.num_layers} layers")
        return found[: self.num_layers]


class _Cursor:
    """A place in the file. Raises ValueError beyond its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.place = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.place + num_bytes
        if end > len(self._data):
            raise ValueError("the header is cut off")
        found = self._data[self.place : end]
        self.place = end
        return found

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def length(self) -> int:
        return int(self.number(_SCALARS[10]))

    def text(self) -> str:
        # Vocabularies have tokens that are pieces of characters.
        return self.take(self.length()).decode("utf-8", errors="replace")

    def texts(self, count: int) -> list[str]:
        """Texts one after the other, in a loop of few calls: a vocabulary has some hundred thousand."""
        data, place, length_of, found = self._data, self.place, _SCALARS[10].unpack_from, []
        for _ in range(count):  # each takes 8 bytes at least
            start = place + 8
            place = start + length_of(data, place)[0]
            if place > len(data):
                raise ValueError("the header is cut off")
            found.append(data[start:place].decode("utf-8", "replace"))
        self.place = place
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"its metadata have a value of unknown type {kind}")
        inner, count = self.number(_SCALARS[4]), self.length()
        if count > _MOST_ENTRIES:
            raise ValueError(f"its metadata have a list of {count} entries")
        if inner == _STRING:
            return self.texts(count)
        if inner not in _SCALARS:
            raise ValueError(f"its metadata have a list of unknown type {inner}")
        form = _SCALARS[inner]
        return [value for (value,) in form.iter_unpack(self.take(count * form.size))]


def begins_as_gguf(path: Path) -> bool:
    """Tell a GGUF file by its first bytes, whatever its name is."""
    with suppress(OSError), path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC
    return False


def parts_in(folder: Path) -> list[Path]:
    """Find the links to a model's files, in their order; none in a folder of another kind."""
    return sorted(folder.glob(_LINKS), key=lambda each: (len(each.name), each.name))


def part_paths(path: Path) -> list[Path]:
    """Name all parts of a model, of which `path` is the first; itself if it is whole. Raises StartupError."""
    found = PART.fullmatch(path.name)
    if found is None:
        return [path]
    stem, number, count = found[1], int(found[2]), int(found[3])
    paths = [path.with_name(f"{stem}-{each:05}-of-{count:05}.gguf") for each in range(1, count + 1)]
    if number != 1 or not 0 < count <= _MOST_PARTS:
        first = f"{stem}-00001-of-{count:05}.gguf"
        raise StartupError(f"{path.name} is one part of several", fix=f"name the first one, {first}")
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        raise damaged(f"{path.parent} lacks {missing[0]}, a part of {path.name}")
    return paths


def read_parts(paths: Sequence[Path]) -> tuple[GgufFile, list[GgufFile]]:
    """Read the headers of all parts of a model, in order: the whole, and each with the whole's metadata.

    Raises StartupError where they are not all parts of it.
    """
    first, *others = parts = [read_gguf(each) for each in paths]
    for number, part in enumerate(parts):
        count, place = part.metadata.get("split.count") or 1, part.metadata.get("split.no", 0)
        if (count, place) != (len(parts), number):
            raise damaged(
                f"{part.path.name} is part {place!s:.20} of {count!s:.20}, and not {number} of {len(parts)}"
            )
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        twice = sorted(tensors.keys() & part.tensors.keys())
        if twice:
            raise damaged(f"{part.path.name} has {twice[0]}, as a part before it has")
        tensors |= part.tensors
    if len(tensors) != first.metadata.get("split.tensors.count", len(tensors)):
        raise damaged(f"the parts of {first.path.name} have {len(tensors)} tensors")
    whole = replace(first, num_bytes=sum(each.num_bytes for each in parts), tensors=tensors)
    return whole, [first, *(replace(each, metadata=first.metadata) for each in others)]


def read_gguf(path: Path) -> GgufFile:
    """Read the header, and compare the file's size with what it promises. Raises StartupError."""
    with (
        refused_as(damaged, path),
        path.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return _read(path, _Cursor(data), len(data))


def _read(path: Path, cursor: _Cursor, num_bytes: int) -> GgufFile:
    if cursor.take(len(MAGIC)) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = cursor.number(_SCALARS[4])
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}, not 2 or 3 in the order of bytes of this machine")
    num_tensors, num_values = cursor.length(), cursor.length()
    if max(num_tensors, num_values) > _MOST_ENTRIES:
        raise ValueError(f"it has {num_tensors} tensors and {num_values} values")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        name = cursor.text()
        metadata[name] = cursor.value(cursor.number(_SCALARS[4]))
    places = {}
    for _ in range(num_tensors):
        name = cursor.text()
        if name in places:
            raise ValueError(f"it has {name} twice")
        places[name] = _read_place(cursor, name)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= _MOST_ALIGNMENT:
        raise ValueError(f"its alignment is {alignment}")
    first = -(-cursor.place // alignment) * alignment
    tensors = {
        name: _tensor(name, shape, kind, path, first + start) for name, (shape, kind, start) in places.items()
    }
    _check_places(tensors, num_bytes)
    return GgufFile(path, num_bytes, metadata, tensors)


def _check_places(tensors: dict[str, GgufTensor], num_bytes: int) -> None:
    """Raise ValueError for tensors that lie in each other, or end behind the file's end."""
    ends = {name: tensor.start + tensor.num_bytes for name, tensor in tensors.items()}
    for name, end in ends.items():
        if end > num_bytes:
            raise ValueError(f"{name} ends {end - num_bytes} bytes behind its end")
    for name, following in pairwise(sorted(tensors, key=lambda name: tensors[name].start)):
        if tensors[following].start < ends[name]:
            raise ValueError(f"{following} begins before the end of {name}")


def _read_place(cursor: _Cursor, name: str) -> tuple[tuple[int, ...], int, int]:
    """Shape, number of the type, and place behind the header."""
    num_dimensions = cursor.number(_SCALARS[4])
    if not 0 < num_dimensions <= _MOST_DIMENSIONS:
        raise ValueError(f"{name} has {num_dimensions} dimensions")
    shape = tuple(reversed([cursor.length() for _ in range(num_dimensions)]))
    if 0 in shape:
        raise ValueError(f"{name} is {list(shape)}, which holds no number")
    return shape, cursor.number(_SCALARS[4]), cursor.length()


def _tensor(name: str, shape: tuple[int, ...], kind: int, path: Path, start: int) -> GgufTensor:
    """Make a tensor. Raises ValueError for a row of no whole blocks, StartupError for an unknown type."""
    found = _TYPES.get(kind)
    if found is None:
        raise StartupError(
            f"{name} is of GGUF type number {kind}",
            fix=f"take a file whose tensors are {', '.join(each.name for each in GgufType)}",
        )
    if shape[-1] % found.block_size:
        raise ValueError(f"{name} has rows of {shape[-1]}, which are no whole blocks of {found.name}")
    return GgufTensor(found, shape, path, start, math.prod(shape) // found.block_size * found.block_bytes)
