"""Serving over HTTP: vLLM's server and ours on the device, one after the other, and a load client for both.

Owns: the servers' commands, and the rounds of load.
Never: times a request itself: bench/load/command.py does.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.load.command import main as load
from campaigns.checkpoints.make_shapes import write_full_tokenizer
from campaigns.gpu.results import Record, Table
from campaigns.gpu.shapes import SHAPES, checkpoint
from campaigns.servers.free_ports import free_port
from campaigns.servers.running import Launch, PeerFailed, running

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings

_ROOT = Path(__file__).resolve().parents[2]
_READY = {"vLLM": "/v1/models", "ours": "/health/ready"}
_READY_WITHIN_S = 180.0


def run(record: Record, settings: "Settings") -> None:
    """Serve and load vLLM from the folder KIT, then ours on the same device and checkpoint.

    Raises PeerFailed if ours does not start; without vLLM there are ours alone, and the reason.
    """
    model = "" if settings.is_smoke else str(_model(settings))
    table = record.table(
        "Ours with vLLM's, by turns", "Server", "Concurrency", "Requests", "Failed", *_FIGURES
    )
    try:
        _serve(record, settings, table, "vLLM", _theirs(settings, model))
    except PeerFailed as error:
        record.note(f"vLLM: {error}")
    _serve(record, settings, table, "ours", _ours(settings, model))
    rates = {(row[0], row[1]): float(row[4]) for row in table.rows}
    ratios = record.table("Output tokens per second, ours for vLLM's", "Concurrency", "Ratio")
    for (server, concurrency), rate in rates.items():
        if server == "vLLM" and rate:
            ratios.add(concurrency, f"{rates['ours', concurrency] / rate:.2f}")


def _model(settings: "Settings") -> Path:
    """Add a tokenizer, which the other parts do without."""
    folder = checkpoint(settings.shape, settings.checkpoints)
    if not (folder / "tokenizer.json").exists():
        write_full_tokenizer(folder, SHAPES[settings.shape].vocab_size)
    return folder


def _ours(settings: "Settings", model: str) -> Callable[[int], Launch]:
    device = ("--device", "cpu", "--num-threads", "1") if settings.is_smoke else ("--device", "cuda")
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.options.items()]
    return lambda port: Launch(
        command=(
            *(sys.executable, "-m", "server", "serve", *filter(None, (model,)), "--port", str(port), *device),
            *("--max-model-len", "256" if settings.is_smoke else "2048"),
            *("--no-enable-prefix-caching", *words),  # rounds have the same prompts
        ),
        variables={},
        folder=_ROOT,
        served_name="",
    )


def _theirs(settings: "Settings", model: str) -> Callable[[int], Launch]:
    """Start vLLM, or in its place the program that KIT names where there is no GPU."""
    kit = os.environ.get("KIT", "")
    if settings.is_smoke:
        return lambda port: Launch(
            command=(sys.executable, kit, str(port)), variables={}, folder=settings.out, served_name=""
        )
    named = {"quantization": "--quantization", "kv_cache_dtype": "--kv-cache-dtype"}
    options = [f"{named[name]}={value}" for name, value in settings.options.items() if name in named]
    places = [place for place in (kit, os.environ.get("PYTHONPATH")) if place]
    return lambda port: Launch(
        command=(
            *("env", f"PYTHONPATH={os.pathsep.join(places)}", sys.executable),
            *("-m", "vllm.entrypoints.openai.api_server", "--model", model, "--max-model-len", "2048"),
            *("--host", "127.0.0.1", "--port", str(port), "--no-enable-prefix-caching", *options),
        ),
        variables={
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        folder=settings.out,
        served_name="",
    )


def _serve(
    record: Record, settings: "Settings", table: Table, name: str, launch: Callable[[int], Launch]
) -> None:
    """Start a server, and add what each number of clients finds. Raises PeerFailed."""
    port, log = free_port(), settings.out / f"server-{record.name}-{name}.log"
    with running(
        launch(port), port=port, ready_path=_READY[name], log=log, ready_within_s=_READY_WITHIN_S
    ) as server:
        record.note(f"{name}: ready after {server.ready_s:.1f} s.")
        for concurrency in (2,) if settings.is_smoke else (1, 16, 64, 256):
            table.add(name, concurrency, *_round(settings, name, port, concurrency))


def _round(settings: "Settings", name: str, port: int, concurrency: int) -> list[object]:
    num_requests = 4 if settings.is_smoke else max(8, 2 * concurrency)
    lengths = (16, 8) if settings.is_smoke else (512, 128)
    report = settings.out / f"load-{name}-{concurrency}.json"
    load(
        [
            *("serve", "--base-url", f"http://127.0.0.1:{port}", "--json", str(report), "--ignore-eos"),
            *("--concurrency", str(concurrency), "--num-prompts", str(num_requests)),
            *("--input-len", str(lengths[0]), "--output-len", str(lengths[1])),
        ]
    )
    summary = json.loads(report.read_text(encoding="utf-8"))["summary"]
    latencies = summary["latencies"]
    rate = summary["output_tokens_per_s"]
    cells = [f"{latencies[kind][share]:.2f} ms" for kind, share in _LATENCIES]
    return [num_requests, summary["num_failed"], f"{rate:.0f}", *cells]


_FIGURES = (
    "Output tokens per second",
    *(f"{name} {share}" for name in ("TTFT", "TPOT") for share in ("p50", "p95", "p99")),
)
_LATENCIES = [(name, share) for name in ("ttft_ms", "tpot_ms") for share in ("p50", "p95", "p99")]
