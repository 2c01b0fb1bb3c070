"""Ranks on GPUs: the tokens and the speed of shards and of stages.

Owns: servers of one rank, of two shards and of two stages that share a GPU, and of as many with a GPU each
where there are two or four, and the same requests to each.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import Request, urlopen

from campaigns.checkpoints.make_shapes import write_full_tokenizer
from campaigns.gpu.results import Record, Table
from campaigns.gpu.shapes import SHAPES, write_checkpoint
from campaigns.servers.free_ports import free_port
from campaigns.servers.running import Launch, running

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings

_ROOT = Path(__file__).resolve().parents[2]
_READY_WITHIN_S = 120.0
_WAIT_S = 60.0
_ONE = "one"


class RanksDiffer(Exception):
    """Ranks draw other tokens than one process; the table says which."""


def run(record: Record, settings: "Settings") -> None:
    """Raises RanksDiffer."""
    if not _compare_servers(record, settings):
        raise RanksDiffer("ranks draw other tokens than one process")


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _compare_servers(record: Record, settings: "Settings") -> bool:
    """Whether the same requests to all servers have the same answers."""
    table = record.table(
        "Several ranks, float32, greedy", "Ranks", "Ready", "Alike", "Output tokens per second"
    )
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
    shards, stages = ("--tensor-parallel-size", "2"), ("--pipeline-parallel-size", "2")
    if settings.is_smoke:
        cpu = ("--device", "cpu", "--num-threads", "1")
        return {
            _ONE: cpu,
            "two shards by shared memory": (*cpu, *shards),
            "two stages by shared memory": (*cpu, *stages),
        }
    shared, own = ("--device", "cuda:0"), ("--device", "cuda")
    found = {
        _ONE: own,
        "two shards on one GPU": (*shared, *shards),
        "two stages on one GPU": (*shared, *stages),
    }
    if _num_gpus() > 1:
        found["two GPUs, shards"] = (*own, *shards)
        found["two GPUs, shards, without graphs"] = (*own, *shards, "--enforce-eager")
        found["two GPUs, stages"] = (*own, *stages)
    if _num_gpus() > 3:
        found["four GPUs, two stages of two shards"] = (*own, *shards, *stages)
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
