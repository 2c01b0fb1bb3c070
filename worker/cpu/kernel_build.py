"""The build of csrc/ into a shared library, once for each compiler and version of the sources.

Owns: the instruction sets that a processor takes, the place of the library, the checks that no user but this
user and root could have written or replaced it, and the descriptor by which it is loaded.
Never: loads it (native.py), or needs torch: the kernels know pointers only, not torch's headers.
Source: the rule for folders is that of OpenSSH for authorized_keys, and Debian's for groups of one user.

By hand, for an image without a compiler: `python -m worker.cpu.kernel_build --in-place` in a checkout,
`python -P -m tokenyard.inside.worker.cpu.kernel_build --in-place` installed: it imports no module of ours.
"""

import fcntl
import functools
import grp
import hashlib
import logging
import os
import platform
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

_PACKAGE = Path(__file__).parent
_SOURCES = _PACKAGE / "csrc"
# No -march: each instruction set has a file of its own; the processor is asked when the library is opened.
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-Wno-psabi")
# Not -ffast-math: sums keep their order and NaN stays NaN.
_MATH_FLAGS = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
_FLAGS_OF_PROCESSOR = Path("/proc/cpuinfo")
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
_SETS = (
    (_AVX512 | {"avx512_bf16", "avx512vbmi"}, {"avx512_bf16", "avx512_float", "avx512_expanded", "amx"}),
    (_AVX512, {"avx512_vnni", "avx2"}),
    (_AVX2 | {"avx_vnni"}, {"avx_vnni", "avx2"}),
    (_AVX2, {"avx2"}),
)
"""Instructions, as Linux names them, and files of csrc/instruction_sets for a processor that has them; the
first counts. `plain` is for all: should library and system differ about a processor, a start is only slow."""
_TIMEOUT_S = 300
_ASK_EVERY_S = 0.1
_MOST_MESSAGE_CHARS = 300
_ACCESS_LIST = "system.posix_acl_access"

log = logging.getLogger(__name__)

_held: dict[tuple[int, int], int] = {}
"""Descriptors of opened libraries, by device and inode."""


class CannotBuild(Exception):
    """There will be no kernels; its text says why."""


class Untrusted(OSError):
    """Another user could have written the library, or put it there; its text says how."""


def find_library(*, for_this_processor: bool = False) -> Path | None:
    """Find the library that was built before for just these sources; None without one that may be loaded.

    One of all instruction sets, or also one of those that this processor takes.
    """
    name = _library_name()
    in_place = Path(os.path.realpath(_PACKAGE)) / name
    if _may_be_loaded(in_place):
        return in_place
    names = [name, _library_name(_left_out())] if for_this_processor else [name]
    return next((path for each in names if _may_be_loaded(path := _cache() / each)), None)


def open_library(path: Path) -> Path:
    """Open a library and check it; return a name by which exactly the checked file is loaded.

    The name is good for as long as this process lives. Raises Untrusted, OSError.
    """
    descriptor = _open_trusted(path)
    found = os.fstat(descriptor)
    # Never closed: the loader takes a name that it knows for the library that it knows, and a number that is
    # used again would be such a name.
    held = _held.setdefault((found.st_dev, found.st_ino), descriptor)
    if held != descriptor:
        os.close(descriptor)
    return Path(f"/proc/self/fd/{held}")


def foresee_build() -> Path:
    """The compiler that `build_library` would use. Raises CannotBuild where it would not get to compile."""
    compiler, folder = _find_compiler(), _cache()
    there = next(each for each in (folder, *folder.absolute().parents) if os.access(each, os.F_OK))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise CannotBuild(f"{folder} cannot be written")
    try:
        os.close(_open_private(there.absolute()) if there == folder else _open_shared(there))
    except OSError as error:
        raise CannotBuild(str(error)) from error
    return compiler


def build_library(folder: Path | None = None, *, for_this_processor: bool = False) -> Path:
    """Compile into `folder`, however long; without one, into the user's cache, unless the library is there.

    All instruction sets, or those that this processor takes, in a third to half of the time. Returns the
    library's path. Raises CannotBuild.
    """
    compiler = str(_find_compiler())
    left_out = _left_out() if for_this_processor else frozenset()
    path = (folder or _cache()) / _library_name(left_out)
    try:
        if folder is None:
            _make_private(path.parent.absolute())
        with _alone_in(path.parent):
            built = find_library(for_this_processor=for_this_processor) if folder is None else None
            if built is not None:  # by the process that this one waited for
                return built
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                # A server that waits has torch instead; an image has nothing to go on with.
                limit_s = _TIMEOUT_S if folder is None else None
                built = _compile(compiler, Path(scratch), left_out, limit_s)
                built.replace(path)  # at once: another process sees all of it or nothing
    except Untrusted as error:
        raise CannotBuild(str(error)) from error
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
            except OSError:  # no locks here: they build at the same time
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


def _left_out() -> frozenset[str]:
    """Name the instruction sets that this processor does not take; none where the system does not say."""
    lines: list[str] = []
    with suppress(OSError):  # another system
        lines = _FLAGS_OF_PROCESSOR.read_text().splitlines()
    flags: set[str] = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    every = frozenset().union(*(taken for _, taken in _SETS))
    taken = next((taken for needed, taken in _SETS if needed <= flags), None)
    return frozenset() if taken is None else every - taken


def _library_name(left_out: frozenset[str] = frozenset()) -> str:
    words = (*_FLAGS, *_MATH_FLAGS, platform.machine(), *sorted(left_out))
    digest = hashlib.sha256(" ".join(words).encode())
    for source in sorted(path for path in _SOURCES.rglob("*") if path.is_file()):
        digest.update(source.relative_to(_SOURCES).as_posix().encode() + source.read_bytes())
    return f"kernels-{digest.hexdigest()[:16]}.so"


