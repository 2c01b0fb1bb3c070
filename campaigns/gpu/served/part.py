"""Throughput and latency of requests on the scheduler and the worker, without HTTP.

Owns: the loads: closed ones of some requests in flight, and an open one at a share of what the device can do.
Never: the statistics: they are the load client's (bench/load/report.py).
"""

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.load.report import Summary, summarize
from bench.load.request_record import RequestRecord
from campaigns.checkpoints.make_shapes import write_full_tokenizer
from campaigns.gpu.driving import Drive, open_worker, scheduler_config
from campaigns.gpu.results import Record, Table
from campaigns.gpu.served.loads import Load, Request
from campaigns.gpu.served.readers import Readers
from campaigns.gpu.shapes import SHAPES, checkpoint

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings
    from worker.worker import Worker
    from worker.worker_config import ModelFacts

_COLUMNS = (
    *("Load", "Requests", "Cut off", "Output tokens per second"),
    *("TTFT p50", "TTFT p95", "TTFT p99", "TPOT p50", "TPOT p95", "TPOT p99"),
)
_SMALLEST_TOKENIZER = 2048
# Of the highest rate that a closed load had.
_OPEN_SHARE = 0.7
_OPEN_S = 8.0
_SEED = 7
_NUM_MIXED = 256


def run(record: Record, settings: "Settings") -> None:
    shape = "tiny" if settings.is_smoke else settings.shape
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer"
        _write_tokenizer(tokenizer, SHAPES[shape].vocab_size)
        model = checkpoint(shape, settings.checkpoints)
        with Readers(tokenizer) as readers:
            served = _Served(settings, model, readers, SHAPES[shape].vocab_size)
            record.note(
                f"{shape}, random weights. Each token becomes text in a process of its own, without HTTP."
            )
            served.measure(record)
            served.close()


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Vocabulary of the size that real ones have, with a text for each token."""
    folder.mkdir()
    write_full_tokenizer(folder, max(vocab_size, _SMALLEST_TOKENIZER))


class _Served:
    """One model on one device, and its readers."""

    def __init__(self, settings: "Settings", folder: Path, readers: Readers, vocab_size: int) -> None:
        is_smoke = settings.is_smoke
        self._readers, self._vocab_size = readers, vocab_size
        self._lengths = (10, 4) if is_smoke else (512, 128)
        self._concurrencies = (1, 2) if is_smoke else (1, 16, 64, 256)
        self._open_s = 1.0 if is_smoke else _OPEN_S
        self._within_s = 30.0
        self._limits: dict[str, Any] = {
            "max_num_seqs": self._concurrencies[-1],
            "max_num_batched_tokens": 16 if is_smoke else 2048,
        }
        sizes = {"max_model_len": 16 if is_smoke else 2 * 1024}
        smoke = {"dtype": "float32", "num_blocks": 32, "block_size": 8} if is_smoke else {}
        opened = open_worker(folder, settings.target, **self._limits, **sizes, **smoke)
        self._worker: Worker = opened[0]
        self._facts: ModelFacts = opened[1]
        self._random = random.Random(_SEED)

    def measure(self, record: Record) -> None:
        input_len, output_len = self._lengths
        table = record.table(f"{input_len} tokens in, {output_len} out", *_COLUMNS)
        self._closed(1, 1)  # so that nothing is compiled within a measurement
        rates = []
        for concurrency in self._concurrencies:
            records, summary = self._closed(concurrency, max(6, 2 * concurrency))
            _tell(table, f"{concurrency} in flight", records, summary)
            record.figure(f"closed_{concurrency}", summary.output_tokens_per_s)
            rates.append(summary.output_tokens_per_s / output_len)
        self._mixed(record, table)
        rate = _OPEN_SHARE * max(rates)
        records = self._load().run_open(self._arriving(rate))
        summary = summarize(records, num_planned=len(records))
        _tell(table, f"{rate:.1f} arrive per second", records, summary)
        record.figure("open", summary.output_tokens_per_s)

    def _mixed(self, record: Record, table: Table) -> None:
        """Run nano-vllm's own load: 256 requests at once, with 100 to 1,024 tokens in and out."""
        count, least, most = (
            (2, 2, 6) if self._limits["max_num_seqs"] < _NUM_MIXED else (_NUM_MIXED, 100, 1024)
        )
        requests = [
            Request(
                prompt=[
                    self._random.randrange(self._vocab_size) for _ in range(self._random.randint(least, most))
                ],
                max_tokens=self._random.randint(least, most),
            )
            for _ in range(count)
        ]
        records = self._load().run_closed(requests, concurrency=count)
        summary = summarize(records, num_planned=count)
        _tell(table, f"{count} of {least} to {most} tokens in and out", records, summary)
        record.figure("mixed", summary.output_tokens_per_s)

    def close(self) -> None:
        self._worker.close()

    def _closed(self, concurrency: int, num_requests: int) -> tuple[list[RequestRecord], Summary]:
        requests = [self._request(0.0) for _ in range(num_requests)]
        records = self._load().run_closed(requests, concurrency=concurrency)
        return records, summarize(records, num_planned=num_requests)

    def _load(self) -> Load:
        return Load(
            Drive(self._worker, scheduler_config(self._facts, **self._limits)), self._readers, self._within_s
        )

    def _request(self, arrival_s: float) -> Request:
        input_len, output_len = self._lengths
        prompt = [self._random.randrange(self._vocab_size) for _ in range(input_len)]
        return Request(prompt=prompt, max_tokens=output_len, arrival_s=arrival_s)

    def _arriving(self, rate: float) -> list[Request]:
        """Arrivals of a Poisson process."""
        requests, arrival_s = [], 0.0
        while arrival_s < self._open_s:
            requests.append(self._request(arrival_s))
            arrival_s += self._random.expovariate(rate)
        return requests


def _tell(table: Table, load: str, records: Sequence[RequestRecord], summary: Summary) -> None:
    times = summary.latencies
    cells = [
        "-" if each is None else f"{getattr(each, share):.2f} ms"
        for each in (times.ttft_ms, times.tpot_ms)
        for share in ("p50", "p95", "p99")
    ]
    table.add(load, len(records), summary.num_failed, f"{summary.output_tokens_per_s:.0f}", *cells)
