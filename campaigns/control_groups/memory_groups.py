"""Control groups of memory inside the guest, of either version of the kernel's interface.

Owns: the mount, the group, its limit, what it counts, and processes that are started inside.
Never: is used outside of the guest, whose kernel is its own.
Source: Linux, cgroup-v2.rst; cgroup-v1/memory.rst.
"""

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from campaigns.control_groups.guest import mount

MIB = 1 << 20
_MOUNT = "/sys/fs/cgroup"
_GROUP = "tokenyard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Files of a group, which have other names in each version."""

    limit: str
    usage: str
    caches: tuple[str, str]
    """Lines of memory.stat that are caches of files."""
    kills: str
    """The file with the line oom_kill."""


NAMES = {
    1: Names(
        limit="memory.limit_in_bytes",
        usage="memory.usage_in_bytes",
        caches=("total_inactive_file", "total_active_file"),
        kills="memory.oom_control",
    ),
    2: Names(
        limit="memory.max",
        usage="memory.current",
        caches=("inactive_file", "active_file"),
        kills="memory.events",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group."""

    version: int
    folder: Path

    def set_limit(self, num_bytes: int) -> None:
        """Set the limit; of version 2, the kernel ends what it must to get below. Raises OSError."""
        (self.folder / NAMES[self.version].limit).write_text(str(num_bytes))

    def make_wait_beyond(self, num_bytes: int | None) -> None:
        """Set memory.high of version 2, or lift it."""
        (self.folder / "memory.high").write_text("max" if num_bytes is None else str(num_bytes))

    def end_together(self) -> None:
        """Let the killer end all processes where it ends one (memory.oom.group, version 2)."""
        (self.folder / "memory.oom.group").write_text("1")

    def used_bytes(self) -> int:
        """Read what is in use and cannot be taken back at once."""
        names = NAMES[self.version]
        used = int((self.folder / names.usage).read_text())
        return used - sum(self._line("memory.stat", key) for key in names.caches)

    def num_killed(self) -> int:
        return self._line(NAMES[self.version].kills, "oom_kill")

    def pids(self) -> list[int]:
        return [int(word) for word in (self.folder / "cgroup.procs").read_text().split()]

    def entry(self, *words: str) -> list[str]:
        """Make a command that enters the group, then is another (in_group.py)."""
        path = Path(__file__).with_name("in_group.py")
        return [sys.executable, "-I", "-S", str(path), str(self.folder / "cgroup.procs"), *words]

    @contextlib.asynccontextmanager
    async def held(self, num_mib: int) -> AsyncIterator[int]:
        """Hold memory in a process of the group until this is left; yield its process id."""
        process = await asyncio.create_subprocess_exec(
            *self.entry("hold", str(num_mib)), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            await process.stdout.readline()
            yield process.pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _line(self, file: str, key: str) -> int:
        lines = (line.split() for line in (self.folder / file).read_text().splitlines())
        return next((int(words[1]) for words in lines if words[0] == key), 0)


def make_group(version: int) -> Group:
    """Mount control groups and make one in which memory is counted. Raises OSError without the controller."""
    if version == 1:
        mount("tmpfs", _MOUNT, "tmpfs")
        mount("memory", f"{_MOUNT}/memory", "cgroup", "memory")
        folder = Path(_MOUNT, "memory", _GROUP)
    else:
        mount("cgroup2", _MOUNT, "cgroup2")
        Path(_MOUNT, "cgroup.subtree_control").write_text("+memory")
        folder = Path(_MOUNT, _GROUP)
    folder.mkdir()
    return Group(version=version, folder=folder)


def kills_told() -> list[str]:
    """Read what the kernel has said about kills since its start."""
    kernel = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    told = []
    try:
        with contextlib.suppress(BlockingIOError):  # after the last record
            while True:
                told.append(os.read(kernel, 8192).decode(errors="replace").split(";", 1)[-1].split("\n")[0])
    finally:
        os.close(kernel)
    return [words for words in told if "killed" in words.lower() and "Tasks state" not in words]


def badness(pid: int) -> int:
    """Read how much the killer wants a process; the one with most is its first. 0 for one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/oom_score").read_text())
    except OSError:
        return 0


def name_of(pid: int) -> str:
    """Name a process by its module, or by what else it runs."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return "gone"
    modules = [after for word, after in itertools.pairwise(words) if word == "-m"]
    return modules[0] if modules else " ".join(os.path.basename(word) for word in words[-3:]).strip()
