"""Compile Triton kernels for a GPU that is not there, and say what came of them.

Owns: the process in which this happens, since pytest's own has the interpreter in the compiler's place.
Never: runs a kernel, or judges one: the tests do.

Triton brings the assembler with it, so that this needs no CUDA. One process compiles for all tests: most of
its time goes into starting. Triton keeps what it compiled on disk, until the kernel's source changes.
"""

import atexit
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import triton

ROOT = Path(__file__).resolve().parents[3]
HOPPER = 90
SHARED_BYTES_LIMIT = 227 * 1024
"""Bytes of a Hopper GPU's shared memory that one program may have."""
_SPILLED_BY_3_6_BYTES = 24
_numbers = count()
"""Numbers of questions to the other process."""
_WAIT = "griddepcontrol.wait"
_MEMORY_OR_BRANCH = (
    r"\b(ld|st|atom|red|cp|ldmatrix|stmatrix|wgmma|prefetch)\.(?!param)|\b(bra|brx|ret|exit|call)\b"
)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel and the arguments that it is compiled for."""

    function: str
    """Module and name, as in worker.gpu.kernels.attention:decode_kernel."""
    signature: dict[str, str]
    """The types of all arguments in their order: *bf16, *i32, i32, i64, fp32, and constexpr for constants."""
    constants: dict[str, Any] = field(default_factory=dict)
    """The values of those that are constexpr; tl.bfloat16 and the like as that word."""
    unaligned: tuple[str, ...] = ()
    """Pointers and integers that are no multiple of 16; Triton asks that of each at a launch. All others are
    taken for multiples."""
    num_warps: int = 4
    num_stages: int = 3
    launch_pdl: bool = False
    capability: int = HOPPER


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Machine code of one kernel, as the GPU would get it."""

    ptx: str
    shared_bytes: int
    num_registers: int
    """Registers of one thread; 255 is the most there is."""
    local_bytes: int
    """Bytes of one thread, in memory, where registers do not suffice: 0 where nothing is spilled."""

    @property
    def is_spilled(self) -> bool:
        """Whether registers do not suffice. Triton 3.6 is short of a few for some kernels."""
        return self.local_bytes > (_SPILLED_BY_3_6_BYTES if triton.__version__.startswith("3.6.") else 0)

    @property
    def waits(self) -> bool:
        """Whether it waits for the launch before it anywhere."""
        return _WAIT in self.ptx

    @property
    def waits_first(self) -> bool:
        """Whether all of its threads wait before any of them reads, writes or ends.

        Parameters are read before: they are the launch's own.
        """
        ptx = re.sub(r"//.*", "", self.ptx)
        code = ptx[ptx.index("{", ptx.index(".entry")) :]
        before, wait, _ = code.partition(_WAIT)
        return bool(wait) and not re.search(_MEMORY_OR_BRANCH, before)

    def lines_before_waits(self) -> list[str]:
        """List the lines that a thread can come to before it waits, on any path."""
        ptx = re.sub(r"//.*", "", self.ptx)
        lines = [line.strip() for line in ptx[ptx.index("{", ptx.index(".entry")) + 1 :].splitlines()]
        labels = {line.removesuffix(":"): at for at, line in enumerate(lines) if line.endswith(":")}
        seen, waiting = set[int](), [0]
        while waiting:
            at = waiting.pop()
            while at < len(lines) and at not in seen and _WAIT not in lines[at]:
                seen.add(at)
                jump = re.search(r"\bbra(?:\.uni)?\s+([$\w]+)", lines[at])
                if jump:
                    waiting.append(labels[jump.group(1)])
                if re.match(r"(bra|ret|exit)\b", lines[at]):  # without a condition
                    break
                at += 1
        return [lines[at] for at in sorted(seen)]

    @property
    def uses_tensor_cores(self) -> bool:
        return "mma.sync" in self.ptx or self.uses_warp_group_products

    @property
    def uses_warp_group_products(self) -> bool:
        """Whether products use the instructions that came with Hopper, at twice the rate of those before."""
        return "wgmma.mma_async" in self.ptx

    @property
    def widest_load_bytes(self) -> int:
        """Bytes of a thread's widest load from global memory, to registers or to shared memory."""
        loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.[bsuf](\d+)", self.ptx)
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, (0x[0-9a-f]+|\d+)[,;]", self.ptx)
        widths = [int(count or 1) * int(bits) // 8 for count, bits in loads]
        return max(widths + [int(copied, 0) for copied in copies], default=0)


def compile_kernels(kernels: list[Kernel]) -> list[Compiled]:
    """Compile all, for Hopper unless they name another. Raises AssertionError with the compiler's words."""
    compiler, number = _compiler(), next(_numbers)
    try:
        answered, done = _ask(compiler, number, kernels)
        assert answered == number
    except BaseException:  # an answer that was not read would be taken for that of the next question
        _end(compiler)
        raise
    assert isinstance(done, list), done
    return [Compiled(**each) for each in done]


def _ask(compiler: subprocess.Popen[str], number: int, kernels: list[Kernel]) -> tuple[int, Any]:
    assert compiler.stdin is not None
    assert compiler.stdout is not None
    compiler.stdin.write(json.dumps([number, [asdict(kernel) for kernel in kernels]]) + "\n")
    compiler.stdin.flush()
    line = compiler.stdout.readline()
    assert line, "the compiler's process has ended"
    answered, done = json.loads(line)
    return answered, done


@cache
def _compiler() -> subprocess.Popen[str]:
    """The other process, which ends with this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.worker.gpu.cross_compile"]
    pipe = subprocess.PIPE
    compiler = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment)
    atexit.register(compiler.communicate)
    return compiler


def _end(compiler: subprocess.Popen[str]) -> None:
    """Kill the other process; the next question begins another one."""
    _compiler.cache_clear()
    atexit.unregister(compiler.communicate)
    compiler.kill()
    compiler.communicate()


def _compile_for_others() -> None:
    """In the other process: answer each line of kernels by one of its number and results or the reason."""
    output, sys.stdout = sys.stdout, sys.stderr  # so that nothing but the results is in it
    for line in sys.stdin:
        number, kernels = json.loads(line)
        results = _results_of([Kernel(**each) for each in kernels])
        print(json.dumps([number, results]), file=output, flush=True)


def _results_of(kernels: list[Kernel]) -> list[dict[str, Any]] | str:
    results = []
    for kernel in kernels:
        try:
            results.append(asdict(_compile(kernel)))
        except Exception as error:  # noqa: BLE001 -- the test that asked for the kernel says it
            return f"{kernel.function} with {kernel.constants}: {error}"
    return results


def _compile(kernel: Kernel) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = kernel.function.split(":")
    function = getattr(importlib.import_module(module), name)
    signature = {argument: kernel.signature[argument] for argument in function.arg_names}
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (place,): aligned
        for place, (argument, type_name) in enumerate(signature.items())
        if type_name.startswith(("*", "i")) and argument not in kernel.unaligned
    }
    constants = {argument: _constant(value) for argument, value in kernel.constants.items()}
    compiled = triton.compile(
        ASTSource(function, signature, constants, attributes),
        target=GPUTarget("cuda", kernel.capability, 32),
        options={
            "num_warps": kernel.num_warps,
            "num_stages": kernel.num_stages,
            "launch_pdl": kernel.launch_pdl,
        },
    )
    registers, local_bytes = _resources(compiled.asm["cubin"])
    return Compiled(
        ptx=compiled.asm["ptx"],
        shared_bytes=compiled.metadata.shared,
        num_registers=registers,
        local_bytes=local_bytes,
    )


def _constant(value: Any) -> Any:
    import triton.language as tl

    is_type = isinstance(value, str) and value.startswith("tl.")
    return getattr(tl, value.removeprefix("tl.")) if is_type else value


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of local memory, that a thread takes."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    _compile_for_others()
