"""The allocator of the API process: which processes run with it, and what it gives back."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server.command.startup.allocator import is_glibc
from tests.e2e.serving import ROOT, RunningServer

WORDS = ["--served-model-name", "two words", ""]
PROGRAM = """
import ctypes, json, os, sys
from server.command.startup.allocator import allocate_from_heaps
allocate_from_heaps(sys.argv[1:])
from server.edge.sockets.trimming import _find_trim

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")

class MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "free", "fast", "hblks", *"hbusmk")]

def num_mapped_by(block):
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallInfo
    return mallinfo().hblks - num_mapped

num_mapped = 0
num_mapped = num_mapped_by(b"")
given = [entry for entry in open("/proc/self/environ").read().split(chr(0)) if "PYTHONMALLOC" in entry]
before = resident_bytes()
numbers = json.loads(json.dumps(list(range(1000, 301_000))))
kept, numbers = numbers[::1000], None
_find_trim()(0)
print(json.dumps({
    "words": sys.argv[1:], "process": os.getpid(), "grown": resident_bytes() - before,
    "given": given, "handed_on": os.environ.get("PYTHONMALLOC"),
    "mapped": [num_mapped_by(bytearray(8 << 20)) for _ in range(2)],
}))
"""
pytestmark = pytest.mark.skipif(not is_glibc(), reason="another C library gives back what it likes")


def run(
    *words: str,
    interpreter: str = sys.executable,
    program: tuple[str, ...] = ("-c", PROGRAM),
    **variables: str,
) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONMALLOC"}
    with subprocess.Popen(
        [interpreter, *program, *words],
        env=environment | variables,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            answer: dict[str, Any] = json.loads(process.communicate(PROGRAM.encode(), timeout=60)[0])
        finally:
            process.kill()
    assert answer.pop("process") == process.pid
    return answer


def test_what_serves_gives_back_the_pages_between_numbers_that_live_on() -> None:
    """One in a thousand is kept, which holds most arenas of Python's own allocator."""
    heaps, own = run("serve"), run("bench")
    assert heaps["grown"] < own["grown"] / 2, (heaps, own)


def test_what_serves_maps_large_blocks_by_themselves_after_one_was_freed_too() -> None:
    assert run("serve")["mapped"] == [1, 1]
    assert run("bench")["mapped"] == [1, 0]


@pytest.mark.parametrize("words", [[], ["serve", *WORDS], WORDS])
def test_who_serves_starts_anew_in_the_same_process_with_the_same_words(words: list[str]) -> None:
    answer = run(*words)
    assert answer["words"] == words
    assert answer["given"] == ["PYTHONMALLOC=malloc"]
    assert answer["handed_on"] is None


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["bench", "serve"], {}),
        (["--version"], {}),
        (["serve"], {"PYTHONMALLOC": "pymalloc"}),
        (["serve"], {"PYTHONMALLOC": "malloc"}),
    ],
)
def test_other_commands_and_an_operators_choice_stay(words: list[str], variables: dict[str, str]) -> None:
    answer = run(*words, **variables)
    assert answer["words"] == words
    assert answer["given"] == [f"{name}={value}" for name, value in variables.items()]
    assert answer["handed_on"] == variables.get("PYTHONMALLOC")


@pytest.mark.parametrize(
    "variables",
    [{"MALLOC_MMAP_THRESHOLD_": "67108864"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=67108864"}],
)
def test_an_operators_size_of_large_blocks_stays(variables: dict[str, str]) -> None:
    assert run("serve", **variables)["mapped"] == [0, 0]


def test_a_program_that_cannot_be_read_again_goes_on_as_it_is() -> None:
    assert run("serve", program=("-",))["given"] == []


def test_an_interpreter_that_drops_the_variable_is_started_anew_once(tmp_path: Path) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/bash\nunset PYTHONMALLOC\nexec -a "$0" {sys.executable} "$@"\n')
    wrapper.chmod(0o700)
    assert run("serve", interpreter=str(wrapper))["given"] == []


@pytest.mark.night
def test_a_server_has_it_and_its_engine_process_has_not(demo_server: RunningServer) -> None:
    pids = demo_server.process.pid, demo_server.engine_pid
    own, engine = (Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids)
    assert b"PYTHONMALLOC=malloc" in own
    assert not any(entry.startswith(b"PYTHONMALLOC") for entry in engine)