def _may_be_loaded(path: Path) -> bool:
    """Tell whether the library is there and to be trusted. Why one is not goes to the log."""
    try:
        os.close(_open_trusted(path))
    except FileNotFoundError:
        return False
    except OSError as error:
        if os.path.lexists(path):
            log.warning("%s is not loaded: %s", path, error)
        return False
    return True


def _make_private(folder: Path) -> None:
    """Make a folder in which no other user can put a file, or refuse an existing one.

    Raises Untrusted, OSError.
    """
    for each in (*reversed(folder.parents), folder):
        each.mkdir(mode=0o700, exist_ok=True)
    os.close(_open_private(folder))


def _open_trusted(path: Path) -> int:
    """Open a file that only this user and root can have written, in a folder of which that is true too.

    Raises Untrusted, OSError.
    """
    folder = _open_private(path.parent.absolute())
    try:
        # Not blocking: a pipe may stand in its place.
        descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        reason = "is no file"
    elif found.st_uid not in (os.geteuid(), 0):
        reason = "belongs to another user"
    else:
        reason = "may be written by others" if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""
    if reason:
        os.close(descriptor)
        raise Untrusted(f"{path} {reason}")
    return descriptor


def _open_private(folder: Path) -> int:
    """Open a folder in which no other user can put a file, nor replace it by another folder.

    It is itself no link. Raises Untrusted, OSError.
    """
    above = _open_shared(folder.parent)
    try:
        return _open_below(above, folder, shared_bit=0)
    finally:
        os.close(above)


def _open_shared(folder: Path) -> int:
    """Open a folder in which, as in all above it, no other user can replace this user's files.

    Links on the way to it are resolved. Raises Untrusted, OSError.
    """
    descriptor = os.open("/", os.O_PATH | os.O_DIRECTORY)
    real = Path(os.path.realpath(folder))
    for place in (*reversed(real.parents), real):
        try:
            below = _open_below(descriptor, place, shared_bit=stat.S_ISVTX)
        finally:
            os.close(descriptor)
        descriptor = below
    return descriptor


def _open_below(above: int, folder: Path, *, shared_bit: int) -> int:
    """Open a folder by its name in an open one. Others may write there only if its mode has `shared_bit`."""
    try:
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
        descriptor = os.open(folder.name or ".", flags, dir_fd=above)
    except NotADirectoryError:
        raise Untrusted(f"{folder} is no folder") from None
    found = os.fstat(descriptor)
    is_open = found.st_mode & stat.S_IWOTH
    is_open |= found.st_mode & stat.S_IWGRP and not _is_group_of_one(descriptor, found)
    if found.st_uid not in (os.geteuid(), 0):
        reason = "belongs to another user"
    else:
        reason = "others may write there" if is_open and not found.st_mode & shared_bit else ""
    if reason:
        os.close(descriptor)
        raise Untrusted(f"{folder}: {reason}")
    return descriptor


def _is_group_of_one(descriptor: int, found: os.stat_result) -> bool:
    """Tell whether a folder's group is its owner's alone, so that the group's rights harm no other user.

    Many systems give each user a group of the same name and let it write to each new folder (umask 002). A
    list of access rights hides other users behind the group's bits.
    """
    with suppress(OSError):  # where file systems know no such lists
        if _ACCESS_LIST in os.listxattr(f"/proc/self/fd/{descriptor}"):
            return False
    return _is_own_group(found)


def _is_own_group(found: os.stat_result) -> bool:
    try:
        owner, group = pwd.getpwuid(found.st_uid), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    is_own = (group.gr_gid, group.gr_name) == (owner.pw_gid, owner.pw_name)
    is_own = is_own and not set(group.gr_mem) - {owner.pw_name}
    return is_own and not _users_of_primary_group(group.gr_gid) - {owner.pw_uid}


@functools.cache
def _users_of_primary_group(gid: int) -> frozenset[int]:
    """Ids of the users whose primary group it is; the group's own list of members never has them.

    Asked once for each group: the list of all users may come slowly from a directory (LDAP), or may lack the
    users of one that does not let its list be read. Such users are not seen here.
    """
    return frozenset(user.pw_uid for user in pwd.getpwall() if user.pw_gid == gid)


def _compile(compiler: str, folder: Path, left_out: frozenset[str], limit_s: float | None) -> Path:
    sources = sorted(_SOURCES.rglob("*.cpp"))
    objects = [folder / f"{number}.o" for number in range(len(sources))]
    commands = [
        [compiler, *_flags_of(source, left_out), "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(functools.partial(_run, limit_s=limit_s), commands):
            pass
    library = folder / "kernels.so"
    _run([compiler, "-shared", "-pthread", "-o", str(library), *map(str, objects)], limit_s=limit_s)
    library.chmod(0o755)
    return library


def _flags_of(source: Path, left_out: frozenset[str]) -> list[str]:
    flags = [*_FLAGS, *_MATH_FLAGS, f"-I{_SOURCES}"]
    return [*flags, "-DTOKENYARD_LEFT_OUT"] if source.stem in left_out else flags


def _run(command: list[str], *, limit_s: float | None) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise CannotBuild(f"{command[0]} took more than {limit_s:g} s") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        said = next((line for line in lines if "error" in line), lines[0])
        raise CannotBuild(f"{command[0]} failed: {said[:_MOST_MESSAGE_CHARS]}")


if __name__ == "__main__":
    print(build_library(_PACKAGE if sys.argv[1:] == ["--in-place"] else None))
