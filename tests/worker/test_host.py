"""Memory and cores as /proc and control groups tell them, on machines made of files."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from worker.machine import (
    available_memory_bytes,
    control_group_limit_bytes,
    find_mapped,
    find_unwritten,
    free_behind,
    least_gpu_memory_bytes,
    memory_use,
    num_killed_for_memory,
    once_grown,
    usable_cores,
)

MIB = 1 << 20


class Machine:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 9999999 kB\nMemAvailable: 102400 kB\n")

    def write(self, name: str, content: object) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_control_group_free_memory_counts(machine: Machine) -> None:
    assert available_memory_bytes(machine.root) == 100 * MIB


def test_a_version_2_limit_counts_and_page_cache_gives_way(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/pod/container")
    group = "sys/fs/cgroup/pod/container"
    machine.write(f"{group}/memory.max", 60 * MIB)
    machine.write(f"{group}/memory.current", 50 * MIB)
    machine.write(f"{group}/memory.stat", f"anon 1\ninactive_file {30 * MIB}")
    assert available_memory_bytes(machine.root) == 40 * MIB
    machine.write(f"{group}/memory.max", "max")
    assert available_memory_bytes(machine.root) == 100 * MIB


@pytest.mark.parametrize(
    ("controllers", "file", "content"),
    [
        ("0::", "sys/fs/cgroup/{}memory.events", "oom 5\noom_kill 3\noom_group_kill 1"),
        ("4:memory:", "sys/fs/cgroup/memory/{}memory.oom_control", "oom_kill_disable 0\noom_kill 3"),
    ],
)
@pytest.mark.parametrize("seen_as", ["pod/container/", ""])
def test_kills_for_want_of_memory_are_those_of_our_own_group(
    machine: Machine, controllers: str, file: str, content: str, seen_as: str
) -> None:
    assert num_killed_for_memory(machine.root) == 0
    machine.write("proc/self/cgroup", f"{controllers}/pod/container")
    machine.write(file.format(seen_as), content)
    if seen_as:
        machine.write(file.format("pod/"), "oom_kill 8")
    assert num_killed_for_memory(machine.root) == 3


def test_page_cache_that_became_active_gives_way_too(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/")
    machine.write("sys/fs/cgroup/memory.max", 60 * MIB)
    machine.write("sys/fs/cgroup/memory.current", 50 * MIB)
    machine.write("sys/fs/cgroup/memory.stat", f"inactive_file {10 * MIB}\nactive_file {30 * MIB}")
    assert available_memory_bytes(machine.root) == 50 * MIB


def test_the_bound_beyond_which_a_group_is_made_to_wait_counts_as_its_limit_does(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/pod")
    machine.write("sys/fs/cgroup/pod/memory.max", 60 * MIB)
    machine.write("sys/fs/cgroup/pod/memory.high", 40 * MIB)
    machine.write("sys/fs/cgroup/pod/memory.current", 30 * MIB)
    assert available_memory_bytes(machine.root) == 10 * MIB
    machine.write("proc/meminfo", "MemTotal: 9999999 kB\nMemAvailable: 9999999 kB\n")
    assert memory_use(machine.root) == pytest.approx(0.75)
    machine.write("sys/fs/cgroup/pod/memory.high", "max")
    assert memory_use(machine.root) == pytest.approx(0.5)


def test_the_lowest_limit_of_our_groups_is_named(machine: Machine) -> None:
    assert control_group_limit_bytes(machine.root) is None
    machine.write("proc/self/cgroup", "0::/pod/container")
    machine.write("sys/fs/cgroup/pod/container/memory.max", "max")
    assert control_group_limit_bytes(machine.root) is None
    machine.write("sys/fs/cgroup/pod/memory.max", 20 * MIB)
    assert control_group_limit_bytes(machine.root) == 20 * MIB
    machine.write("sys/fs/cgroup/pod/container/memory.max", 30 * MIB)
    assert control_group_limit_bytes(machine.root) == 20 * MIB


def test_a_limit_of_an_ancestor_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/pod/container")
    machine.write("sys/fs/cgroup/pod/memory.max", 20 * MIB)
    machine.write("sys/fs/cgroup/pod/memory.current", 15 * MIB)
    assert available_memory_bytes(machine.root) == 5 * MIB


def test_a_version_1_limit_counts_at_the_mount_point_of_a_container(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "7:cpu,cpuacct:/x\n4:memory:/path/on/the/host")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", 64 * MIB)
    machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", 80 * MIB)
    machine.write(
        "sys/fs/cgroup/memory/memory.stat", f"total_inactive_file {15 * MIB}\ntotal_active_file {5 * MIB}"
    )
    assert available_memory_bytes(machine.root) == 4 * MIB
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    assert available_memory_bytes(machine.root) == 100 * MIB


@pytest.mark.parametrize(("name", "place"), [("Max address space", 0), ("Max data size", 5)])
def test_what_the_process_itself_may_map_counts(machine: Machine, name: str, place: int) -> None:
    pages = ["1"] * 7
    pages[place] = str(30 * MIB // os.sysconf("SC_PAGE_SIZE"))
    machine.write("proc/self/statm", " ".join(pages))
    head = "Limit                     Soft Limit           Hard Limit           Units\n"
    machine.write("proc/self/limits", f"{head}{name:<25} {40 * MIB} unlimited bytes")
    assert available_memory_bytes(machine.root) == 10 * MIB
    assert memory_use(machine.root) == pytest.approx(0.989, abs=0.001), "of the machine"
    machine.write("proc/meminfo", "MemTotal: 9999999 kB\nMemAvailable: 9999999 kB\n")
    assert memory_use(machine.root) == pytest.approx(0.75)
    machine.write("proc/self/limits", f"{head}{name:<25} unlimited unlimited bytes")
    assert memory_use(machine.root) == 0.0


def test_hyper_threads_are_one_core_and_a_quota_cuts(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for cpu in range(8):
        siblings = f"{cpu % 4},{cpu % 4 + 4}"
        machine.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
    assert usable_cores(machine.root) == 4
    machine.write("proc/self/cgroup", "0::/")
    machine.write("sys/fs/cgroup/cpu.max", "250000 100000")
    assert usable_cores(machine.root) == 2
    machine.write("sys/fs/cgroup/cpu.max", "50000 100000")
    assert usable_cores(machine.root) == 1
    machine.write("sys/fs/cgroup/cpu.max", "max 100000")
    assert usable_cores(machine.root) == 4


def resident_kib(path: Path) -> int:
    """Memory of this process that is pages of a file."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    return sum(
        next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))
        for line in lines
        if line.endswith(str(path))
    )


