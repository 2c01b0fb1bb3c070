"""Processes of a server in /proc: the time and the memory that they use.

Owns: the reading, in seconds and bytes.
Never: starts or ends a process (running.py).
Source: proc(5).
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_ENGINE_PROCESS = (b"engine.core.process", b"engine.process")
"""Modules by whose name it is known: of today, and of older trees that are measured beside."""
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Memory, files and threads of one process."""

    memory_bytes: int
    """Resident and its own: memory that it shares with files is not counted."""
    num_files: int
    num_threads: int


def processor_s(pid: int) -> float:
    """Read the user and system time that a process has used, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_s() -> float:
    """Read the time that all processors of the machine together have not been idle."""
    user, nice, system, _idle, _iowait, interrupts, soft, stolen, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def held_by(pid: int) -> Held:
    """Read what a process holds. Raises OSError for a process that is gone."""
    process = Path(f"/proc/{pid}")
    _, resident, shared = (int(field) for field in (process / "statm").read_text().split()[:3])
    return Held(
        memory_bytes=(resident - shared) * _PAGE_BYTES,
        num_files=sum(1 for _ in (process / "fd").iterdir()),
        num_threads=sum(1 for _ in (process / "task").iterdir()),
    )


def engine_of(pid: int) -> int | None:
    """Find the first engine process among the children of an API process; None while there is none."""
    return next(iter(engines_of(pid)), None)


def engines_of(pid: int) -> list[int]:
    """List the engine processes among the children of an API process that have a configuration."""
    found = []
    for child in children_of(pid):
        with contextlib.suppress(OSError):  # gone meanwhile
            command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            modules = [place for place, word in enumerate(command) if word in _ENGINE_PROCESS]
            if modules and (Path(os.fsdecode(command[modules[0] + 1])) / "config.msgpack").exists():
                found.append(child)
    return found


def children_of(pid: int) -> list[int]:
    """List the children of a process. Raises OSError for one that is gone."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ranks_of(engine_pid: int | None) -> list[int]:
    """List the engine process and the ranks that are its children; empty without an engine process."""
    if engine_pid is None:
        return []
    return [engine_pid, *children_of(engine_pid)]
