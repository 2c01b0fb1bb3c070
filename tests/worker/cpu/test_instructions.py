"""The library runs on processors that lack most of what it has kernels for."""

import re
import shutil
import subprocess
from collections import defaultdict
from contextlib import suppress

import pytest

from worker.cpu.native import Kernels

NAMESPACES = {"zmm": ("avx512", "avx512_expanded", "avx512_vnni", "amx"), "ymm": ("avx2", "avx_vnni")}
"""Registers, and the namespaces of kernels that alone may name them, or any that stand before."""


@pytest.fixture(scope="module")
def listing(any_library):
    """The library's functions, each line of them with the function's name before it."""
    tool = shutil.which("objdump")
    if tool is None:
        pytest.skip("there is no objdump")
    command = [tool, "--disassemble", "--demangle", "--no-show-raw-insn", str(any_library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines, name = [], ""
    for line in text.splitlines():
        if begun := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            name = begun[1]
        else:
            lines.append((name, line))
    return lines


def vector_functions(listing):
    """Return the names of functions that have instructions which not every x86-64 processor has."""
    found = defaultdict(set)
    for name, line in listing:
        if "%zmm" in line or re.search(r"%k[1-7]", line):
            found["zmm"].add(name)
        elif "%ymm" in line or re.search(r":\s+v[a-z]", line):
            found["ymm"].add(name)
    return found


def test_only_kernels_have_instructions_that_some_processors_lack(listing):
    found, allowed = vector_functions(listing), ()
    for registers, namespaces in NAMESPACES.items():
        allowed = (*allowed, *namespaces)
        own = re.compile(rf"tokenyard::({'|'.join(allowed)})::")
        assert [name for name in found[registers] if not own.search(name)] == []


def test_a_processor_is_asked_for_its_instructions_without_any_of_them(any_library):
    """Every set may be asked for on every processor: it opens, or says that it is not there."""
    for name in ("", "avx512-bf16", "avx512-expanded", "amx", "avx512-vnni", "avx-vnni", "avx2", "plain"):
        with suppress(ValueError):
            Kernels(any_library, 1, name)


@pytest.mark.parametrize(
    ("namespace", "instruction"),
    [
        ("avx512", "vpermb"),
        ("avx512_vnni", "vpshufb"),
        ("avx_vnni", "{vex} vpdpbusd"),
        ("avx2", "vpmaddubsw"),
    ],
)
def test_whole_inputs_take_the_instructions_that_each_set_was_written_for(listing, namespace, instruction):
    """The right numbers would come of others too, later."""
    lines = [line for name, line in listing if f"tokenyard::{namespace}::ByteNibbles" in name]
    if not lines:
        pytest.skip("this compiler knows no such set")
    assert any(instruction in line for line in lines)
