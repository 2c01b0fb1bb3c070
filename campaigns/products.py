"""Cost of one product on this machine's CPU, by kind of weight and number of rows.

    python -m campaigns.products --threads 2

Prints how many times faster than bfloat16 each kind is, and the rate at which it reads weights. Kinds take
turns, and the best of many turns counts, so that other programs disturb all of them alike. `--thread-time`
counts the time that one thread computes, for a machine that is shared.

Owns: the shapes and the table. Never: is a test: a time proves nothing about another machine.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from worker.cpu.kernel_build import build_library, find_library
from worker.cpu.native import Kernels, PackedWeight, pack, pack_int8
from worker.cpu.packing.grouped_packing import Inputs, pack_grouped
from worker.quantized.grouped_weight import E2M1_TABLE, UNSIGNED_TABLE, GroupedWeight

_NUM_INPUTS, _NUM_OUTPUTS = 4096, 3072
_ROWS = (1, 2, 4, 8, 16, 64)


def _kinds() -> dict[str, Callable[[], PackedWeight]]:
    return {
        "bf16": lambda: pack(_dense()),
        "int8": _int8,
        "w4a16 G128 asym": lambda: pack_grouped(_nibbles(128, UNSIGNED_TABLE, has_offsets=True)),
        "w4a16 G128": lambda: pack_grouped(_nibbles(128, UNSIGNED_TABLE, has_offsets=False)),
        "w4a16 G32": lambda: pack_grouped(_nibbles(32, UNSIGNED_TABLE, has_offsets=False)),
        "fp4a16 G16": lambda: pack_grouped(_nibbles(16, E2M1_TABLE, has_offsets=False)),
        "w4a8 G128 asym": lambda: pack_grouped(
            _nibbles(128, UNSIGNED_TABLE, has_offsets=True), inputs=Inputs.INT8
        ),
        "w4a8 G32": lambda: pack_grouped(_nibbles(32, UNSIGNED_TABLE, has_offsets=False), inputs=Inputs.INT8),
        "w8a16 channel": lambda: pack_grouped(_bytes(torch.int8, _NUM_INPUTS)),
        "w8a8 channel": lambda: pack_grouped(_bytes(torch.int8, _NUM_INPUTS), inputs=Inputs.INT8),
        "fp8 128x128": lambda: pack_grouped(_bytes(torch.float8_e4m3fn, 128)),
    }


def _dense() -> Tensor:
    return torch.randn(_NUM_OUTPUTS, _NUM_INPUTS).bfloat16()


def _int8() -> PackedWeight:
    codes = torch.randint(-127, 128, (_NUM_OUTPUTS, _NUM_INPUTS), dtype=torch.int8)
    return pack_int8(codes, torch.rand(_NUM_OUTPUTS))


def _nibbles(group_size: int, table: Tensor, *, has_offsets: bool) -> GroupedWeight:
    codes = torch.randint(256, (_NUM_OUTPUTS, _NUM_INPUTS // 2)).to(torch.uint8)
    scales = torch.rand(_NUM_OUTPUTS, _NUM_INPUTS // group_size)
    offsets = scales * 8 if has_offsets else None
    return GroupedWeight(codes=codes, table=table, scales_NG=scales, offsets_NG=offsets)


def _bytes(dtype: torch.dtype, group_size: int) -> GroupedWeight:
    codes = torch.randint(126, (_NUM_OUTPUTS, _NUM_INPUTS)).to(torch.uint8).view(dtype)
    return GroupedWeight(codes=codes, scales_NG=torch.rand(_NUM_OUTPUTS, _NUM_INPUTS // group_size))


def _num_bytes(weight: PackedWeight) -> int:
    return weight.data.nbytes + sum(each.nbytes for each in weight.kept if each is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--thread-time", action="store_true", help="time of one thread; implies --threads 1")
    parser.add_argument("--instructions", default="", help="a name, as --cpu-kernels; empty: the best")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=160, help="codes or numbers of each kind")
    parser.add_argument("--rows", type=int, nargs="*", default=_ROWS)
    parser.add_argument("--kinds", nargs="*", help="only those with one of these in their name, and bf16")
    options = parser.parse_args()
    clock = time.thread_time if options.thread_time else time.perf_counter
    threads = 1 if options.thread_time else options.threads
    kernels = Kernels(find_library() or build_library(), threads, options.instructions)
    torch.set_num_threads(1)
    weights = {}
    for name, make in _kinds().items():
        if name != "bf16" and options.kinds and not any(each in name for each in options.kinds):
            continue
        one = make()
        weights[name] = [one, *(make() for _ in range(options.megabytes * 10**6 // one.data.nbytes - 1))]
    print(f"{kernels.instruction_set}, {threads} threads, [{_NUM_OUTPUTS}, {_NUM_INPUTS}]")
    print("rows  " + "".join(f"{name:>17}" for name in weights))
    for num_rows in options.rows:
        x = torch.randn(num_rows, _NUM_INPUTS).bfloat16()
        best = dict.fromkeys(weights, float("inf"))
        for _ in range(options.turns):
            for name, copies in weights.items():
                start = clock()
                for weight in copies:
                    kernels.multiply(x, weight)
                best[name] = min(best[name], (clock() - start) / len(copies))
        cells = []
        for name, copies in weights.items():
            rate = _num_bytes(copies[0]) / best[name] / 1e9
            cells.append(f"{best['bf16'] / best[name]:6.2f}x {rate:5.1f}GB/s")
        print(f"{num_rows:4}  " + "".join(f"{cell:>17}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
