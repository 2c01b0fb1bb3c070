"""A checkpoint folder for a GGUF file: what it says as JSON, and a link to it for its weights.

Owns: the folder, in the user's cache, so that all that reads checkpoints need not know the format.
Never: copies weights, or downloads anything.
"""

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from worker.checkpoint.gguf.config import config_of
from worker.checkpoint.gguf.file import WEIGHTS, part_paths, read_parts
from worker.checkpoint.gguf.tokenizer import tokenizer_of
from worker.worker_errors import StartupError, refused_as

_SOURCES = (
    *("config.py", "families.py", "folder.py", "rotary.py", "settings.py", "splits.py", "tokenizer.py"),
)
"""A folder that others of these modules wrote is not used."""


def folder_of(path: Path) -> Path:
    """Write the folder, unless it is there for just this file. Raises StartupError."""
    paths = [each.resolve() for each in part_paths(path)]
    try:
        found = [each.stat() for each in paths]
        cache = _private(_cache() / "gguf")
    except OSError as error:
        raise StartupError(
            f"the folder for what {path.name} says cannot be written: {error}",
            fix="set XDG_CACHE_HOME to a folder of your own that may be written to",
        ) from error
    words = [str(each) for each in paths]
    words += [str(number) for each in found for number in (each.st_size, each.st_mtime_ns, each.st_ino)]
    digest = hashlib.sha256("\0".join(words).encode())
    for name in _SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    folder = cache / digest.hexdigest()[:32]
    if (folder / WEIGHTS).exists():
        return folder
    texts = _texts_of(paths)
    try:
        _write(folder, paths, texts)
    except OSError as error:
        raise StartupError(f"{folder} cannot be written: {error}", fix="free some space there") from error
    return folder


def _texts_of(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The folder's files by name."""
    file, _ = read_parts(paths)
    said = f"what {file.path} says of its model"
    with refused_as(partial(StartupError, fix="take another GGUF file"), said):
        tokenizer, tokenizer_config = tokenizer_of(file)
        return {
            "config.json": config_of(file),
            "tokenizer.json": tokenizer,
            "tokenizer_config.json": tokenizer_config,
        }


def _write(folder: Path, paths: Sequence[Path], texts: dict[str, dict[str, Any]]) -> None:
    """Write all of it or nothing: another process may look at the same time."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        written = Path(scratch) / folder.name
        written.mkdir(mode=0o700)
        for name, content in texts.items():
            (written / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        for number, path in enumerate(paths, 1):
            (written / (WEIGHTS if number == 1 else f"model-{number}.gguf")).symlink_to(path)
        try:
            written.rename(folder)
        except OSError:
            if not (folder / WEIGHTS).exists():  # no other process was faster
                raise


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenyard"


def _private(folder: Path) -> Path:
    """Make a folder that no other user can write to. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.lstat()
    is_open = not stat.S_ISDIR(found.st_mode) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_open or found.st_uid != os.geteuid():
        raise OSError(f"{folder} belongs to another user, or others may write there")
    return folder
