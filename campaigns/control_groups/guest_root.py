"""The root file system of the guest: the Python that runs this, what the server needs, and these sources.

Owns: the choice of files, their copy, and the image that mke2fs makes of it, without a mount or root.
Never: writes into what it copies, or takes anything from a network.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from campaigns.servers.running import ROOT

SOURCES = "/srv/tokenyard"
"""Folder of these sources in the guest."""
PACKAGES = "/srv/packages"
"""Folder of what they need. Which folder the interpreter looks into by itself depends on who built it."""
_PYTHON = "/usr/bin/python"
_OURS = ("tokenyard", "server", "engine", "scheduler", "worker", "bench", "campaigns")
_LEFT_OUT = shutil.ignore_patterns("site-packages", "test", "idlelib", "lib2to3", "config-*", "*.a")
_EMPTY_FOLDERS = ("dev", "proc", "sys", "tmp", "run", "root", "etc", "var/tmp")
_TEXTS = {
    "etc/passwd": "root:x:0:0:root:/root:/usr/sbin/nologin\n",
    "etc/hosts": "127.0.0.1 localhost\n",
    "init": f"#!{_PYTHON}\nimport sys\n\nsys.path[:0] = [{SOURCES!r}, {PACKAGES!r}]\n"
    "from campaigns.control_groups.guest import main\n\nmain(sys.argv[1:])\n",
}
_ROOM_BYTES = 64 << 20
_BLOCK_BYTES = 4096


def needed(name: str) -> list[importlib.metadata.Distribution]:
    """List what a package needs, itself included, without its extras. Raises PackageNotFoundError."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [name]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        for text in found[name].requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return list(found.values())


def libraries_of(listing: str) -> set[str]:
    """Paths in what `ldd` printed, its loader's too."""
    return set(re.findall(r"(?:=> |^\s*)(/\S+) \(0x", listing, re.MULTILINE))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def _copy_packages(to: Path) -> None:
    """Copy the packages that the server needs; of itself only the metadata: its sources lie apart."""
    for distribution in needed("tokenyard"):
        is_ours = canonicalize_name(distribution.metadata["Name"]) == "tokenyard"
        for file in distribution.files or []:
            source = Path(str(file.locate()))
            is_wanted = ".dist-info" in str(file) if is_ours else ".." not in file.parts
            if is_wanted and source.is_file():
                _copy(source, to / file)


def _native(root: Path) -> Iterator[str]:
    """Files below a folder that may want libraries."""
    for path in root.rglob("*"):
        if not path.is_symlink() and (".so" in path.suffixes or path.parent.name == "bin") and path.is_file():
            yield str(path)


def _copy_libraries(root: Path, files: Iterable[str]) -> None:
    """Copy what the files load from outside of `root`, to where they look for it."""
    done = subprocess.run(
        ["ldd", *files], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
    )
    for path in libraries_of(done.stdout):
        if not Path(path).is_relative_to(root):
            _copy(Path(path), root / path.lstrip("/"))


def stage(root: Path) -> None:
    """Fill an empty folder with all that the guest has."""
    base = Path(sys.base_prefix)
    standard = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    # At their own places: an interpreter finds its library, and libraries each other, by where they lie.
    shutil.copytree(standard, root / str(standard).lstrip("/"), symlinks=True, ignore=_LEFT_OUT)
    interpreter = Path(sys.executable).resolve()
    _copy(interpreter, root / str(interpreter).lstrip("/"))
    for library in base.glob("lib/libpython*.so*"):
        _copy(library, root / str(library).lstrip("/"))
    (root / "usr/bin").mkdir(parents=True, exist_ok=True)
    (root / _PYTHON.lstrip("/")).symlink_to(interpreter)
    _copy_packages(root / PACKAGES.lstrip("/"))
    for name in _OURS:
        shutil.copytree(ROOT / name, root / SOURCES.lstrip("/") / name, ignore=_LEFT_OUT)
    _copy_libraries(root, _native(root))
    for name in _EMPTY_FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name, text in _TEXTS.items():
        (root / name).write_text(text)
    (root / "init").chmod(0o755)
    # What this machine compiles in a moment the guest would compile at each start, since it cannot keep it.
    for place in (str(standard), SOURCES, PACKAGES):
        words = ("-m", "compileall", "-q", "-s", str(root), "-p", "/", str(root / place.lstrip("/")))
        subprocess.run([sys.executable, *words], check=False, stdout=subprocess.DEVNULL)


def make_image(root: Path, image: Path) -> None:
    """Make an ext4 image of a folder. Raises subprocess.CalledProcessError."""
    sizes = (os.lstat(path).st_size for path in root.rglob("*"))
    num_bytes = sum(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES + 512 for size in sizes)
    size_kib = (num_bytes * 21 // 20 + _ROOM_BYTES) >> 10
    image.unlink(missing_ok=True)
    words = ("-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d", str(root), str(image), f"{size_kib}k")
    subprocess.run(["mke2fs", *words], check=True)
