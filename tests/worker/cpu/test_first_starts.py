"""Processes that start for the first time at once: one builds, and a real library is loaded by each.

The compiler is a stand-in that copies the library of these tests, which a real one has built.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker.cpu import kernel_build

NUM_PROCESSES = 2
ROOT = Path(__file__).resolve().parents[3]
COMPILER = """#!/bin/sh
echo "$$" >> "{calls}"
while [ "$1" != -o ]; do shift; done
case "$2" in
  *.so) exec cp "{library}" "$2" ;;
  *) exec touch "$2" ;;
esac
"""


pytestmark = [
    pytest.mark.night,
    pytest.mark.skipif(
        (kernel_build._PACKAGE / kernel_build._library_name()).exists(), reason="a library was built in place"
    ),
]


def test_of_processes_that_start_at_once_one_builds_and_all_load_its_library(
    any_library: Path, tmp_path: Path
) -> None:
    compiler, calls, cache = tmp_path / "compiler", tmp_path / "calls", tmp_path / "cache"
    compiler.write_text(COMPILER.format(calls=calls, library=any_library))
    compiler.chmod(0o700)
    others = {"CXX": str(compiler), "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    starting = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.worker.cpu.first_start"],
            cwd=ROOT,
            env={**os.environ, **others},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(NUM_PROCESSES)
    ]
    for each in starting:
        assert each.stdout
        assert each.stdout.readline() == "ready\n"
    for each in starting:
        assert each.stdin
        each.stdin.write("\n")
        each.stdin.flush()
    said = [each.communicate()[0].split() for each in starting]
    assert [each.returncode for each in starting] == [0] * NUM_PROCESSES
    (library,) = (cache / "tokenyard").iterdir()
    assert {tuple(words) for words in said} == {(str(library.stat().st_ino), said[0][-1])}
    assert len(calls.read_text().split()) == len(list(kernel_build._SOURCES.rglob("*.cpp"))) + 1
