"""Exchanges of ranks on GPUs: the cost of one rank's in the graph of a step, and the time of two ranks'.

    python -m campaigns.gpu.exchanges FOLDER DEVICE RANK    # one of two ranks; prints its times

Owns: decodes with and without two sums over one rank behind each layer, by NCCL within their graphs; and the
sums and logits of a decode between two processes with a GPU each.
Never: exchanges by other code than a worker's.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from campaigns.gpu.driving import Drive, open_worker, scheduler_config
from campaigns.gpu.results import Record
from campaigns.gpu.shapes import SHAPES, Shape, checkpoint
from scheduler.config import PrefixCaching

if TYPE_CHECKING:
    from torch import Tensor

    from campaigns.gpu.cli import Settings
    from worker.ranks.device_ranks import DeviceRanks

_ROOT = Path(__file__).resolve().parents[2]
_NUM_ROWS = (1, 8, 64)
_GOAL = "1.02"
_SHAPE = "qwen3-0.6b"
_BYTES_PER_S = 4.3e12
"""Bandwidth of an H200, for the shortest decode that there can be."""
_NUM_TIMED = 5
_TWO_WITHIN_S = 300.0
_ASK_EVERY_S = 0.05


class RankFailed(Exception):
    """A rank has ended with an error, which it has printed, or has not ended in time."""


def measure_one_rank(record: Record, settings: "Settings") -> None:
    """Time decodes whose graphs have the sums of a divided model, over one rank, and decodes without."""
    table = record.table("Sums over one rank in the graph", "Sequences", "Step", "With sums", "Ratio", "Goal")
    folder = checkpoint("tiny" if settings.is_smoke else _SHAPE, settings.checkpoints)
    plain = _decodes(folder, settings)
    with tempfile.TemporaryDirectory() as meeting:
        joined = nullcontext() if settings.is_smoke else _joined(Path(meeting), "cuda:0", rank=0, num_ranks=1)
        with (
            joined as ranks,
            _summing_behind_layers(lambda sums: None if ranks is None else ranks.reduce(sums)),
        ):
            summed = _decodes(folder, settings)
    ratios = [with_sums / without for with_sums, without in zip(summed, plain, strict=True)]
    for cells in zip(_num_rows(settings), plain, summed, ratios, strict=True):
        num_rows, without_s, with_s, ratio = cells
        table.add(num_rows, f"{without_s * 1e3:.3f} ms", f"{with_s * 1e3:.3f} ms", f"{ratio:.3f}", _GOAL)
    record.figure("ratio_of_sums_over_one_rank", ratios)


def measure_two_ranks(record: Record, settings: "Settings") -> None:
    """Time the exchanges of a decode between two processes; on GPUs where there are two.

    Raises RankFailed.
    """
    shape = SHAPES["tiny" if settings.is_smoke else _SHAPE]
    device = "cpu" if settings.is_smoke else "cuda"
    table = record.table("Exchanges of two ranks", "Sequences", "Exchanges", "Of the shortest step")
    with tempfile.TemporaryDirectory() as meeting:
        command = (sys.executable, "-m", "campaigns.gpu.exchanges", meeting, device)
        found = json.loads(_outputs([(*command, str(rank)) for rank in range(2)], _TWO_WITHIN_S)[0])
    shares = [seconds / _shortest_s(shape) for seconds in found]
    for num_rows, seconds, share in zip(_NUM_ROWS, found, shares, strict=True):
        table.add(num_rows, f"{seconds * 1e6:.1f} us", f"{share:.1%}")
    record.figure("share_of_exchanges_of_two", shares)


def _outputs(commands: Sequence[Sequence[str]], within_s: float) -> list[str]:
    """Run commands beside each other, and return the lines that they print, short ones.

    A rank waits for the other for long: with the first that fails all end. Raises RankFailed.
    """
    give_up_s = time.monotonic() + within_s
    processes = [subprocess.Popen(each, cwd=_ROOT, stdout=subprocess.PIPE, text=True) for each in commands]
    try:
        while None in (statuses := [each.poll() for each in processes]) and not any(statuses):
            if time.monotonic() > give_up_s:
                raise RankFailed(f"ranks have not ended within {within_s:.0f} s")
            time.sleep(_ASK_EVERY_S)
        if any(statuses):
            raise RankFailed(f"ranks have ended with {statuses}")
    finally:
        for each in processes:
            each.kill()
        outputs = [each.communicate()[0] for each in processes]
    return outputs


def _num_rows(settings: "Settings") -> tuple[int, ...]:
    return _NUM_ROWS[:1] if settings.is_smoke else _NUM_ROWS


def _decodes(folder: Path, settings: "Settings") -> list[float]:
    """Return the median times of steps of so many sequences each."""
    options: dict[str, Any] = {"max_num_seqs": _NUM_ROWS[-1], "max_model_len": 512, "num_blocks": 4096}
    num_tokens = 64
    if settings.is_smoke:
        options = {"max_num_seqs": 2, "max_model_len": 32, "num_blocks": 32, "block_size": 8}
        options |= {"dtype": "float32", "max_num_batched_tokens": 16}
        num_tokens = 4
    worker, facts = open_worker(folder, settings.target, **options)
    found = []
    for num_rows in _num_rows(settings):
        config = scheduler_config(
            facts,
            max_num_seqs=options["max_num_seqs"],
            max_num_batched_tokens=options.get("max_num_batched_tokens", 2048),
            prefix_caching=PrefixCaching.OFF,
        )
        drive = Drive(worker, config)
        for number in range(num_rows):
            drive.add([3 + number % 50, 5, 7], num_tokens)
        drive.run().free_rows()
        times_s = [each.took_s for each in drive.steps if each.is_decode and each.num_sequences == num_rows]
        found.append(statistics.median(times_s[len(times_s) // 4 :]))
    worker.close()
    return found


@contextmanager
def _summing_behind_layers(reduce: Callable[["Tensor"], None]) -> Iterator[None]:
    """Let each layer sum its hidden state twice, as the shard of one does; over one rank it is the same."""
    from worker.gpu.triton_layer import TritonLayer

    forward = TritonLayer.forward

    def summing(layer: TritonLayer, *arguments: Any, **others: Any) -> "Tensor":
        hidden = forward(layer, *arguments, **others)
        for _ in range(2):
            reduce(hidden)
        return hidden

    TritonLayer.forward = summing  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        TritonLayer.forward = forward  # type: ignore[method-assign]


@contextmanager
def _joined(meeting: Path, device: str, *, rank: int, num_ranks: int) -> Iterator["DeviceRanks"]:
    """Meet the other ranks, and leave them at the end: a process can meet others once more only then."""
    import torch.distributed as dist

    from worker.ranks.device_ranks import DeviceRanks
    from worker.ranks.places import make_places
    from worker.worker_config import WorkerConfig

    config = WorkerConfig(model_path="", device=device, num_ranks=num_ranks)
    ranks = DeviceRanks(meeting, config, make_places(1, num_ranks)[rank])
    try:
        ranks.join(None)
        yield ranks
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _exchange_times(meeting: Path, device: str, shape: Shape, *, rank: int) -> list[float]:
    """Meet the other rank, and return the seconds of the exchanges of decodes."""
    import torch

    from worker.devices.device import open_device
    from worker.worker_config import WorkerConfig

    own = device if device == "cpu" else f"{device}:{rank}"
    opened = open_device(WorkerConfig(model_path="", device=own))
    found = []
    with _joined(meeting, device, rank=rank, num_ranks=2) as ranks:
        for num_rows in _NUM_ROWS:
            hidden = torch.zeros(num_rows, shape.hidden_size, dtype=torch.bfloat16, device=own)
            logits = hidden.new_zeros(num_rows, shape.vocab_size // 2)
            work = partial(_exchange, ranks, shape, hidden, logits)
            found.append(opened.seconds_of(work) or _seconds_of(work))
    return found


def _seconds_of(work: Callable[[], None]) -> float:
    """Time the work of a CPU."""
    started_s = time.perf_counter()
    for _ in range(_NUM_TIMED):
        work()
    return (time.perf_counter() - started_s) / _NUM_TIMED


def _exchange(ranks: "DeviceRanks", shape: Shape, hidden: "Tensor", logits: "Tensor") -> None:
    """Make the exchanges of a step: the embedding, two for each layer, the logits."""
    ranks.reduce(hidden.float())
    for _ in range(2 * shape.num_hidden_layers):
        ranks.reduce(hidden)
    ranks.gather(logits)


def _shortest_s(shape: Shape) -> float:
    """Return the time in which an H200 reads the weights, in 16 bits."""
    heads = 2 * shape.num_attention_heads + 2 * shape.num_key_value_heads
    num_layer = shape.hidden_size * (heads * shape.head_dim + 3 * shape.intermediate_size)
    num_numbers = shape.num_hidden_layers * num_layer + shape.vocab_size * shape.hidden_size
    return 2 * num_numbers / _BYTES_PER_S


if __name__ == "__main__":
    folder, device, rank = sys.argv[1:]
    shape = SHAPES["tiny" if device == "cpu" else _SHAPE]
    print(json.dumps(_exchange_times(Path(folder), device, shape, rank=int(rank))))
