"""A checkpoint folder as files: found, read and checked before torch sees any of it.

Owns: where the folder is, its JSON files, whether its safetensors are whole, and how large once loaded.
Never: network, pickled weights, code that comes with a checkpoint.
"""

import hashlib
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from worker.checkpoint.gguf.file import WEIGHTS as GGUF
from worker.checkpoint.gguf.file import GgufFile, GgufTensor, GgufWeight, parts_in, read_parts
from worker.checkpoint.gguf.weights import find_weights_of
from worker.memory_sizes import WeightBytes
from worker.worker_errors import StartupError, refused_as

_NUM_SAMPLES, _SAMPLE_BYTES = 256, 4096
_HEADER_BYTES = 1 << 20
_READ_BYTES = 16 << 20
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_READ_SUFFIXES = frozenset({".json", ".jinja", ".model", ".tiktoken", ".safetensors", ".gguf"})
_MAX_TEXT_BYTES = 64 << 20
_MOST_COMPARED_BYTES = 1 << 30
"""Numbers that are read to see whether two files hold the same ones, at most."""
_MAX_NAME_BYTES = 255
"""Limit of file systems."""
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""
_BITS_OF_DTYPE = {
    dtype: bits
    for bits, dtypes in (
        (4, "F4"),
        (6, "F6_E2M3 F6_E3M2"),
        (8, "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ"),
        (16, "U16 I16 F16 BF16"),
        (32, "U32 I32 F32"),
        (64, "U64 I64 F64 C64"),
    )
    for dtype in dtypes.split()
}
# Last names of tensors of quantized modules (worker/quantized reads them).
_CODES = frozenset({"weight_packed", "qweight", "weight", "_weight_qdata"})
_STACKS = ("_blocks", "_proj", "_proj_packed")
"""Ends of names of all experts in one tensor."""
_SCALE_WORDS = ("scale", "weight.absmax", "SCB")
"""Parts of the names of scales, each of which becomes a number or several."""
_OWN_SCALES = ("_scale", "_scale_inv", "_weight_scale")
"""Ends of their names behind that of the codes."""
_SCALE_OF_TORCHAO = "_weight_scale"
_ZEROS = frozenset({"qzeros", "weight_zero_point", "_weight_zero_point"})
_ORDERS = frozenset({"g_idx", "weight_g_idx"})
_BYTE_CODES = frozenset({"I8", "F8_E4M3"})
_BYTES_OF_A_SCALE, _BYTES_OF_AN_INDEX = 4, 8
# The layers that kernels round, and their weights there.
_LAYER = re.compile(r"(?:\w+\.)*?layers\.\d+\.")
_ROUNDED = re.compile(r"(?:self_attn\.(?:[qkvo]|qkv)|mlp\.(?:gate|up|gate_up|down))_proj\.weight")
_BLOCK = 32
"""A divisor of the outputs and inputs of a weight that is rounded whole."""
_BYTES_OF_A_START = 128 << 20
"""Memory other than weights: the vocabulary as a tree for grammars, libraries, numbers of the check."""
# torch's name of a dtype -> the name in a safetensors header, and bytes per number. Others are not converted.
_FLOATS = {"float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor as a header describes it."""

    dtype: str
    """The header's name: F32, BF16."""
    shape: tuple[int, ...]
    num_bytes: int
    gguf: GgufWeight | None = None
    """Its places in GGUF files."""
    start: int = 0
    """Place of the first byte in a safetensors file."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    path: Path
    num_bytes: int
    tensors: dict[str, StoredTensor]
    """Each tensor by its name."""

    @property
    def bytes_of_dtype(self) -> dict[str, int]:
        """Bytes by the header's names of dtypes."""
        found: Counter[str] = Counter()
        for tensor in self.tensors.values():
            found[tensor.dtype] += tensor.num_bytes
        return dict(found)


def find_checkpoint(model_path: str) -> Path:
    """Take the folder, or the snapshot that the local hub cache holds for a name like `owner/model`."""
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise StartupError(
            f"{model_path} is a file", fix="give the folder that holds config.json and *.safetensors"
        )
    if folder.is_absolute() or model_path.count("/") > 1 or model_path.startswith("."):
        raise StartupError(f"there is no folder {model_path}", fix="give the folder of a checkpoint")
    from huggingface_hub import snapshot_download  # slow to import, and rarely needed
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_path, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise StartupError(
            f"{model_path} is neither a folder nor a model in the local hub cache",
            fix=f"download it first (hf download {model_path}), or give the folder of a checkpoint",
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises StartupError if it is missing or broken."""
    if not path.exists():
        raise StartupError(
            f"{path.parent} has no {path.name}", fix="give the folder of a checkpoint in Hugging Face format"
        )
    with refused_as(partial(StartupError, fix="download the checkpoint again"), path):
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(content, dict):
        raise StartupError(f"{path} holds no JSON object", fix="download the checkpoint again")
    return content


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Read a JSON object, or nothing where there is no file. Raises StartupError if it is broken."""
    return read_json(path) if path.is_file() else {}


def find_weights(folder: Path) -> list[WeightFile]:
    """List the files of weights, each checked to be whole. Raises StartupError if one is missing.

    As transformers does, takes model.safetensors where there is one. Shards of an index next to it must hold
    the same tensors: either set may be left from before the model was trained, merged or quantized again.
    """
    if (folder / _ADAPTER).exists():
        raise StartupError(
            f"{folder} has {_ADAPTER} next to a model's files, and nothing says whether the weights have the "
            "adapter in them",
            fix=f"remove {_ADAPTER} if they have; else move the adapter to a folder for --lora-modules",
        )
    if (folder / GGUF).exists():
        return _weights_in(*read_parts(parts_in(folder)))
    names = _names_in_index(folder) if (folder / _INDEX).is_file() else [_WHOLE]
    missing = [name for name in names if not (folder / name).is_file()]
    if (folder / _WHOLE).is_file():
        shards = [name for name in names if name not in (_WHOLE, *missing)]
        files = [_open_weights(folder / name) for name in (_WHOLE, *shards)]
        _refuse_contradictions(files)
        in_shards = {name for file in files[1:] for name in file.tensors}
        lacking = sorted(files[0].tensors.keys() - in_shards) if shards and not missing else []
        if lacking or in_shards - files[0].tensors.keys():
            only = min(lacking or in_shards - files[0].tensors.keys())
            raise _two_sets(folder / _WHOLE, folder / shards[0], f"only one of them has {only}")
        return files[:1]
    if missing and any(folder.glob("*.bin")):
        raise StartupError(
            f"{folder} holds pickled weights (*.bin), which can run code when they are read",
            fix="take a safetensors version of the model, or convert it where you trust its source",
        )
    if missing:
        raise StartupError(f"{folder} lacks {', '.join(missing[:3])}", fix="download the checkpoint again")
    if not isinstance(read_json(folder / _INDEX).get("metadata"), dict):  # which transformers reads
        raise StartupError(f"{folder / _INDEX} has no metadata", fix='add "metadata": {} to it')
    files = [_open_weights(folder / name) for name in names]
    _refuse_contradictions(files)
    return files


def _names_in_index(folder: Path) -> list[str]:
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise StartupError(f"{folder / _INDEX} has no weight_map", fix="download the checkpoint again")
    names = sorted({str(name) for name in weight_map.values()})
    if any(len(name.encode(errors="replace")) > _MAX_NAME_BYTES for name in names):
        raise StartupError(f"{folder / _INDEX} names no files", fix="download the checkpoint again")
    leading_out = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
    if leading_out:
        raise StartupError(
            f"{folder / _INDEX} names {leading_out[0][:200]!r}, which is outside of its folder",
            fix="take the checkpoint from a source that you trust",
        )
    return names


def _refuse_contradictions(files: list[WeightFile]) -> None:
    """Raise StartupError for a tensor that two files hold, unless its numbers are seen to be the same."""
    found: dict[str, WeightFile] = {}
    left_bytes = _MOST_COMPARED_BYTES
    for file in files:
        for name, tensor in file.tensors.items():
            earlier = found.setdefault(name, file)
            if earlier is file:
                continue
            known = earlier.tensors[name]
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                kinds = " and ".join(f"{each.dtype} {list(each.shape)}" for each in (known, tensor))
                raise _two_sets(earlier.path, file.path, f"{name} is {kinds} there")
            left_bytes -= tensor.num_bytes
            if left_bytes < 0:
                raise _two_sets(earlier.path, file.path, "they are too large to be compared")
            if not _is_same(earlier, file, name):
                raise _two_sets(earlier.path, file.path, f"{name} has other numbers")


def _is_same(first: WeightFile, second: WeightFile, name: str) -> bool:
    with first.path.open("rb") as one, second.path.open("rb") as other:
        one.seek(first.tensors[name].start)
        other.seek(second.tensors[name].start)
        left_bytes = first.tensors[name].num_bytes
        while left_bytes:
            piece = one.read(min(_READ_BYTES, left_bytes))
            if not piece or piece != other.read(len(piece)):
                return False
            left_bytes -= len(piece)
    return True


def _two_sets(first: Path, second: Path, difference: str) -> StartupError:
    return StartupError(
        f"{first.parent} has two sets of weights, in {first.name} and {second.name}: {difference}",
        fix="remove the one that is not the model's",
    )


def fingerprint(folder: Path) -> str:
    """Digest config.json, and of each file of weights size, beginning and samples. Raises StartupError.

    Equal for equal checkpoints, on other machines too, and another one for other training. --checksums reads
    all, where a single changed number must be noticed.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for weights in find_weights(folder):
        digest.update(f"{weights.path.name} {weights.num_bytes}".encode())
        with weights.path.open("rb") as file:
            digest.update(file.read(_HEADER_BYTES))
            for sample in range(_NUM_SAMPLES):
                file.seek(weights.num_bytes * sample // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def loaded_bytes(files: list[WeightFile], dtype: str | None) -> WeightBytes:
    """Size the weights in `dtype`, a name of torch's; None keeps the files' own.

    Counts all that the files hold, which for a few families is more than the language model takes. Codes of
    quantized modules stay as they are; their scales become float32, one for each output and group.
    """
    item_bytes = {name: num_bytes for name, num_bytes in _FLOATS.values()}
    target, target_bytes = _FLOATS.get(dtype or "", ("", 0))
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    codes, plain = _quantized_bytes(tensors)
    as_stored = converted = 0
    for name in plain:
        stored = tensors[name]
        if stored.gguf is not None and stored.gguf.has_codes:
            codes += sum(map(_bytes_of_blocks, stored.gguf.tensors))
            continue
        if not target or stored.dtype == target or stored.dtype not in item_bytes:
            as_stored += stored.num_bytes
            continue
        converted += stored.num_bytes // item_bytes[stored.dtype] * target_bytes
    return WeightBytes(total=codes + as_stored + converted, converted=converted, codes=codes)


def bytes_not_taken(files: list[WeightFile], dtype: str | None, *, num_bits: float, rounds_head: bool) -> int:
    """Size the part of `loaded_bytes` that a start never holds if it rounds layers to `num_bits` a number.

    Weights are pages of their files until their layer is rounded. Counts layers that consist of attention and
    a gated MLP, and leaves out the rest that a start takes: a layer in float32 twice, the output
    layer's codes twice, and memory that is the same for any model.
    """
    if dtype != "bfloat16":  # others are converted, all at once
        return 0
    layers: dict[str, list[StoredTensor]] = defaultdict(list)
    unlike: set[str] = set()
    outside = [0]
    for name, tensor in ((name, tensor) for file in files for name, tensor in file.tensors.items()):
        layer = _LAYER.match(name)
        if layer is None:
            outside.append(math.prod(tensor.shape))
        elif len(tensor.shape) > 1:
            layers[layer.group()].append(tensor)
            if not (_ROUNDED.fullmatch(name, layer.end()) and _is_rounded(tensor)):
                unlike.add(layer.group())
    rounded = [tensor for name, layer in layers.items() if name not in unlike for tensor in layer]
    num_bytes = sum(tensor.num_bytes for tensor in rounded)
    packed = num_bytes / 16 * num_bits + sum(_BYTES_OF_A_SCALE * tensor.shape[0] for tensor in rounded)
    largest = max((sum(math.prod(tensor.shape) for tensor in layer) for layer in layers.values()), default=0)
    beside = 2 * 4 * largest + 2 * rounds_head * max(outside) + _BYTES_OF_A_START
    return max(0, int(num_bytes - packed - beside))


def _is_rounded(tensor: StoredTensor) -> bool:
    is_whole = not any(size % _BLOCK for size in tensor.shape)
    return tensor.dtype == "BF16" and len(tensor.shape) == 2 and is_whole


def _quantized_bytes(tensors: dict[str, StoredTensor]) -> tuple[int, list[str]]:
    """Size all quantized modules; returns the names of all other tensors too."""
    modules: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        module, last_name = module_of(name)
        modules[module][last_name] = tensor
    total, plain = 0, []
    for module, parts in modules.items():
        codes = {name: parts[name] for name in parts if name in _CODES or name.endswith(_STACKS)}
        if not codes or not any(map(_is_scale, parts)):
            plain += [f"{module}.{name}" if module else name for name in parts]
            continue
        total += sum(tensor.num_bytes for tensor in codes.values())
        num_zeros = sum(name in _ZEROS for name in parts)
        for name, tensor in parts.items():
            if _is_scale(name):
                total += _BYTES_OF_A_SCALE * (1 + num_zeros) * _num_scales(name, tensor, codes)
            elif name in _ORDERS:
                total += _BYTES_OF_AN_INDEX * math.prod(tensor.shape)
            elif name == "bias" or name.endswith("_bias"):
                plain.append(f"{module}.{name}")
    return total, plain


def module_of(name: str) -> tuple[str, str]:
    """Cut a tensor's name into that of its module and the rest: `weight`, `weight.absmax`."""
    module, dot, part = name.partition(".weight.")
    if dot:
        return module, f"weight.{part}"
    module, _, last_name = name.rpartition(".")
    return module, last_name


def _is_scale(name: str) -> bool:
    is_of_weight = not any(word in name for word in ("global", "input", "activation"))
    return is_of_weight and any(word in name for word in _SCALE_WORDS)


def _bytes_of_blocks(tensor: GgufTensor) -> int:
    bits, group_size, per_group = tensor.type.value[3:]
    count = math.prod(tensor.shape)
    return count * bits // 8 + count // group_size * per_group * _BYTES_OF_A_SCALE


def _num_scales(name: str, scales: StoredTensor, codes: dict[str, StoredTensor]) -> int:
    """Count scales by output and group: one for a block or for all is repeated for each output."""
    if name == _SCALE_OF_TORCHAO:  # of one output for all, or with outputs last
        return max(next(iter(codes.values())).shape[0], math.prod(scales.shape))
    own = next((each for each in codes if name.removeprefix(each) in _OWN_SCALES), None)
    if own is not None and codes[own].dtype in _BYTE_CODES:
        num_groups = (scales.shape[1:3] or (1,))[-1]  # of ModelOpt's four dimensions the last is 1
        return math.prod(codes[own].shape[:-1]) * num_groups
    return math.prod(scales.shape)


def warm_page_cache(files: list[WeightFile], on_read: Callable[[int], None]) -> None:
    """Read the files once from first to last byte, so that mapping them later does not wait for the disk.

    `on_read` gets the number of bytes after each piece.
    """
    piece = bytearray(_READ_BYTES)
    for file in files:
        with file.path.open("rb", buffering=0) as stream:
            while num_read := stream.readinto(piece):
                on_read(num_read)


def _weights_in(whole: GgufFile, parts: list[GgufFile]) -> list[WeightFile]:
    """List tensors by the model's names, each in the part that has the first of it. Raises StartupError."""
    files = {part.path: WeightFile(part.path, part.num_bytes, {}) for part in parts}
    for weight in find_weights_of(whole):
        first = weight.tensors[0]
        is_stored = weight.has_codes or first.type.is_plain
        num_bytes = sum(each.num_bytes for each in weight.tensors)
        count = sum(math.prod(each.shape) for each in weight.tensors)
        files[first.path].tensors[weight.name] = StoredTensor(
            first.type.name if is_stored else "F32",  # of codes that become numbers at load
            first.shape,
            num_bytes if is_stored else 4 * count,
            weight,
        )
    return list(files.values())


def _open_weights(path: Path) -> WeightFile:
    """Read the header, and compare the file's size with what it promises."""
    with refused_as(partial(StartupError, fix="download it again"), path):
        num_bytes = os.path.getsize(path)
        with path.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if header_bytes > min(num_bytes - 8, _MAX_HEADER_BYTES):
                raise ValueError("its header is cut off")
            header = json.loads(stream.read(header_bytes))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _stored(name, entry, 8 + header_bytes) for name, entry in entries.items()}
        expected_bytes = 8 + header_bytes + _end_of(entry["data_offsets"] for entry in entries.values())
        if num_bytes != expected_bytes:
            raise ValueError(f"it has {num_bytes} bytes, but its header promises {expected_bytes}")
        return WeightFile(path, num_bytes, tensors)


def _stored(name: str, entry: dict[str, Any], base: int) -> StoredTensor:
    """Read the entry of a header, whose offsets begin at `base`. Raises ValueError if numbers disagree."""
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(each) is int and each >= 0 for each in (*shape, start, end)):
        raise ValueError(f"{name} has sizes that are no counts")
    if dtype not in _BITS_OF_DTYPE:
        raise ValueError(f"{name} is of the unknown dtype {dtype}")
    if math.prod(shape) * _BITS_OF_DTYPE[dtype] != (end - start) * 8:
        raise ValueError(f"{name} has {end - start} bytes, which are not those of {list(shape)} {dtype}")
    return StoredTensor(dtype, shape, end - start, start=base + start)


def _end_of(places: Iterable[list[int]]) -> int:
    """Return where tensors end that follow each other. Raises ValueError for gaps and common bytes."""
    reached = 0
    for start, end in sorted(places):
        if start != reached:
            raise ValueError(f"a tensor begins at {start}, and the one before it ends at {reached}")
        reached = end
    return reached


def file_stamps(model: str) -> frozenset[tuple[str, int, str]]:
    """Return name, size in bytes and digest of each file that is read of a checkpoint; empty if it is gone.

    The digest of a large file, which holds weights, is that of its beginning. Times do not count: a
    checkpoint that was copied over itself is the same.
    """
    try:
        path = Path(model)
        if path.is_file():  # GGUF, under whatever name
            return frozenset({_stamp(path)})
        files = [each for each in path.iterdir() if each.suffix in _READ_SUFFIXES]
        return frozenset(_stamp(each) for each in files if each.is_file() and not each.name.startswith("."))
    except OSError:
        return frozenset()


def _stamp(path: Path) -> tuple[str, int, str]:
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        content = file.read(num_bytes if num_bytes <= _MAX_TEXT_BYTES else _HEADER_BYTES)
    return path.name, num_bytes, hashlib.sha256(content).hexdigest()
