"""On which device the kernels of these tests run: interpreted on the CPU, or on a GPU.

With TOKENYARD_TEST_DEVICE=cuda it is the GPU; tests that need the interpreter itself fail then.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.worker.gpu.device_mirror import mirrored
from tests.worker.gpu.interpreter import mend_interpreter

mend_interpreter()
_VARIABLE = "TOKENYARD_TEST_DEVICE"


@pytest.fixture(scope="session")
def gpu_device() -> torch.device:
    """Device on which kernels run. Tensors of a test may stay on the CPU all the same."""
    return torch.device(os.environ.get(_VARIABLE, "cpu"))


@pytest.fixture(scope="session", autouse=True)
def _take_tensors_to_the_device(gpu_device: torch.device) -> Iterator[None]:
    if gpu_device.type == "cpu":
        yield
        return
    from triton.runtime.jit import JITFunction

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", mirrored(JITFunction.run, gpu_device))
        yield
