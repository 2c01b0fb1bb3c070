"""Serving over HTTP: a server of its own on the device, and the load client against it.

Owns: the server's command, and the rounds of load.
Never: times a request itself: bench/load/command.py does.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.load.command import main as load
from campaigns.checkpoints.make_shapes import write_full_tokenizer
from campaigns.gpu.results import Record
from campaigns.gpu.shapes import SHAPES, checkpoint
from campaigns.servers.free_ports import free_port
from campaigns.servers.running import Launch, running

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings

_ROOT = Path(__file__).resolve().parents[2]
_READY_WITHIN_S = 180.0


def run(record: Record, settings: "Settings") -> None:
    """Raises PeerFailed if the server does not start."""
    model = () if settings.is_smoke else (str(_model(settings)),)
    _serve_and_load(record, settings, model)


def _model(settings: "Settings") -> Path:
    """Add a tokenizer, which the other parts do without."""
    folder = checkpoint(settings.shape, settings.checkpoints)
    if not (folder / "tokenizer.json").exists():
        write_full_tokenizer(folder, SHAPES[settings.shape].vocab_size)
    return folder


def _serve_and_load(record: Record, settings: "Settings", model: tuple[str, ...]) -> None:
    port = free_port()
    device = ("--device", "cpu", "--num-threads", "1") if settings.is_smoke else ("--device", "cuda")
    launch = Launch(
        command=(
            *(sys.executable, "-m", "server", "serve", *model, "--port", str(port), *device),
            *("--max-model-len", "256" if settings.is_smoke else "2048"),
        ),
        variables={},
        folder=_ROOT,
        served_name="",
    )
    table = record.table(
        "A server under load",
        *(
            "Concurrency",
            "Requests",
            "Failed",
            "Output tokens per second",
            "TTFT p50",
            "TTFT p95",
            "TTFT p99",
            "TPOT p50",
            "TPOT p95",
            "TPOT p99",
        ),
    )
    log = settings.out / "server.log"
    with running(
        launch, port=port, ready_path="/health/ready", log=log, ready_within_s=_READY_WITHIN_S
    ) as server:
        record.note(f"Ready after {server.ready_s:.1f} s.")
        for concurrency in (2,) if settings.is_smoke else (1, 16, 64, 256):
            table.add(concurrency, *_round(settings, port, concurrency))


def _round(settings: "Settings", port: int, concurrency: int) -> list[object]:
    num_requests = 4 if settings.is_smoke else max(8, 2 * concurrency)
    lengths = (16, 8) if settings.is_smoke else (512, 128)
    report = settings.out / f"load-{concurrency}.json"
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
    cells = [f"{latencies[name][share]:.2f} ms" for name, share in _LATENCIES]
    return [num_requests, summary["num_failed"], f"{rate:.0f}", *cells]


_LATENCIES = [(name, share) for name in ("ttft_ms", "tpot_ms") for share in ("p50", "p95", "p99")]
