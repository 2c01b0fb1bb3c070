"""Time of steps, against what the device's memory and arithmetic allow; and where the time goes.

Owns: the measurement of decodes and of prefill, the floors, and the goals they are compared with.
Never: judges: the page has measured, floor and goal side by side.

A decode step cannot take less than its bytes over the bandwidth: all weights, and the keys and values of
every sequence, and states twice. Prefill cannot take less than its products over the rate of a large product.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.load.report import percentile
from campaigns.gpu.driving import Drive, TimedStep, open_worker, scheduler_config
from campaigns.gpu.results import Record, read_record
from campaigns.gpu.shapes import SHAPES, checkpoint
from campaigns.peers.floor import StepBytes, step_bytes
from scheduler.config import PrefixCaching

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings
    from worker.worker import Worker
    from worker.worker_config import ModelFacts

_CONTEXT = 1024
_NUM_DECODES = 64
_BATCHES = (1, 8, 16, 64, 256)
_NUM_WARM = 8
_NUM_TOP_KERNELS = 15
_BITS = {"none": 16, "int8": 8, "fp8": 8, "int4": 4.5}
"""Bits of a number of a layer, scales of groups included."""
_LONG_BATCHES = (1, 16)
"""Sequences whose context is as long as a step of prompts."""

# Output tokens per second with 1,024 tokens of context, by shape and batch, on an H100 and on an H200. Set
# before anything was measured: of an H100 by datasheet; of an H200 what it must reach and what it should.
_GOALS = {
    ("qwen3-0.6b", 1): ("700", "900 / 1,100"),
    ("qwen3-0.6b", 16): ("-", "10,000 / 12,500"),
    ("qwen3-0.6b", 64): ("14,000", "19,000 / 22,000"),
    ("qwen3-0.6b", 256): ("17,000", "25,000 / 28,000"),
    ("llama-3.1-8b", 1): ("165", "215 / 240"),
    ("llama-3.1-8b", 16): ("-", "3,000 / 3,300"),
    ("llama-3.1-8b", 64): ("6,400", "8,800 / 9,500"),
    ("llama-3.1-8b", 256): ("10,500", "14,500 / 16,000"),
}
_PREFILL_GOALS = {"llama-3.1-8b": ("28,000", "34,100 / 40,000"), "qwen3-0.6b": ("-", "195,000 / 273,000")}


class Bench:
    """One shape on one device."""

    def __init__(self, record: Record, settings: "Settings", shape: str, folder: Path) -> None:
        self._record = record
        self._shape = shape
        self._is_smoke = settings.is_smoke
        self._options = settings.options
        self._context = 12 if settings.is_smoke else _CONTEXT
        self._batches = (1, 2) if settings.is_smoke else settings.batches or _BATCHES
        self._num_decodes = 4 if settings.is_smoke else _NUM_DECODES
        self._num_warm = 1 if settings.is_smoke else _NUM_WARM
        device = read_record(settings.out, "device").get("figures", {})
        self._bandwidth = device.get("copy_bytes_per_s")
        self._flops = device.get("matmul_flops")
        self._is_h200 = "H200" in device.get("device", "")
        self._most_tokens = 16 if settings.is_smoke else 8192
        self._bytes: StepBytes = step_bytes(folder)
        started_s = time.perf_counter()
        self._worker, self._facts = self._open(folder, settings.target)
        record.note(f"Loaded in {time.perf_counter() - started_s:.1f} s, graphs and trials included.")
        if self._bandwidth is None:
            record.note("The part `device` has not run: there are no floors.")

    def _open(self, folder: Path, target: str) -> "tuple[Worker, ModelFacts]":
        most = self._batches[-1]
        longest = max(2 * self._context, self._most_tokens + self._num_warm + self._num_decodes)
        settings: dict[str, Any] = {"max_num_seqs": most, "max_model_len": longest}
        if self._is_smoke:
            settings |= {"dtype": "float32", "num_blocks": 32, "block_size": 8}
        settings |= self._options
        settings["max_num_batched_tokens"] = self._most_tokens
        return open_worker(folder, target, **settings)

    def measure_prefill(self) -> None:
        table = self._record.table(
            "Prefill", "Tokens a step", "Tokens", "Tokens per second", "Share of the products' rate", "Goal"
        )
        goal = _PREFILL_GOALS.get(self._shape)
        num_prompts = 2 if self._is_smoke else 16
        for most in (8, 16) if self._is_smoke else (512, 2048, 8192):
            for _ in range(2):  # the first one compiles what is not compiled yet
                drive = self._drive(num_prompts, 1, most)
                seconds = _seconds(drive.run)
                drive.free_rows()
            rate = num_prompts * self._context / seconds
            share = f"{rate * self._flops_per_token() / self._flops:.0%}" if self._flops else "-"
            table.add(most, num_prompts * self._context, f"{rate:.0f}", share, self._goal_of(goal))
            self._record.figure(f"prefill_{most}", rate)

    def measure_long(self) -> None:
        """Time one prompt of the most tokens that a step has, alone, and few decodes of long contexts."""
        table = self._record.table("One prompt alone", "Tokens", "Tokens a step", "Time", "Tokens per second")
        length, context = self._most_tokens, self._context
        self._context = length
        for most in (8, 16) if self._is_smoke else (2048, 8192):
            for _ in range(2):
                drive = self._drive(1, 1, most)
                seconds = _seconds(drive.run)
                drive.free_rows()
            table.add(length, most, f"{seconds * 1e3:.1f} ms", f"{length / seconds:.0f}")
            self._record.figure(f"prompt_{length}_by_{most}", seconds)
        table = self._record.table("Decode of long contexts", "Batch", "Context", "Step", "Floor", "p95")
        for batch in (1,) if self._is_smoke else _LONG_BATCHES:
            times_s = [step.took_s for step in self._decode(batch, 2)]
            floor_s = self._floor_s(batch)
            step_s = statistics.median(times_s)
            cells = (f"{step_s * 1e3:.2f} ms", f"{floor_s * 1e3:.2f} ms" if floor_s else "-")
            table.add(batch, length, *cells, f"{_late_shares(times_s)[0] * 1e3:.2f} ms")
            self._record.figure(f"decode_{batch}_of_{length}", step_s)
        self._context = context

    def measure_decodes(self) -> None:
        table = self._record.table(
            f"Decode, {self._context} tokens of context",
            *("Batch", "Plans in flight", "Step", "Floor", "Share", "Tokens per second", "Goal"),
            *("Host's launch", "p95", "p99"),
        )
        for batch in self._batches:
            for depth in (2, 1) if batch in (1, 64) else (2,):
                steps = self._decode(batch, depth)
                step_s = statistics.median(step.took_s for step in steps)
                floor_s = self._floor_s(batch)
                table.add(
                    *(batch, depth, f"{step_s * 1e3:.2f} ms"),
                    f"{floor_s * 1e3:.2f} ms" if floor_s else "-",
                    f"{floor_s / step_s:.0%}" if floor_s else "-",
                    f"{batch / step_s:.0f}",
                    self._goal_of(_GOALS.get((self._shape, batch))),
                    f"{statistics.median(step.launch_s for step in steps) * 1e3:.2f} ms",
                    *(f"{share * 1e3:.2f} ms" for share in _late_shares([step.took_s for step in steps])),
                )
                self._record.figure(f"decode_{batch}_depth_{depth}", step_s)

    def profile(self) -> None:
        for batch in (1, self._batches[-1] if self._is_smoke else 64):
            drive = self._drive(batch, self._num_decodes, self._most_tokens)
            while not drive.steps or not drive.steps[-1].is_decode:
                drive.turn()
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            before = len(drive.steps)
            with torch.profiler.profile(activities=kinds) as profiler:
                for _ in range(2 if self._is_smoke else 10):
                    drive.turn()
            self._tell_profile(profiler, batch, len(drive.steps) - before)
            drive.run().free_rows()

    def _tell_profile(self, profiler: Any, batch: int, num_steps: int) -> None:
        table = self._record.table(
            f"Where {num_steps} decode steps of batch {batch} spend the device's time",
            *("Kernel", "Calls", "Time of a step", "Share"),
        )
        averages = profiler.key_averages()
        # An operator of the host is told with the time of the kernels that it launched: that counts twice.
        kernels = [each for each in averages if each.device_type.name == "CUDA"]
        if kernels:
            events = [(each.key, each.count, each.self_device_time_total) for each in kernels]
        else:
            events = [(each.key, each.count, each.self_cpu_time_total) for each in averages]
        total_us = sum(us for _, _, us in events) or 1.0
        events.sort(key=lambda each: -each[2])
        for name, count, us in events[:_NUM_TOP_KERNELS]:
            table.add(name[:90], count, f"{us / max(num_steps, 1):.1f} us", f"{us / total_us:.1%}")

    def _decode(self, batch: int, depth: int) -> list[TimedStep]:
        drive = self._drive(batch, self._num_warm + self._num_decodes, self._most_tokens, depth=depth)
        drive.run().free_rows()
        decodes = [step for step in drive.steps if step.is_decode and step.num_sequences == batch]
        return decodes[self._num_warm :] or decodes

    def _drive(self, num_prompts: int, max_tokens: int, most_tokens: int, *, depth: int = 2) -> Drive:
        """Prompts end where half of what is generated makes the context that is asked for."""
        config = scheduler_config(
            self._facts,
            max_num_seqs=self._batches[-1],
            max_num_batched_tokens=most_tokens,
            prefix_caching=PrefixCaching.OFF,
            max_plans_in_flight=depth if self._facts.runs_ahead else 1,
        )
        drive = Drive(self._worker, config)
        self._add_prompts(drive, num_prompts, max_tokens)
        return drive

    def _add_prompts(self, drive: Drive, num_prompts: int, max_tokens: int) -> None:
        vocab_size = SHAPES[self._shape].vocab_size
        length = self._context - max_tokens // 2
        for number in range(num_prompts):
            drive.add([(number * 104_729 + place * 7919) % vocab_size for place in range(length)], max_tokens)

    def _floor_s(self, batch: int) -> float | None:
        if self._bandwidth is None:
            return None
        kv_per_token = self._bytes.kv_per_token
        if self._options.get("kv_cache_dtype") == "fp8":
            kv_per_token //= 2
        of_sequence = self._context * kv_per_token + self._bytes.states_per_client
        return float((self._weight_bytes() + batch * of_sequence) / self._bandwidth)

    def _weight_bytes(self) -> int:
        """Bytes that a step reads: layers by the bits of their numbers, the output layer as it is."""
        head_bytes = 2 * SHAPES[self._shape].vocab_size * SHAPES[self._shape].hidden_size
        bits = _BITS[self._options.get("quantization", "none")]
        return int((self._bytes.weights - head_bytes) * bits / 16) + head_bytes

    def _flops_per_token(self) -> int:
        """Two for each weight of the layers: as many as they have bytes. Only last tokens go further."""
        shape = SHAPES[self._shape]
        return self._bytes.weights - 2 * shape.vocab_size * shape.hidden_size

    def _goal_of(self, goal: tuple[str, str] | None) -> str:
        return "-" if goal is None or self._options else goal[self._is_h200]

    def close(self) -> None:
        self._worker.close()


def run(record: Record, settings: "Settings") -> None:
    shape = settings.shape
    if settings.is_smoke:
        full = SHAPES.get(shape)
        shape = "tiny" if full is None or full.recurrent is None else "tiny-recurrent"
    started_s = time.perf_counter()
    folder = checkpoint(shape, settings.checkpoints)
    record.note(f"{shape}: random weights, there after {time.perf_counter() - started_s:.1f} s.")
    bench = Bench(record, settings, shape, folder)
    bench.measure_decodes()
    if not settings.batches:
        bench.measure_prefill()
    if not settings.options:
        bench.measure_long()
    bench.profile()
    bench.close()


def _late_shares(times_s: list[float]) -> tuple[float, float]:
    """Return the 95th and the 99th percentile."""
    return percentile(sorted(times_s), 95), percentile(sorted(times_s), 99)


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
