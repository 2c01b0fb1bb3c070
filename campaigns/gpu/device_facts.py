"""Facts of the device: its name, speed of copies, speed of products.

Owns: the two rates that all other parts are compared with: `copy_bytes_per_s` and `matmul_flops`.
"""

import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from campaigns.gpu.results import Record, Table

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings

_REPEATS = 20
_CALLS_OF_A_GRAPH = 32


def run(record: Record, settings: "Settings") -> None:
    device = "cpu" if settings.is_smoke else "cuda"
    _describe(record, device)
    table = record.table("Rates", "What", "Size", "Median", "Rate")
    _time_copies(record, table, device, num_bytes=(1 << 22) if settings.is_smoke else (1 << 31))
    size = 128 if settings.is_smoke else 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = timed(lambda: left @ right, device)
    record.figure("matmul_flops", 2 * size**3 / seconds)
    table.add("bf16 product", f"{size} cubed", ms(seconds), f"{2 * size**3 / seconds / 1e12:.1f} TFLOP/s")


def _time_copies(record: Record, table: Table, device: str, *, num_bytes: int) -> None:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    seconds = timed(lambda: target.copy_(source), device)
    record.figure("copy_bytes_per_s", 2 * num_bytes / seconds)
    table.add("copy on the device", f"{num_bytes >> 20} MiB", ms(seconds), gb_per_s(2 * num_bytes / seconds))
    if device == "cpu":
        return
    pinned = torch.empty(num_bytes >> 3, dtype=torch.uint8, pin_memory=True)
    part = target[: len(pinned)]
    for what, work in (
        ("host to device", lambda: part.copy_(pinned, non_blocking=True)),
        ("device to host", lambda: pinned.copy_(part, non_blocking=True)),
    ):
        seconds = timed(work, device)
        table.add(what, f"{len(pinned) >> 20} MiB", ms(seconds), gb_per_s(len(pinned) / seconds))


def _describe(record: Record, device: str) -> None:
    table = record.table("Device", "What", "Value")
    table.add("processor", f"{platform.machine()}, {torch.get_num_threads()} threads of torch")
    for package in ("torch", "triton", "transformers", "numpy"):
        try:
            table.add(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            table.add(package, "not installed")
    name = "cpu"
    if device == "cuda":
        facts = torch.cuda.get_device_properties(0)
        name = facts.name
        table.add("GPU", name)
        table.add("multiprocessors", facts.multi_processor_count)
        table.add("memory", f"{facts.total_memory / 2**30:.1f} GiB")
        table.add("CUDA of torch", torch.version.cuda)
    record.figure("device", name)


def timed(work: Callable[[], object], device: str) -> float:
    """Median seconds of one call, after three for warmth."""
    for _ in range(3):
        work()
    if device == "cpu":
        return statistics.median(_clocked(work) for _ in range(_REPEATS))
    return statistics.median(_timed_on_gpu(work) for _ in range(_REPEATS))


def seconds_of_call(call: Callable[[], object], device: Any) -> float:
    """Time a call in a graph of several on a worker's Device; where that is None, call it once."""
    if device is None:
        call()
        return 1.0

    def work() -> None:
        for _ in range(_CALLS_OF_A_GRAPH):
            call()

    return timed(device.capture(work).replay, "cuda") / _CALLS_OF_A_GRAPH


def _timed_on_gpu(work: Callable[[], object]) -> float:
    new_event: Any = torch.cuda.Event  # torch leaves its constructor untyped
    begin, end = new_event(enable_timing=True), new_event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _clocked(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def gb_per_s(rate: float) -> str:
    return f"{rate / 1e9:.0f} GB/s"
