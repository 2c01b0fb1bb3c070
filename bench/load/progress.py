"""Progress of a run: a bar on a terminal, a line now and then elsewhere.

Owns: what is shown on standard error while a run lasts.
Never: the numbers of the report (report.py), nor a timer: it speaks when a request ends.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from bench.load.request_record import RequestRecord

_SECONDS_BETWEEN_LINES = 5.0


class ShowRecord(Protocol):
    def __call__(self, record: RequestRecord) -> None: ...


@contextmanager
def progress(num_requests: int) -> Iterator[ShowRecord]:
    """Show each record that is handed to what this yields."""
    showing = _bar(num_requests) if sys.stderr.isatty() else _lines(num_requests)
    with showing as show:
        yield show


class _Totals:
    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self.num_done = self.num_failed = self._num_tokens = 0

    def add(self, record: RequestRecord) -> None:
        self.num_done += 1
        self.num_failed += not record.is_completed
        self._num_tokens += record.num_output_tokens

    def __str__(self) -> str:
        rate = self._num_tokens / max(time.perf_counter() - self._start_s, 1e-9)
        return f"{self.num_failed} failed, {rate:.0f} output tokens/s"


@contextmanager
def _bar(num_requests: int) -> Iterator[ShowRecord]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    totals = _Totals()
    # Twice a second: what is measured may share this machine's cores.
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task(str(totals), total=num_requests)

        def show(record: RequestRecord) -> None:
            totals.add(record)
            bar.update(task, advance=1, description=str(totals))

        yield show


@contextmanager
def _lines(num_requests: int) -> Iterator[ShowRecord]:
    totals = _Totals()
    last_s = time.perf_counter()

    def show(record: RequestRecord) -> None:
        nonlocal last_s
        totals.add(record)
        now_s = time.perf_counter()
        if now_s - last_s >= _SECONDS_BETWEEN_LINES:
            last_s = now_s
            print(f"{totals.num_done} of {num_requests} requests, {totals}", file=sys.stderr)

    yield show
