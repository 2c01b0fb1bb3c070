"""The build of csrc/ into a shared library, once for each compiler and version of the sources.

Owns: the place of the library, and the checks that it is whole and written by this user or root.
Never: loads it (native.py), or needs torch: the kernels know pointers only, so that building takes seconds.

By hand, for an image without a compiler: `python -m worker.cpu.kernel_build --in-place` in a checkout,
`python -P -m tokenyard.inside.worker.cpu.kernel_build --in-place` installed: it imports nothing else of ours.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

_PACKAGE = Path(__file__).parent
_SOURCES = _PACKAGE / "csrc"
# No -march: each instruction set has a file of its own; the processor is asked when the library is opened.
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-Wno-psabi")
# Not -ffast-math: sums keep their order and NaN stays NaN.
_MATH_FLAGS = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
_TIMEOUT_S = 300
_ASK_EVERY_S = 0.1
_MOST_MESSAGE_CHARS = 300


class CannotBuild(Exception):
    """There will be no kernels; its text says why."""


def find_library() -> Path | None:
    """The library, if it was built before for just these sources."""
    name = _library_name()
    in_place = _PACKAGE / name
    if _is_ours(in_place):
        return in_place
    cached = _cache() / name
    return cached if _is_ours(cached) and not _why_open_to_others(cached.parent) else None


def foresee_build() -> Path:
    """The compiler that `build_library` would use. Raises CannotBuild where it would not get to compile."""
    compiler, folder = _find_compiler(), _cache()
    there = next(each for each in (folder, *folder.absolute().parents) if os.access(each, os.F_OK))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise CannotBuild(f"{folder} cannot be written")
    return compiler


def build_library(folder: Path | None = None) -> Path:
    """Compile into `folder`; without one, into the user's cache, unless the library is there.

    Returns the library's path. Raises CannotBuild.
    """
    compiler = str(_find_compiler())
    path = (folder or _cache()) / _library_name()
    try:
        if folder is None:
            _make_private(path.parent)
        with _alone_in(path.parent):
            if folder is None and _is_ours(path):  # by the process that this one waited for
                return path
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                built = _compile(compiler, Path(scratch))
                built.replace(path)  # at once: another process sees all of it or nothing
    except OSError as error:
        raise CannotBuild(f"{path.parent} cannot be written: {error.strerror}") from error
    return path


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let processes build one after another, as long as none takes too long and the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    give_up_s = time.monotonic() + _TIMEOUT_S
    try:
        while time.monotonic() < give_up_s:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_ASK_EVERY_S)
            except OSError:  # no locks here: they build beside each other
                break
        yield
    finally:
        os.close(descriptor)


def _find_compiler() -> Path:
    named = os.environ.get("CXX")
    found = shutil.which(named) if named else shutil.which("g++") or shutil.which("c++")
    if found is None:
        raise CannotBuild(
            f"CXX is {named}, which is no program" if named else "there is no C++ compiler (g++)"
        )
    return Path(found)


def _cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenyard"
    except RuntimeError as error:  # a user id without an entry in /etc/passwd, and no HOME
        raise CannotBuild("this user has no home folder to keep the library in") from error


def _library_name() -> str:
    digest = hashlib.sha256(" ".join((*_FLAGS, *_MATH_FLAGS, platform.machine())).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return f"kernels-{digest.hexdigest()[:16]}.so"


def _is_ours(path: Path) -> bool:
    """Tell whether no other user could have written the file: code is loaded from it."""
    try:
        found = path.stat()
    except OSError:
        return False
    is_private = not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(found.st_mode) and is_private and found.st_uid in (os.geteuid(), 0)


def _make_private(folder: Path) -> None:
    """Make a folder in which nobody else can put a file, or refuse the one that is there.

    Raises CannotBuild, OSError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.mkdir(exist_ok=True, mode=0o700)
    if reason := _why_open_to_others(folder):
        raise CannotBuild(reason)


def _why_open_to_others(folder: Path) -> str:
    """Explain how another user could put a library of their own into `folder`; empty if none could.

    The folder above may be open to all only where nobody can rename what belongs to others.
    """
    try:
        found, above = folder.lstat(), folder.parent.stat()
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is no folder"
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder} belongs to another user, or others may write there"
    is_shared = above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX
    if above.st_uid not in (os.geteuid(), 0) or is_shared:
        return f"{folder.parent} belongs to another user, or others may write there"
    return ""


def _compile(compiler: str, folder: Path) -> Path:
    sources = sorted(_SOURCES.glob("*.cpp"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    commands = [
        [compiler, *_FLAGS, *_MATH_FLAGS, "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(_run, commands):
            pass
    library = folder / "kernels.so"
    _run([compiler, "-shared", "-pthread", "-o", str(library), *map(str, objects)])
    library.chmod(0o755)
    return library


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise CannotBuild(f"{command[0]} took more than {_TIMEOUT_S} s") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        said = next((line for line in lines if "error" in line), lines[0])
        raise CannotBuild(f"{command[0]} failed: {said[:_MOST_MESSAGE_CHARS]}")


if __name__ == "__main__":
    print(build_library(_PACKAGE if sys.argv[1:] == ["--in-place"] else None))
