"""A checkpoint folder as files: found, read and checked before torch sees any of it.

Owns: where the folder is, its JSON files, whether its safetensors are whole, and how large once loaded.
Never: network, pickled weights, code that comes with a checkpoint.
"""

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.memory_sizes import WeightBytes
from worker.worker_errors import StartupError

_READ_BYTES = 16 << 20
_INDEX = "model.safetensors.index.json"
# torch's name of a dtype -> the name in a safetensors header, and bytes per number. Others are not converted.
_FLOATS = {"float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}


@dataclass(frozen=True, slots=True)
class WeightFile:
    path: Path
    num_bytes: int
    bytes_of_dtype: dict[str, int]
    """Bytes by the header's names of dtypes: F32, BF16."""


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
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StartupError(
            f"{path.parent} has no {path.name}", fix="give the folder of a checkpoint in Hugging Face format"
        ) from error
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}", fix="download the checkpoint again") from error
    if not isinstance(content, dict):
        raise StartupError(f"{path} holds no JSON object", fix="download the checkpoint again")
    return content


def find_weights(folder: Path) -> list[WeightFile]:
    """List the safetensors files, each checked to be whole. Raises StartupError if one is missing."""
    if (folder / _INDEX).is_file():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise StartupError(f"{folder / _INDEX} has no weight_map", fix="download the checkpoint again")
        names = sorted({str(name) for name in weight_map.values()})
        leading_out = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
        if leading_out:
            raise StartupError(
                f"{folder / _INDEX} names {leading_out[0][:200]!r}, which is outside of its folder",
                fix="take the checkpoint from a source that you trust",
            )
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing and any(folder.glob("*.bin")):
        raise StartupError(
            f"{folder} holds pickled weights (*.bin), which can run code when they are read",
            fix="take a safetensors version of the model, or convert it where you trust its source",
        )
    if missing:
        raise StartupError(f"{folder} lacks {', '.join(missing[:3])}", fix="download the checkpoint again")
    return [_open_weights(folder / name) for name in names]


def loaded_bytes(files: list[WeightFile], dtype: str | None) -> WeightBytes:
    """Size the weights in `dtype`, a name of torch's; None keeps the files' own.

    Counts all that the files hold, which for a few families is more than the language model takes.
    """
    item_bytes = {name: num_bytes for name, num_bytes in _FLOATS.values()}
    target, target_bytes = _FLOATS.get(dtype or "", ("", 0))
    total = converted = 0
    for file in files:
        for stored, num_bytes in file.bytes_of_dtype.items():
            if not target or stored == target or stored not in item_bytes:
                total += num_bytes
                continue
            converted += num_bytes // item_bytes[stored] * target_bytes
    return WeightBytes(total=total + converted, converted=converted)


def warm_page_cache(files: list[WeightFile], on_read: Callable[[int], None]) -> None:
    """Read the files once from first to last byte, so that mapping them later does not wait for the disk.

    `on_read` gets the number of bytes after each piece.
    """
    piece = bytearray(_READ_BYTES)
    for file in files:
        with file.path.open("rb", buffering=0) as stream:
            while num_read := stream.readinto(piece):
                on_read(num_read)


def _open_weights(path: Path) -> WeightFile:
    """Read the header, and compare the file's size with what it promises."""
    num_bytes = os.path.getsize(path)
    try:
        with path.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if header_bytes > num_bytes - 8:
                raise ValueError("the header is cut off")
            header = json.loads(stream.read(header_bytes))
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        bytes_of_dtype: Counter[str] = Counter()
        for entry in entries:
            start, end = entry["data_offsets"]
            bytes_of_dtype[entry["dtype"]] += end - start
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise StartupError(
            f"{path} is not a whole safetensors file ({error})", fix="download it again"
        ) from error
    expected_bytes = 8 + header_bytes + max((entry["data_offsets"][1] for entry in entries), default=0)
    if num_bytes != expected_bytes:
        raise StartupError(
            f"{path} has {num_bytes} bytes, but its header promises {expected_bytes}", fix="download it again"
        )
    return WeightFile(path, num_bytes, dict(bytes_of_dtype))
