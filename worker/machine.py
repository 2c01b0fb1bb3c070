"""Memory and cores that this machine lets the process use.

Owns: reading /proc, /sys and control groups (version 2, then 1), which hold a container's real limits; limits
of the process itself (ulimit); the memory of the GPUs, from NVIDIA's driver; the precedence of a thread.
Never: decides; worker/memory_sizes.py and worker/devices/device.py do.
Every path is below a root folder, so that a test can bring its own machine.
"""

import ctypes
import gc
import mmap
import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

_MACHINE = Path("/")
# cgroup v1 writes "no limit" as the largest page-aligned 64-bit number.
_NO_LIMIT_BYTES = 1 << 60
_GROWN_BYTES = 128 << 20
"""Growth that is worth a look at all mapped pages, which takes about 30 ms for 1 GiB of them."""
_LIMITS_OF_PROCESS = {"Max address space": 0, "Max data size": 5}
"""Lines of /proc/self/limits, with the place in /proc/self/statm of what the process has. Source: proc(5)."""
_NVIDIA_LIBRARY = "libnvidia-ml.so.1"


def lower_precedence(niceness: int) -> None:
    """Let other threads have a core before the calling one, where the system knows niceness of threads.

    What holds the interpreter then holds it for longer: for threads that mostly do not.
    """
    with suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        own = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(own, niceness))  # never higher than an operator's


def available_memory_bytes(root: Path = _MACHINE) -> int:
    """Measure the memory that can be taken without swapping, in the machine and within all limits."""
    available = _meminfo_available_bytes(root)
    limits = (*_limits_of_groups(root), *_limits_of_process(root))
    return max(min([available, *(limit_bytes - used_bytes for limit_bytes, used_bytes in limits)]), 0)


def control_group_limit_bytes(root: Path = _MACHINE) -> int | None:
    """Read the lowest limit of memory of our control groups; None without one."""
    return min((limit_bytes for limit_bytes, _ in _limits_of_groups(root)), default=None)


def return_freed_memory() -> None:
    """Give memory that was freed back to the system, of which the allocator keeps large pieces too."""
    gc.collect()
    trim_heaps()


def trim_heaps() -> None:
    """Give whole pages that are free in the heaps of C back to the system: under 1 ms for 150 MiB."""
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def free_behind(files: Collection[Path]) -> None:
    """Give back what heaps hold free, and pages of these mapped files.

    The page cache has them for when they are needed again. A mapping that was written to is left alone.
    """
    trim_heaps()
    for place in find_unwritten(files):
        address, num_bytes = ctypes.c_void_p(place.start), ctypes.c_size_t(len(place))
        ctypes.CDLL(None).madvise(address, num_bytes, mmap.MADV_DONTNEED)


def once_grown(free: Callable[[], None], root: Path = _MACHINE) -> Callable[[], None]:
    """Make a function that calls `free` when much more memory is held than now, then than after that."""
    kept_bytes = _resident_bytes(root)

    def free_if_grown() -> None:
        nonlocal kept_bytes
        if _resident_bytes(root) - kept_bytes >= _GROWN_BYTES:
            free()
            kept_bytes = _resident_bytes(root)

    return free_if_grown


def find_mapped(files: Collection[Path], root: Path = _MACHINE) -> list[range]:
    """Find the addresses at which files are mapped."""
    paths = {os.fsencode(file.resolve()) for file in files}
    mappings = [line.split(maxsplit=5) for line in _read_bytes(root / "proc/self/maps").splitlines()]
    places = [words[0].split(b"-") for words in mappings if words[-1] in paths]
    return [range(int(start, 16), int(end, 16)) for start, end in places]


def find_unwritten(files: Collection[Path], root: Path = _MACHINE) -> list[range]:
    """Find those that were not written to: a look at all pages of the process, for tens of milliseconds."""
    places = {each.start: each for each in find_mapped(files, root)}
    found, place, is_written = [], range(0), False
    for line in _read_bytes(root / "proc/self/smaps").splitlines() if places else ():
        words = line.split(maxsplit=5)
        if b"-" in words[0]:
            place = places.get(int(words[0].partition(b"-")[0], 16), range(0))
        elif words[0] == b"Anonymous:":
            is_written = words[1] != b"0"
        elif place and words[:2] == [b"Swap:", b"0"] and not is_written:
            found.append(place)
    return found


def memory_use(root: Path = _MACHINE) -> float:
    """Measure the share of memory in use, 0 to 1: of the machine, or of a limit that is nearer.

    Caches of files do not count, since they can be reclaimed at once.
    """
    info = _read_text(root / "proc/meminfo").splitlines()
    sizes = {words[0]: int(words[1]) for words in map(str.split, info) if len(words) > 1}
    total, available = sizes.get("MemTotal:", 0), sizes.get("MemAvailable:", 0)
    shares = [1 - available / total] if total else []
    limits = (*_limits_of_groups(root), *_limits_of_process(root))
    shares += (used_bytes / limit_bytes for limit_bytes, used_bytes in limits)
    return max([0.0, *shares])


