"""The parts `exchange` and `stream`: how long a step in one kernel waits, and how fast it reads weights.

Never: judges: docs/benchmarks/gpu.md says which figure decides what.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from campaigns.gpu.one_kernel.launching import TILE_BYTES, Kernel, compile_cubin, seconds_of
from campaigns.gpu.results import Record, Table

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings

_ROUNDS = (1000, 3000)
_NUMBERS = (1024, 3072, 4096, 14_336)
_READ_BYTES = 16 * 512 * 2
_NUM_INPUTS = 4096
_X_BYTES = 8 * (512 * 2 + 16)
_STREAM_TILES = 992
"""Tiles of a block: 2 GiB for 132 blocks."""
_FLUSH_BYTES = 256 << 20
_PIECE = 64 << 10
_WARM_TILES = (4, 8, 12)
_IN_CLUSTERS = 128


Launching = Callable[..., "partial[None]"]


def run_exchange(record: Record, settings: "Settings") -> None:
    """Take the slope between two numbers of rounds: a launch's own time falls out."""
    table = record.table("Waiting for all blocks", "What", "Words", "Of one")
    few, many = (1, 3) if settings.is_smoke else _ROUNDS
    cubin, place, blocks = _opened(settings)
    memory = torch.zeros(64 * 1024, dtype=torch.int64, device=place)
    out = torch.zeros(blocks * 288, dtype=torch.int32, device=place)
    asked = [("one_counter", 0), ("flag_of_each", 0), ("cluster_barriers", 0)]
    for name, numbers in (*asked, *(("exchanges", numbers) for numbers in _NUMBERS)):
        try:
            kernel, seconds = Kernel(cubin, name), []
            for rounds in (few, many):
                if name == "cluster_barriers":
                    launch = partial(kernel.launch, _IN_CLUSTERS, rounds)
                elif numbers:
                    arguments = (memory.data_ptr(), numbers, rounds, out.data_ptr())
                    launch = partial(kernel.launch, blocks, *arguments)
                else:
                    launch = partial(kernel.launch, blocks, memory.data_ptr(), rounds)
                seconds.append(seconds_of(memory.zero_, launch))
        except RuntimeError as error:
            table.add(name, numbers or "-", str(error).splitlines()[0][:80])
            continue
        of_one = (seconds[1] - seconds[0]) / (many - few)
        table.add(name, numbers or "-", f"{of_one * 1e6:.3f} us")
        record.figure(f"{name}_{numbers}", of_one)


def run_stream(record: Record, settings: "Settings") -> None:
    """Stream 2 GiB through rings of several sizes, then small weights that were brought into L2 or not."""
    cubin, place, blocks = _opened(settings)
    tiles_each = 8 if settings.is_smoke else _STREAM_TILES
    counters = torch.zeros(64, dtype=torch.int32, device=place)
    out = torch.zeros(blocks * 256, dtype=torch.float32, device=place)
    num_numbers = blocks * max(tiles_each, max(_WARM_TILES)) * _READ_BYTES // 2
    weight = torch.empty(num_numbers, dtype=torch.bfloat16, device=place).normal_()

    def streaming(stages: int, between: int, tiles: int, num_inputs: int) -> "partial[None]":
        shared_bytes = stages * (TILE_BYTES + 16) + 256 + _X_BYTES
        kernel = Kernel(cubin, "stream", shared_bytes=shared_bytes)
        arguments = (weight.data_ptr(), num_inputs, tiles, between, stages)
        return partial(kernel.launch, blocks, *arguments, counters.data_ptr(), out.data_ptr())

    table = record.table("A stream of weights", "Stages", "Tiles from barrier to barrier", "Rate")
    for stages in (4, 6, 8, 10, 11, 12):
        for between in (0, 8, 4, 2):
            half_s, whole_s = (
                seconds_of(counters.zero_, streaming(stages, between, tiles, _NUM_INPUTS))
                for tiles in (tiles_each // 2, tiles_each)
            )
            num_bytes = blocks * (tiles_each - tiles_each // 2) * _READ_BYTES
            rate = num_bytes / max(whole_s - half_s, 1e-9)
            table.add(stages, between or "none", f"{rate / 1e12:.2f} TB/s")
            record.figure(f"stream_{stages}_{between}", rate)
    _warm(record.table("Weights that are in L2 already", "MiB", "Cold", "Warm"), cubin, weight, streaming)


def _warm(table: Table, cubin: bytes | None, weight: torch.Tensor, streaming: Launching) -> None:
    """Time a stream of a few MiB, with and without a prefetch before it."""
    other = torch.empty(_FLUSH_BYTES if cubin else 1, dtype=torch.uint8, device=weight.device)
    warm = Kernel(cubin, "warm")
    for tiles in _WARM_TILES:
        stream = streaming(8, 0, tiles, 2048)
        blocks = stream.args[0]
        num_bytes = blocks * tiles * _READ_BYTES

        def flush_and_warm(blocks: int = blocks, num_bytes: int = num_bytes) -> None:
            other.fill_(1)
            warm.launch(blocks, weight.data_ptr(), num_bytes, _PIECE, threads=32)

        cold_s, warm_s = seconds_of(partial(other.fill_, 1), stream), seconds_of(flush_and_warm, stream)
        table.add(f"{num_bytes / 2**20:.0f}", f"{cold_s * 1e6:.1f} us", f"{warm_s * 1e6:.1f} us")


def _opened(settings: "Settings") -> tuple[bytes | None, torch.device, int]:
    """Return the kernels, the device, and the number of blocks: one for each processor."""
    if settings.is_smoke:
        return None, torch.device("cpu"), 2
    torch.zeros(1, device="cuda")  # makes the device's context current
    num_processors = torch.cuda.get_device_properties(0).multi_processor_count
    return compile_cubin(), torch.device("cuda"), num_processors
