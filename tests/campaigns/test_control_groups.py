"""The campaign of control groups, as far as it needs neither an emulator nor a group."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from campaigns.control_groups.__main__ import show
from campaigns.control_groups.emulator import command, fetch_kernel
from campaigns.control_groups.group_asking import Ending, ask, stream
from campaigns.control_groups.group_rounds import size_in
from campaigns.control_groups.guest_root import libraries_of, needed
from campaigns.control_groups.memory_groups import Group
from campaigns.servers.own_server import own_server

IN_GROUP = Path(__file__).resolve().parents[2] / "campaigns/control_groups/in_group.py"


def test_what_the_server_needs_is_found_without_what_its_tests_need() -> None:
    names = {each.metadata["Name"].lower() for each in needed("tokenyard")}
    assert {"tokenyard", "torch", "transformers", "starlette"} <= names
    assert not {"pytest", "ruff", "mkdocs"} & names


def test_libraries_are_read_from_what_ldd_prints() -> None:
    printed = """/a/b.so:
\tlinux-vdso.so.1 (0x00007f07479df000)
\tlibpython3.11.so.1.0 => /opt/lib/libpython3.11.so.1.0 (0x00007f0747400000)
\tlibgone.so => not found
\t/lib64/ld-linux-x86-64.so.2 (0x00007f07479e1000)
/a/c.so:
\tstatically linked
"""
    assert libraries_of(printed) == {"/opt/lib/libpython3.11.so.1.0", "/lib64/ld-linux-x86-64.so.2"}


@pytest.mark.parametrize(
    ("version", "limit", "usage", "stat", "kills"),
    [
        (2, "memory.max", "memory.current", "inactive_file 20\nactive_file 10", "memory.events"),
        (
            1,
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "inactive_file 9\ntotal_inactive_file 20\ntotal_active_file 10",
            "memory.oom_control",
        ),
    ],
)
def test_a_group_of_either_version_is_read_and_limited(
    tmp_path: Path, version: int, limit: str, usage: str, stat: str, kills: str
) -> None:
    group = Group(version=version, folder=tmp_path)
    (tmp_path / usage).write_text("100\n")
    (tmp_path / "memory.stat").write_text(f"anon 70\n{stat}\n")
    (tmp_path / kills).write_text("oom 3\noom_kill 2\noom_group_kill 1\n")
    (tmp_path / "cgroup.procs").write_text("12\n34\n")
    group.set_limit(4096)
    assert (tmp_path / limit).read_text() == "4096"
    assert (group.used_bytes(), group.num_killed(), group.pids()) == (70, 2, [12, 34])


def test_a_process_enters_its_group_and_holds_memory_until_it_is_told(tmp_path: Path) -> None:
    procs = tmp_path / "cgroup.procs"
    words = [sys.executable, str(IN_GROUP), str(procs)]
    done = subprocess.run([*words, "hold", "3"], input="", stdout=subprocess.PIPE, text=True, check=True)
    assert (done.stdout, procs.read_text()) == (f"{3 << 20}\n", "0")
    command = [*words, sys.executable, "-c", "print('another')"]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout == b"another\n"


def test_the_guest_has_no_network_and_cannot_write_to_its_image() -> None:
    words = command(Path("vmlinuz"), Path("root.img"), Path("log"), ["2", "killed"])
    said = " ".join(words)
    assert "-nic none" in said
    assert "readonly=on" in said
    assert words[-1].endswith("init=/init -- 2 killed")


def test_a_kernel_that_was_unpacked_is_not_fetched_again(tmp_path: Path) -> None:
    kernel = tmp_path / "kernel/boot/vmlinuz-6"
    kernel.parent.mkdir(parents=True)
    kernel.touch()
    assert fetch_kernel(tmp_path) == kernel


def test_faults_are_counted_and_a_guest_without_an_end_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(["OK    one", "----- done"]) == 0
    assert show(["OK    one", "FAULT two: why", "----- done"]) == 1
    assert show(["FAULT two: why"]) == 2
    assert "did not come to the end" in capsys.readouterr().out


def test_a_size_is_read_where_it_is_named() -> None:
    said = "device cpu, 2.50 GiB of memory available\nKV cache up to 606.00 MiB for 9 tokens"
    assert size_in("SIZE of memory available", said) == 2.5 * (1 << 30)
    assert size_in("KV cache up to SIZE", said) == 606 * (1 << 20)
    assert size_in("swap SIZE", said) == 0


def test_the_end_of_a_stream_is_what_its_client_saw() -> None:
    async def asked() -> tuple[Ending, Ending, int]:
        with own_server(["--cpu-kernels", "off"]) as server:
            whole = await stream(server.target, 3, Ending())
            cut = Ending()
            running = asyncio.create_task(stream(server.target, 1900, cut))
            await cut.begun.wait()
            os.kill(server.engine_pid, signal.SIGKILL)
            await running
            return whole, cut, (await ask(server.target, 2))[0]

    whole, cut, status = asyncio.run(asked())
    assert (whole.is_whole, whole.errors, whole.broken) == (True, [], "")
    assert (cut.is_whole, cut.errors, cut.broken) == (False, ["engine_restarted"], "")
    assert str(cut).startswith("engine_restarted after ")
    assert status in (200, 503)
