"""The kernels of codes as a Hopper GPU gets them: what fits, what is spilled, which instructions they use."""

from dataclasses import replace

import pytest
import torch

from tests.worker.gpu.cross_compile import SHARED_BYTES_LIMIT, Compiled, Kernel, compile_kernels
from tests.worker.gpu.test_attention_compiled import Recorder
from tests.worker.quantized.random_weights import random_weight
from worker.gpu.quantized import products as code_products
from worker.gpu.quantized.kernels import code_kernels, row_kernels
from worker.gpu.quantized.kernels import numbers as code_numbers
from worker.gpu.quantized.products import CodeProduct
from worker.model.linear import Linear

pytestmark = pytest.mark.night

CASES = {
    "int4 by 128, one token": ("unsigned", 128, 1),
    "int4 by 128, decode": ("unsigned", 128, 16),
    "int4 by 32, decode": ("signed", 32, 16),
    "int4 by 128, 64 tokens": ("unsigned", 128, 64),
    "int4 by 128, prefill": ("unsigned", 128, 1000),
    "e2m1 by 16, decode": ("e2m1", 16, 16),
    "int8 by channel, decode": ("int8", 4096, 16),
    "int8 by channel, prefill": ("int8", 4096, 1000),
    "float8 by block, prefill": ("float8", 128, 1000),
}


WRITTEN = {
    "int4 by 32, written": ("signed", 32, 0),
    "int4 by 128, written": ("unsigned", 128, 0),
    "int8 by channel, written": ("int8", 4096, 0),
}
"""Numbers alone, for nobody's rows."""


def launch_of(kind: str, group_size: int, num_tokens: int) -> Kernel:
    weight = random_weight(kind, 256, 4096, group_size)
    # Scales as checkpoints have them: two bytes.
    offsets = None if weight.offsets_NG is None else weight.offsets_NG.round()
    weight = replace(weight, scales_NG=weight.scales_NG.bfloat16().float(), offsets_NG=offsets)
    noted: dict[str, Kernel] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_numbers, "_IS_INTERPRETED", False)  # the compiler gets the machine's instructions
        for name in ("multiply_codes_kernel", "write_numbers_kernel"):
            patch.setattr(code_products, name, Recorder(code_kernels, name, noted))
        product = CodeProduct(Linear.of(weight))
        if not num_tokens:
            product.numbers(torch.bfloat16)
            return noted["write_numbers_kernel"]
        product.multiply(torch.empty((num_tokens, 4096), dtype=torch.bfloat16))
    return noted["multiply_codes_kernel"]


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    kernels = {name: launch_of(*case) for name, case in (CASES | WRITTEN).items()}
    kernels["rows"] = Kernel(
        function=f"{row_kernels.__name__}:round_rows_kernel",
        signature={
            "x_ptr": "*bf16",
            "rounded_ptr": "*u8",
            "scales_ptr": "*fp32",
            "num_inputs": "i32",
            "num_places": "i32",
            "RANGE": "constexpr",
            "AT_ONCE": "constexpr",
        },
        constants={"RANGE": 64, "AT_ONCE": 1024},
    )
    return dict(zip(kernels, compile_kernels(list(kernels.values())), strict=True))


@pytest.mark.parametrize("name", [*CASES, *WRITTEN, "rows"])
def test_a_kernel_fits_into_a_hopper_gpu_without_spilling(compiled: dict[str, Compiled], name: str) -> None:
    assert compiled[name].shared_bytes <= SHARED_BYTES_LIMIT
    assert not compiled[name].is_spilled


@pytest.mark.parametrize("name", CASES)
def test_codes_are_multiplied_by_tensor_cores(compiled: dict[str, Compiled], name: str) -> None:
    # Eight tokens are fewer than the newer instructions have; a warp's own take them.
    assert compiled[name].uses_tensor_cores
    assert compiled[name].uses_warp_group_products or "one token" in name
    # Codes go to shared memory by themselves, and from there to the threads that decode them.
    assert compiled[name].widest_load_bytes == 16


@pytest.mark.parametrize("name", CASES)
def test_codes_become_numbers_two_at_a_time(compiled: dict[str, Compiled], name: str) -> None:
    assert "fma.rn.bf16x2" in compiled[name].ptx
