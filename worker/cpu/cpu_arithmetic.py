"""The choice between ways to multiply by plain bf16 weights, by a trial and a short measurement at load.

Owns: the ways, the product that is measured, and how much faster than the first another must be.
Never: chooses by the rows of a step: a token's numbers must not depend on its neighbours. For ranks or
float32 models nothing is measured: ranks must agree, and the products of float32 are the same in all.
"""

import logging
import time
from pathlib import Path

import torch

from worker.cpu.cpu_proof import multiplies_exactly
from worker.cpu.native import Kernels, PackedWeight, pack

log = logging.getLogger(__name__)

DOT, EXPANDED, TILES = "avx512-bf16", "avx512-expanded", "amx"
"""Instruction sets: the instruction for bf16, multiply-adds of weights expanded to float32, and tiles."""
_WORDS = {
    DOT: "the dot instruction",
    EXPANDED: "multiply-adds of expanded weights",
    TILES: "tiles",
}
_NUM_INPUTS, _NUM_OUTPUTS, _NUM_ROWS = 1024, 512, 48
_NUM_TIMES = 9
_LEAST_GAIN = 1.1
"""Smaller differences come and go with what else the machine does; two starts should choose the same."""


def choose_kernels(library: Path, num_threads: int) -> Kernels:
    """Open the kernels of this processor, with the fastest products of bf16. Takes some milliseconds."""
    ways = open_ways(library, num_threads)
    first = ways[0]
    if len(ways) == 1:
        return first
    times_s = _measure(*ways)
    best_s, best = min(zip(times_s[1:], ways[1:], strict=True), key=lambda each: each[0])
    chosen = best if times_s[0] > _LEAST_GAIN * best_s else first
    measured = zip(times_s, ways, strict=True)
    log.info(
        "bf16 products by %s: %s",
        chosen.instruction_set,
        ", ".join(f"{1000 * time_s:.2f} ms by {_WORDS[way.instruction_set]}" for time_s, way in measured),
    )
    return chosen


def open_ways(library: Path, num_threads: int) -> list[Kernels]:
    """Open the kernels once for each way that this processor has; the first is kept at small differences."""
    first = Kernels(library, num_threads)
    if first.instruction_set != DOT:
        return [first]
    ways = [first, Kernels(library, num_threads, EXPANDED)]
    try:
        ways.append(open_kernels(library, num_threads, TILES))
    except ArithmeticError as error:
        log.warning("%s is not taken: %s", TILES, error)
    except ValueError as error:
        log.debug("no products by tiles: %s", error)
    return ways


def open_kernels(library: Path, num_threads: int, instruction_set: str) -> Kernels:
    """Open the kernels of this name. Tiles are tried: they were written without a processor that has them.

    Raises OSError, ValueError if this processor lacks them, ArithmeticError if they are wrong.
    """
    kernels = Kernels(library, num_threads, instruction_set)
    # One thread takes all blocks, and so every shape of tiles.
    if instruction_set == TILES and not multiplies_exactly(
        Kernels(library, 1, TILES), Kernels(library, 1, DOT)
    ):
        raise ArithmeticError("its products are not exact on this processor")
    return kernels


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
