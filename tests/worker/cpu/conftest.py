"""The built kernels: those of this processor, and of instruction sets that it has in another form."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from worker.cpu import kernel_build
from worker.cpu.arithmetic import DOT
from worker.cpu.kernel_build import CannotBuild, build_library, find_library
from worker.cpu.native import Kernels

INSTRUCTION_SETS = ("avx512-bf16", "avx512-expanded", "avx512-vnni", "avx2", "plain")
"""Sets with arithmetic of their own. Tiles have tests of their own, and AVX-VNNI has the bits of AVX2."""

OpenKernels = Callable[[str, int], Kernels]


@pytest.fixture(scope="session")
def any_library() -> Path:
    try:
        return find_library() or build_library()
    except CannotBuild as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def built(any_library: Path) -> Path:
    """The library, on a processor that has the dot instruction for bf16."""
    try:
        Kernels(any_library, 1, DOT)
    except ValueError as error:
        pytest.skip(str(error))
    return any_library


@pytest.fixture(scope="session")
def open_kernels(any_library: Path, tmp_path_factory: pytest.TempPathFactory) -> OpenKernels:
    """Open kernels by name, with so many threads; skip the test where this processor has none of the kind.

    AVX-VNNI's one instruction is part of AVX-512 too, in another encoding, which is compiled where the first
    is lacking.
    """
    in_other_form: list[Path] = []

    def open_them(name: str, num_threads: int) -> Kernels:
        try:
            return Kernels(any_library, num_threads, name)
        except ValueError as error:
            if name != "avx-vnni":
                pytest.skip(str(error))
        if not in_other_form:
            path = tmp_path_factory.mktemp("kernels") / "avx_vnni.so"
            compile_beside(
                any_library, path, ("instruction_sets/avx_vnni.cpp", "api.cpp"), "-DTOKENYARD_EVEX"
            )
            in_other_form.append(path)
        try:
            return Kernels(in_other_form[0], num_threads, name)
        except ValueError as error:
            pytest.skip(str(error))

    return open_them


def compile_beside(library: Path, path: Path, sources: tuple[str, ...], *flags: str) -> None:
    """Compile some sources anew, with more flags; all else is the built library's. Skips the test without a
    compiler that knows them."""
    try:
        compiler = str(kernel_build._find_compiler())
    except CannotBuild as error:
        pytest.skip(str(error))
    asked = subprocess.run([compiler, "-dumpversion"], check=True, capture_output=True, text=True)
    if int(asked.stdout.split(".")[0]) < 11:
        pytest.skip("GCC 11 is the first that knows these instructions")
    include = f"-I{kernel_build._SOURCES}"
    all_flags = (*kernel_build._FLAGS, *kernel_build._MATH_FLAGS, include, "-shared", *flags)
    files = [str(kernel_build._SOURCES / name) for name in sources]
    subprocess.run([compiler, *all_flags, *files, str(library), "-o", str(path)], check=True)
