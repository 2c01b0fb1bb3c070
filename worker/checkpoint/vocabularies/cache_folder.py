"""Folders in the user's cache for what is made of a checkpoint's files, so that it is made once.

Owns: their names, which change with the files and with the code that makes them, and their safety.
Never: knows what is in them.
"""

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from worker.worker_errors import StartupError

VOCABULARIES = tuple(sorted(Path(__file__).parent.glob("*.py")))
"""The modules of this folder, which make tokenizers."""


def made_once(
    kind: str,
    files: Sequence[Path],
    sources: Sequence[Path],
    make: Callable[[Path], None],
    *,
    settings: bytes = b"",
) -> Path:
    """Return the folder that `make` fills with what it makes of files, unless it is there.

    It is there as a whole or not at all: another process may look at the same time. A folder that other
    `sources`, the modules of `make`, or other `settings` have made is not used. Raises StartupError.
    """
    words = [str(each) for each in files]
    try:
        found = [each.stat() for each in files]
        cache = _private(_cache() / kind)
    except OSError as error:
        raise StartupError(
            f"the folder for what {files[0].name} says cannot be written: {error}",
            fix="set XDG_CACHE_HOME to a folder of your own that may be written to",
        ) from error
    words += [str(number) for each in found for number in (each.st_size, each.st_mtime_ns, each.st_ino)]
    digest = hashlib.sha256("\0".join(words).encode() + settings)
    for source in sources:
        digest.update(source.read_bytes())
    folder = cache / digest.hexdigest()[:32]
    if folder.is_dir():
        return folder
    try:
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            written = Path(scratch) / folder.name
            written.mkdir(mode=0o700)
            make(written)
            _rename(written, folder)
    except OSError as error:
        raise StartupError(f"{folder} cannot be written: {error}", fix="free some space there") from error
    return folder


def _rename(written: Path, folder: Path) -> None:
    try:
        written.rename(folder)
    except OSError:
        if not folder.is_dir():  # no other process was faster
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