def num_killed_for_memory(root: Path = _MACHINE) -> int:
    """Count the processes of our control group that the kernel has killed for want of memory.

    The group was short of it, one above it, or the machine. Source: Linux, cgroup-v2.rst
    (memory.events); of version 1, memory.oom_control.
    """
    for folder, _ in _cgroup_folders(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            if (folder / name).exists():
                return _stat_value(folder / name, "oom_kill")
    return 0


def usable_cores(root: Path = _MACHINE) -> int:
    """Count physical cores in the affinity mask, cut to the CPU quota of the control group; at least 1."""
    cores = {_core_of(root, cpu) for cpu in os.sched_getaffinity(0)}
    quota = _cpu_quota(root)
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def visible_gpus(root: Path = _MACHINE) -> list[str]:
    """Names by which CUDA_VISIBLE_DEVICES would list the NVIDIA GPUs that this process may use.

    No driver is asked, which only a process that computes should load.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    devices = (root / "dev").glob("nvidia[0-9]*")
    return [str(number) for number in range(sum(1 for _ in devices))]


class _NvmlMemory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def least_gpu_memory_bytes(open_library: Callable[[str], Any] = ctypes.CDLL) -> int:
    """Ask the driver for the memory of the smallest GPU; 0 without one. Opens no context on any.

    Source: NVML API reference, nvmlDeviceGetMemoryInfo.
    """
    try:
        library = open_library(_NVIDIA_LIBRARY)
    except OSError:
        return 0
    if library.nvmlInit_v2():
        return 0
    try:
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return min((_gpu_memory_bytes(library, index) for index in range(count.value)), default=0)
    finally:
        library.nvmlShutdown()


def _gpu_memory_bytes(library: Any, index: int) -> int:
    handle, memory = ctypes.c_void_p(), _NvmlMemory()
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
        return 0
    failed = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return 0 if failed else int(memory.total)


def _meminfo_available_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup_folders(root: Path, controller: str) -> list[tuple[Path, tuple[str, str, str, str]]]:
    """Find every folder whose limit binds this process (its own and its ancestors'), with the file names."""
    version_2 = ("memory.max", "memory.current", "inactive_file", "active_file")
    version_1 = (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
        "total_active_file",
    )
    folders = []
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            mount, names = root / "sys/fs/cgroup", version_2
        elif controller in controllers.split(","):
            mount, names = root / "sys/fs/cgroup" / controller, version_1
        else:
            continue
        # Inside a container the path may be the host's: the mount point itself is then our group.
        group = mount / path.lstrip("/")
        folders += [(folder, names) for folder in (group, *group.parents) if folder.is_relative_to(mount)]
    return folders


def _limits_of_groups(root: Path) -> list[tuple[int, int]]:
    """Limits of our control groups, in bytes, each with what is in use there and cannot be reclaimed at once.

    Page cache counts as usage, but can be reclaimed: a checkpoint just read must not shrink the KV cache. Its
    pages become active ones when the mapping of a file that was read before ends. No process is killed beyond
    memory.high, but one that takes memory there is made to wait, which a server cannot afford either.
    """
    found = []
    for folder, (limit, usage, *cache_keys) in _cgroup_folders(root, "memory"):
        limits = [_read_int(folder / name) or _NO_LIMIT_BYTES for name in (limit, "memory.high")]
        if min(limits) < _NO_LIMIT_BYTES:
            reclaimable_bytes = sum(_stat_value(folder / "memory.stat", key) for key in cache_keys)
            used_bytes = (_read_int(folder / usage) or 0) - reclaimable_bytes
            found.append((min(limits), max(used_bytes, 0)))
    return found


def _limits_of_process(root: Path) -> list[tuple[int, int]]:
    """Limits of what this process may map, in bytes, each with what it has mapped."""
    pages = _read_text(root / "proc/self/statm").split()
    found = []
    for line in _read_text(root / "proc/self/limits").splitlines() if pages else ():
        for name, place in _LIMITS_OF_PROCESS.items():
            soft = line.removeprefix(name).split()[0] if line.startswith(name) else ""
            if soft.isdigit() and int(soft):
                found.append((int(soft), int(pages[place]) * os.sysconf("SC_PAGE_SIZE")))
    return found


def _resident_bytes(root: Path) -> int:
    pages = _read_text(root / "proc/self/statm").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _cpu_quota(root: Path) -> float | None:
    quotas = []
    for folder, _ in _cgroup_folders(root, "cpu"):
        words = _read_text(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
        quota_us = _read_int(folder / "cpu.cfs_quota_us")
        period_us = _read_int(folder / "cpu.cfs_period_us")
        if quota_us is not None and period_us and quota_us > 0:
            quotas.append(quota_us / period_us)
    return min(quotas, default=None)


def _core_of(root: Path, cpu: int) -> str:
    """Name the physical core: hyper-threads of one core have the same list of siblings."""
    siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return _read_text(siblings).strip() or f"cpu {cpu}"


def _stat_value(path: Path, key: str) -> int:
    for line in _read_text(path).splitlines():
        if line.startswith(f"{key} "):
            return int(line.split()[1])
    return 0


def _read_int(path: Path) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # absent, or hidden from this process: no known limit
        return ""


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
