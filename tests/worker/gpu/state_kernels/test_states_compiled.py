"""The kernels of recurrent layers as GPUs of two generations get them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.worker.gpu.cross_compile import HOPPER, SHARED_BYTES_LIMIT, Compiled, Kernel, compile_kernels
from tests.worker.gpu.interpreted_gpu import InterpretedGpu
from tests.worker.gpu.test_attention_compiled import Recorder
from worker.devices.dependent_launch import dependent_launches
from worker.gpu.state_kernels import chunks, convolution, recurrence
from worker.gpu.state_kernels.executor import GpuStates
from worker.states.interface import Convolution, Recurrence, StateShape, StateStep
from worker.states.state_layout import StateLayout
from worker.worker_config import WorkerConfig

pytestmark = pytest.mark.night

AMPERE = 80
AMPERE_SHARED_BYTES = 163 * 1024
KERNELS = (
    (recurrence, "recur_kernel"),
    (chunks, "prepare_kernel"),
    (chunks, "chunk_kernel"),
    (convolution, "convolve_kernel"),
)
Key = tuple[str, str, int]
"""Family, kernel and compute capability."""


FAMILIES = {"qwen3_5": (16, 32, 128, 128), "granite": (1, 48, 128, 64), "falcon_mamba": (1, 64, 16, 1)}
"""Groups, heads, numbers of a key and of a value."""


def launches_of(family: str) -> dict[str, Kernel]:
    """Kernels, by name, of decodes and of a prompt."""
    num_groups, num_heads, key_dim, value_dim = FAMILIES[family]
    dtype, has_beta, by_channel = torch.bfloat16, family == "qwen3_5", family == "falcon_mamba"
    shape = StateShape(dtype, 2048, 3, num_heads, key_dim, value_dim)
    layout, device = (
        StateLayout({0: shape}, 1 << 19),
        InterpretedGpu(WorkerConfig(model_path="", device="cpu")),
    )
    states = GpuStates(torch.empty(2 * layout.num_stripes, 1 << 17), layout, device)
    states.begin_layer(0)
    found: dict[str, Kernel] = {}
    for lens in ([1, 1], [40]):
        noted: dict[str, Kernel] = {}
        with pytest.MonkeyPatch.context() as patch, dependent_launches():
            patch.setattr(GpuStates, "_try_chunks", lambda *_: True)
            for module, name in KERNELS:
                patch.setattr(module, name, Recorder(module, name, noted))
            num_tokens = sum(lens)
            blocks_RS = np.ones((len(lens), layout.num_stripes), np.int64)
            is_first_R = np.zeros(len(lens), np.bool_)
            states.begin_step(StateStep(lens.count(1), np.cumsum([0, *lens]), is_first_R, blocks_RS))
            states.convolve(
                Convolution(
                    torch.empty(num_tokens, 2048, dtype=dtype),
                    torch.empty(2048, 4, dtype=dtype),
                    None,
                    "silu",
                )
            )
            states.recur(
                Recurrence(
                    torch.empty(num_tokens, num_groups, key_dim, dtype=dtype),
                    torch.empty(num_tokens, num_groups, key_dim, dtype=dtype),
                    torch.empty(num_tokens, num_heads, value_dim, dtype=dtype),
                    torch.empty(num_tokens, num_heads, *([key_dim] if by_channel else [])),
                    torch.empty(num_tokens, num_heads, dtype=dtype) if has_beta else None,
                    has_unit_keys=has_beta,
                    scaling=0.1,
                )
            )
        found |= {f"{name} of {lens}": kernel for name, kernel in noted.items()}
    return found


@pytest.fixture(scope="module")
def compiled() -> dict[Key, Compiled]:
    kernels: dict[Key, Kernel] = {}
    for family in FAMILIES:
        for name, kernel in launches_of(family).items():
            for capability in (AMPERE, HOPPER):
                may_wait = "WAITS" in kernel.constants
                is_early = may_wait and capability == HOPPER
                kernels[family, name, capability] = replace(
                    kernel,
                    capability=capability,
                    launch_pdl=is_early,
                    constants=kernel.constants | ({"WAITS": is_early} if may_wait else {}),
                )
    return dict(zip(kernels, compile_kernels(list(kernels.values())), strict=True))


def test_all_fit_into_shared_memory(compiled: dict[Key, Compiled]) -> None:
    for (family, name, capability), found in compiled.items():
        limit = SHARED_BYTES_LIMIT if capability == HOPPER else AMPERE_SHARED_BYTES
        assert found.shared_bytes <= limit, (family, name, capability)


def test_states_are_read_sixteen_bytes_at_a_time_and_little_is_spilled(
    compiled: dict[Key, Compiled],
) -> None:
    for (family, name, capability), found in compiled.items():
        if name.startswith(("recur", "convolve")):
            assert found.local_bytes <= 8, (family, name, capability)
        if name.startswith(("recur", "chunk")):
            assert found.widest_load_bytes == 16, (family, name, capability)


def test_chunks_are_multiplied_by_tensor_cores(compiled: dict[Key, Compiled]) -> None:
    for (_, name, _), found in compiled.items():
        assert found.uses_tensor_cores == name.startswith(("prepare", "chunk"))


def test_an_early_launch_waits_before_it_reads(compiled: dict[Key, Compiled]) -> None:
    for (_, name, capability), found in compiled.items():
        assert found.waits_first == (capability == HOPPER and name.startswith(("recur", "convolve")))
