"""The choice among the instruction sets that a processor has, by a trial and a short measurement at load.

Owns: the sets that are tried before they are taken; the ways to multiply by plain bf16 weights, the product
that is measured, and how much faster than the first another must be.
Never: chooses by the rows of a step: a token's numbers must not depend on its neighbours. For ranks or
float32 models nothing is measured: ranks must agree, and the products of float32 are the same in all.
"""

import logging
import time
from pathlib import Path

import torch

from worker.cpu.native import Kernels, PackedWeight, pack
from worker.cpu.proof import multiplies_exactly

log = logging.getLogger(__name__)

DOT, EXPANDED, TILES = "avx512-bf16", "avx512-expanded", "amx"
"""Instruction sets: the instruction for bf16, multiply-adds of weights expanded to float32, and tiles."""
BYTES, WIDE_BYTES, WITHOUT_BYTES = "avx-vnni", "avx512-vnni", "avx2"
"""The instruction for bytes without AVX-512, and with it but without bf16; and neither."""
_TRIED_BESIDE = {TILES: DOT, BYTES: WITHOUT_BYTES, WIDE_BYTES: WITHOUT_BYTES}
"""Sets that were written without a processor that takes them, each with one whose whole sums it must have."""
_WORDS = {
    DOT: "the dot instruction",
    EXPANDED: "multiply-adds of expanded weights",
    TILES: "tiles",
}
_NUM_INPUTS, _NUM_OUTPUTS, _NUM_ROWS = 1024, 512, 48
_NUM_TIMES = 9
_LEAST_GAIN = 1.1
"""Other work of the machine causes smaller differences; two starts should choose the same."""


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
    first = open_first(library, num_threads)
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


def open_first(library: Path, num_threads: int) -> Kernels:
    """Open this processor's first kernels, or others in their place if a trial says no. Raises OSError."""
    first = Kernels(library, num_threads)
    if _is_right(library, first.instruction_set):
        return first
    log.warning("%s is not taken: its products are not exact on this processor", first.instruction_set)
    return Kernels(library, num_threads, _TRIED_BESIDE[first.instruction_set])


def open_kernels(library: Path, num_threads: int, instruction_set: str) -> Kernels:
    """Open the kernels of this name, and try those that were written without such a processor.

    Raises OSError, ValueError if this processor lacks them, ArithmeticError if they are wrong.
    """
    kernels = Kernels(library, num_threads, instruction_set)
    if not _is_right(library, instruction_set):
        raise ArithmeticError("its products are not exact on this processor")
    return kernels


def _is_right(library: Path, instruction_set: str) -> bool:
    beside = _TRIED_BESIDE.get(instruction_set)
    # One thread takes all blocks, and so every shape of tiles.
    return beside is None or multiplies_exactly(
        Kernels(library, 1, instruction_set), Kernels(library, 1, beside)
    )


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
