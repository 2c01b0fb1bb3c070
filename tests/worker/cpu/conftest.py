"""The built kernels of a processor that has the dot instruction for bf16."""

from pathlib import Path

import pytest

from worker.cpu.cpu_arithmetic import DOT
from worker.cpu.kernel_build import CannotBuild, build_library, find_library
from worker.cpu.native import Kernels


@pytest.fixture(scope="session")
def built() -> Path:
    try:
        library = find_library() or build_library()
        Kernels(library, 1, DOT)
    except (ValueError, CannotBuild) as error:
        pytest.skip(str(error))
    return library
