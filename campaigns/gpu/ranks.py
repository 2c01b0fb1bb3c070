"""Ranks on GPUs: exchanges in a graph, and the tokens and the speed of two.

Owns: the exchanges of a decode by NCCL of one rank, captured as a step captures them; servers of one rank, of
two that share a GPU, and of two with a GPU each where there are two, and the same requests to each.
Never: exchanges by other code than a worker's.
"""

import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import Request, urlopen

from campaigns.checkpoints.make_shapes import write_full_tokenizer
from campaigns.gpu.results import Record, Table
from campaigns.gpu.shapes import SHAPES, Shape, write_checkpoint
from campaigns.servers.free_ports import free_port
from campaigns.servers.running import Launch, running

if TYPE_CHECKING:
    from torch import Tensor

    from campaigns.gpu.cli import Settings
    from worker.ranks.device_ranks import DeviceRanks

_ROOT = Path(__file__).resolve().parents[2]
_READY_WITHIN_S = 120.0
_WAIT_S = 60.0
_ONE = "one"
_BYTES_PER_S = 4.3e12
"""Bandwidth of an H200, for the shortest decode that there can be."""


class RanksDiffer(Exception):
    """Ranks draw other tokens than one process; the table says which."""


def run(record: Record, settings: "Settings") -> None:
    """Raises RanksDiffer."""
    if not settings.is_smoke:
        _measure_exchanges(record)
    if not _compare_servers(record, settings):
        raise RanksDiffer("two ranks draw other tokens than one process")


def _measure_exchanges(record: Record) -> None:
    """Capture and time the exchanges of decodes of Qwen3-0.6B's shape, by NCCL of one rank.

    It shows that they can be captured. What they cost is for two GPUs to tell.
    """
    import torch

    from worker.devices.device import open_device
    from worker.ranks.device_ranks import DeviceRanks
    from worker.worker_config import WorkerConfig

    shape = SHAPES["qwen3-0.6b"]
    num_layer = shape.hidden_size * (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads) * 128
    num_layer += 3 * shape.hidden_size * shape.intermediate_size
    num_numbers = shape.num_hidden_layers * num_layer + shape.vocab_size * shape.hidden_size
    shortest_s = 2 * num_numbers / _BYTES_PER_S
    table = record.table("NCCL of one rank in a graph", "Sequences", "Exchanges", "Of the shortest step")
    shares = []
    with tempfile.TemporaryDirectory() as folder:
        config = WorkerConfig(model_path="", device="cuda:0")
        device, ranks = open_device(config), DeviceRanks(Path(folder), config, rank=0)
        ranks.join(None)
        for num_rows in (1, 8, 64):
            hidden = torch.zeros(num_rows, shape.hidden_size, dtype=torch.bfloat16, device="cuda:0")
            logits = hidden.new_zeros(num_rows, shape.vocab_size)
            seconds = device.seconds_of(partial(_exchange, ranks, shape, hidden, logits))
            assert seconds is not None, "a GPU measures time"
            shares.append(seconds / shortest_s)
            table.add(num_rows, f"{seconds * 1e6:.1f} us", f"{shares[-1]:.1%}")
    record.figure("share_of_exchanges", shares)


def _exchange(ranks: "DeviceRanks", shape: Shape, hidden: "Tensor", logits: "Tensor") -> None:
    """Make the exchanges of a step: the embedding, two for each layer, the logits."""
    ranks.reduce(hidden.float())
    for _ in range(2 * shape.num_hidden_layers):
        ranks.reduce(hidden)
    ranks.gather(logits)


def _compare_servers(record: Record, settings: "Settings") -> bool:
    """Whether the same requests to all servers have the same answers."""
    table = record.table("Two ranks, float32, greedy", "Ranks", "Ready", "Alike", "Output tokens per second")
    with tempfile.TemporaryDirectory() as folder:
        model: tuple[str, ...] = ()
        if not settings.is_smoke:
            write_full_tokenizer(write_checkpoint("small", Path(folder)), SHAPES["small"].vocab_size)
            model = (folder,)
        expected: list[str] = []
        is_alike = True
        for name, options in _servers(settings).items():
            answers = _ask(name, (*model, *options), settings, table, expected)
            expected = expected or answers
            is_alike &= answers == expected
    record.figure("is_alike", is_alike)
    return is_alike


def _servers(settings: "Settings") -> dict[str, tuple[str, ...]]:
    """Options of each server, by name; the first has one rank."""
    two = ("--tensor-parallel-size", "2")
    if settings.is_smoke:
        cpu = ("--device", "cpu", "--num-threads", "1")
        return {_ONE: cpu, "two by shared memory": (*cpu, *two)}
    import torch

    found = {_ONE: ("--device", "cuda"), "two on one GPU, by gloo": ("--device", "cuda:0", *two)}
    if torch.cuda.device_count() > 1:
        found["two GPUs, by NCCL"] = ("--device", "cuda", *two)
        found["two GPUs, by NCCL, without graphs"] = ("--device", "cuda", *two, "--enforce-eager")
    return found


def _ask(
    name: str, options: tuple[str, ...], settings: "Settings", table: Table, expected: list[str]
) -> list[str]:
    port = free_port()
    launch = Launch(
        command=(
            *(sys.executable, "-m", "server", "serve", *options, "--port", str(port)),
            *("--dtype", "float32", "--max-model-len", "256"),
        ),
        variables={},
        folder=_ROOT,
        served_name="",
    )
    log = settings.out / f"ranks-{name.replace(', ', '-').replace(' ', '-')}.log"
    with running(
        launch, port=port, ready_path="/health/ready", log=log, ready_within_s=_READY_WITHIN_S
    ) as server:
        num_tokens = 4 if settings.is_smoke else 64
        started_s = time.perf_counter()
        answers = [_answer(port, number, num_tokens) for number in range(2 if settings.is_smoke else 12)]
        rate = num_tokens * len(answers) / (time.perf_counter() - started_s)
        num_alike = sum(map(str.__eq__, answers, expected or answers))
        table.add(name, f"{server.ready_s:.1f} s", f"{num_alike} of {len(answers)}", f"{rate:.0f}")
        return answers


def _answer(port: int, number: int, num_tokens: int) -> str:
    prompt = [3 + (number * 31 + place * place) % 60 for place in range(5 + 9 * number)]
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    request = Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urlopen(request, timeout=_WAIT_S) as reply:
        text: str = json.load(reply)["choices"][0]["text"]
        return text
