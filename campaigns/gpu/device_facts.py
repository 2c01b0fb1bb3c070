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
# Of Llama-3.1-8B: query, key and value; output; gate and up; down.
_LAYER_SHAPES = ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336))


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
    _time_linears(record, device, shrink=32 if settings.is_smoke else 1)


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


def _time_linears(record: Record, device: str, *, shrink: int) -> None:
    """The four products of a layer, with as many different weights as no cache holds."""
    table = record.table(
        "Products of Llama-3.1-8B's layer, bf16", "Tokens", "Outputs x inputs", "Median", "Rate"
    )
    for num_tokens in (1, 8, 64, 256):
        for num_outputs, num_inputs in _LAYER_SHAPES:
            shape = (num_outputs // shrink, num_inputs // shrink)
            weights = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)]
            tokens = torch.randn(num_tokens, shape[1], device=device, dtype=torch.bfloat16)

            def work(tokens: torch.Tensor = tokens, weights: list[torch.Tensor] = weights) -> None:
                for weight in weights:
                    torch.nn.functional.linear(tokens, weight)

            seconds = timed(work, device) / len(weights)
            rate = 2 * shape[0] * shape[1] / seconds
            table.add(num_tokens, f"{shape[0]} x {shape[1]}", ms(seconds), f"weights at {gb_per_s(rate)}")


def timed(work: Callable[[], object], device: str) -> float:
    """Median seconds of one call, after three for warmth."""
    for _ in range(3):
        work()
    if device == "cpu":
        return statistics.median(_clocked(work) for _ in range(_REPEATS))
    return statistics.median(_timed_on_gpu(work) for _ in range(_REPEATS))


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
