"""Launches that are not made: each kernel compiled for an H100 with the very arguments it would be given.

Owns: the place of Triton's driver, and of the launch. Triton itself decides what it makes constants of.
Never: needs a GPU: Triton brings the assembler and the disassembler.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from campaigns.gpu.paper.machine_code import MachineCode, read_machine_code

_HOPPER = 90


class _AbsentDevice:
    """Properties of a device that Triton asks of a driver to compile for it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", _HOPPER, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel as it would be launched."""

    kernel: str
    grid: tuple[int, ...]
    num_warps: int
    shared_bytes: int
    cubin: bytes

    @property
    def num_programs(self) -> int:
        programs = 1
        for side in self.grid:
            programs *= side
        return programs

    @property
    def resources(self) -> tuple[int, int]:
        """Registers, and bytes of memory where they do not suffice, of one thread."""
        text = _tell(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", self.cubin)
        found = re.search(r"REG:(\d+) STACK:(\d+)", text)
        assert found, text
        return int(found[1]), int(found[2])

    @property
    def code(self) -> MachineCode:
        return _read(self.cubin)


# Most launches of a kernel have the same code.
@cache
def _read(cubin: bytes) -> MachineCode:
    return read_machine_code(_tell(knobs.nvidia.nvdisasm.path, "-c", cubin))


@cache
def _tell(program: str, option: str, cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([program, option, path], capture_output=True, text=True, check=True).stdout


@contextmanager
def noted_launches() -> Iterator[list[Launch]]:
    """Within, kernels are compiled and noted instead of launched. Tensors may be on torch's `meta`."""
    noted: list[Launch] = []
    run = JITFunction.run

    def note(kernel: Any, *given: Any, grid: tuple[int, ...], warmup: bool, **named: Any) -> None:  # noqa: ARG001 - as Triton calls it
        compiled = run(kernel, *given, grid=grid, warmup=True, **named)
        metadata = compiled.metadata
        noted.append(
            Launch(kernel.__name__, tuple(grid), metadata.num_warps, metadata.shared, compiled.asm["cubin"])
        )

    driver.set_active(_AbsentDevice())
    JITFunction.run = note
    try:
        yield noted
    finally:
        JITFunction.run = run
