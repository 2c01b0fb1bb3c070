"""The choice between two ways to multiply by plain bf16 weights, by a short measurement at load.

Owns: the two ways, the product that is measured, and how much faster the second must be.
Never: chooses by the rows of a step: a token's numbers must not depend on its neighbours. For ranks or
float32 models nothing is measured: ranks must agree, and the products of float32 are the same in both.
"""

import logging
import time
from pathlib import Path

import torch

from worker.cpu.native import Kernels, PackedWeight, pack

log = logging.getLogger(__name__)

DOT, EXPANDED = "avx512-bf16", "avx512-expanded"
"""Instruction sets: by the instruction for bf16, or by multiply-adds of weights expanded to float32."""
_NUM_INPUTS, _NUM_OUTPUTS, _NUM_ROWS = 1024, 512, 48
_NUM_TIMES = 9
_LEAST_GAIN = 1.1
"""Smaller differences come and go with what else the machine does; two starts should choose the same."""


def choose_kernels(library: Path, num_threads: int) -> Kernels:
    """Open the kernels of this processor, with the faster products of bf16. Takes some milliseconds."""
    kernels = Kernels(library, num_threads)
    if kernels.instruction_set != DOT:
        return kernels
    other = Kernels(library, num_threads, EXPANDED)
    times_s = _measure(kernels, other)
    chosen = other if times_s[0] > _LEAST_GAIN * times_s[1] else kernels
    log.info(
        "bf16 products by %s: %.2f ms by the dot instruction, %.2f ms by multiply-adds of expanded weights",
        chosen.instruction_set,
        *(1000 * each for each in times_s),
    )
    return chosen


def _measure(*ways: Kernels) -> list[float]:
    """Time one product of many rows each way; the best of several, taken in turns."""
    generator = torch.Generator().manual_seed(1)
    weight = pack(torch.randn((_NUM_OUTPUTS, _NUM_INPUTS), generator=generator).bfloat16())
    x_TK = torch.randn((_NUM_ROWS, _NUM_INPUTS), generator=generator).bfloat16()
    best_s = [float("inf")] * len(ways)
    for _ in range(_NUM_TIMES):
        for index, kernels in enumerate(ways):
            best_s[index] = min(best_s[index], _time(kernels, x_TK, weight))
    return best_s


def _time(kernels: Kernels, x_TK: torch.Tensor, weight: PackedWeight) -> float:
    begin = time.perf_counter()
    kernels.multiply(x_TK, weight)
    return time.perf_counter() - begin