def test_pages_of_a_mapped_file_are_given_back_but_not_what_was_written_to_them(tmp_path: Path) -> None:
    path, num_bytes = tmp_path / "weights", 1 << 20
    path.write_bytes(bytes(range(256)) * (num_bytes // 256))
    mapped = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
    assert mapped.sum(dtype=torch.int64) == num_bytes * 255 // 2
    assert resident_kib(path) == num_bytes >> 10
    free_behind([path])
    assert resident_kib(path) == 0
    assert mapped[-1] == 255
    mapped[0] = 7
    free_behind([path])
    assert mapped[0] == 7


def test_memory_is_freed_at_once_and_then_after_each_growth_that_is_worth_it(machine: Machine) -> None:
    freed: list[int] = []

    def pages(mib: int) -> int:
        return mib * MIB // os.sysconf("SC_PAGE_SIZE")

    free_if_grown = once_grown(lambda: freed.append(held), machine.root)
    for held in (1000, 1000, 1127, 1128, 1255, 900, 1300):
        machine.write("proc/self/statm", f"{pages(5000)} {pages(held)} 0 0 0 0 0")
        free_if_grown()
    assert freed == [1000, 1128, 1300]


def test_a_mapping_is_found_by_a_name_in_any_encoding_unless_it_was_written_to_or_swapped_out(
    tmp_path: Path,
) -> None:
    place = b"%s-%s r--p 00000000 fe:00 1    %s\nRss: 4 kB\nAnonymous: %d kB\nSwap: %d kB\nVmFlags: rd mr\n"
    latin = tmp_path / os.fsdecode(b"caf\xe9 au lait")
    mappings = [
        place % (b"1000", b"3000", os.fsencode(latin), 0, 0),
        place % (b"3000", b"4000", os.fsencode(latin), 4, 0),
        place % (b"4000", b"5000", os.fsencode(latin), 0, 4),
        place % (b"5000", b"6000", b"/other", 0, 0),
    ]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/smaps").write_bytes(b"".join(mappings))
    (tmp_path / "proc/self/maps").write_bytes(b"\n".join(each.partition(b"\n")[0] for each in mappings))
    assert [each.start for each in find_mapped([latin], tmp_path)] == [0x1000, 0x3000, 0x4000]
    assert find_unwritten([latin], tmp_path) == [range(0x1000, 0x3000)]


def test_memory_use_is_that_of_whatever_is_fuller_and_file_caches_do_not_count(machine: Machine) -> None:
    machine.write("proc/meminfo", "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 400 kB\n")
    assert memory_use(machine.root) == pytest.approx(0.6)
    machine.write("proc/self/cgroup", "0::/pod/container")
    machine.write("sys/fs/cgroup/pod/memory.max", 100 * MIB)
    machine.write("sys/fs/cgroup/pod/memory.current", 90 * MIB)
    assert memory_use(machine.root) == pytest.approx(0.9)
    machine.write("sys/fs/cgroup/pod/memory.stat", f"inactive_file {10 * MIB}\nactive_file {30 * MIB}")
    assert memory_use(machine.root) == pytest.approx(0.6)
    machine.write("sys/fs/cgroup/pod/container/memory.max", "max")
    assert memory_use(machine.root) == pytest.approx(0.6)


def test_memory_use_counts_limits_of_version_1_whose_groups_are_to_be_seen(machine: Machine) -> None:
    machine.write("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 900 kB\n")
    machine.write("proc/self/cgroup", "4:memory:/outer/inner\n0::/")
    group = "sys/fs/cgroup/memory/outer"
    machine.write(f"{group}/inner/memory.limit_in_bytes", 9223372036854771712)
    machine.write(f"{group}/inner/memory.usage_in_bytes", 70 * MIB)
    machine.write(f"{group}/memory.limit_in_bytes", 100 * MIB)
    machine.write(f"{group}/memory.usage_in_bytes", 80 * MIB)
    machine.write(f"{group}/memory.stat", f"inactive_file 1\ntotal_inactive_file {10 * MIB}")
    assert memory_use(machine.root) == pytest.approx(0.7)


def test_memory_use_of_a_machine_that_tells_nothing_is_none(tmp_path: Path) -> None:
    assert memory_use(tmp_path) == 0.0


class DriverLibrary:
    """Stands for NVIDIA's, with GPUs of so many bytes; None is one that the driver does not tell of."""

    def __init__(self, sizes: list[int | None], *, is_broken: int = 0) -> None:
        self._sizes, self._is_broken = sizes, is_broken
        self.num_open = 0

    def nvmlInit_v2(self) -> int:
        self.num_open += not self._is_broken
        return self._is_broken

    def nvmlShutdown(self) -> int:
        self.num_open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._sizes)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        size = self._sizes[handle.value - 1]
        memory._obj.total = size or 0
        return 999 if size is None else 0


@pytest.mark.parametrize(
    ("sizes", "expected"), [([], 0), ([80 * MIB], 80 * MIB), ([80 * MIB, 24 * MIB], 24 * MIB), ([None, 5], 0)]
)
def test_the_driver_tells_the_memory_of_the_smallest_gpu(sizes: list[int | None], expected: int) -> None:
    library = DriverLibrary(sizes)
    assert least_gpu_memory_bytes(lambda _: library) == expected
    assert library.num_open == 0


def test_without_a_driver_there_is_no_gpu() -> None:
    def refuse(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    assert least_gpu_memory_bytes(refuse) == 0
    assert least_gpu_memory_bytes(lambda _: DriverLibrary([5], is_broken=9)) == 0
