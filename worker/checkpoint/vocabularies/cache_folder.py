"""Folders in the user's cache for what is made of a checkpoint's files, so that it is made once.

Owns: their names, which change with the files and with the code that makes them, and their safety.
"""

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from worker.worker_errors import StartupError

VOCABULARIES = tuple(sorted(Path(__file__).parent.glob("*.py")))
"""The modules of this folder, which make tokenizers."""

_MANIFEST = ".manifest"
"""Sizes of the files by their names, as JSON."""


def made_once(
    kind: str,
    files: Sequence[Path],
    sources: Sequence[Path],
    make: Callable[[Path], None],
    *,
    settings: bytes = b"",
) -> Path:
    """Return the folder that `make` fills with what it makes of files, unless it is there.

    It is there as a whole or not at all: another process may look at the same time. One whose files are not
    of the sizes that they were written with is made again. A folder that other
    `sources`, the modules of `make`, or other `settings` have made is not used. Raises StartupError.
    """
    words = [str(each) for each in files]
    try:
        found = [each.stat() for each in files]
        cache = _private(_cache() / kind)
    except (OSError, RuntimeError) as error:  # the latter for a user without a home
        raise StartupError(
            f"the folder for what {files[0].name} says cannot be written: {error}",
            fix="set XDG_CACHE_HOME to a folder of your own that may be written to",
        ) from error
    words += [str(number) for each in found for number in (each.st_size, each.st_mtime_ns, each.st_ino)]
    digest = hashlib.sha256("\0".join(words).encode() + settings)
    for source in sources:
        digest.update(source.read_bytes())
    folder = cache / digest.hexdigest()[:32]
    if _is_whole(folder):
        return folder
    try:
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            written = Path(scratch) / folder.name
            written.mkdir(mode=0o700)
            make(written)
            _settle(written)
            _rename(written, folder)
    except OSError as error:
        raise StartupError(f"{folder} cannot be written: {error}", fix="free some space there") from error
    return folder


def _rename(written: Path, folder: Path) -> None:
    try:
        written.rename(folder)
    except OSError:
        if _is_whole(folder):  # another process was faster
            return
        with suppress(FileNotFoundError):
            folder.rename(written.with_name("damaged"))
        written.rename(folder)


def _settle(folder: Path) -> None:
    """Write which files it has, and wait until all of them are on the disk."""
    files = [each for each in folder.iterdir() if not each.is_symlink()]
    sizes = {each.name: each.lstat().st_size for each in folder.iterdir()}
    (folder / _MANIFEST).write_text(json.dumps(sizes), encoding="utf-8")
    for path in (*files, folder / _MANIFEST, folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_whole(folder: Path) -> bool:
    """Tell whether all files are there in the sizes that they were written with."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_bytes())
        return all((folder / name).lstat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


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
