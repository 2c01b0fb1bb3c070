"""Progress of a batch: a bar on a terminal, a line now and then elsewhere.

Owns: the text on standard error while it runs, and the summary after it.
Never: counts (batches/run.py).
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from server.api.batches.run import Counts

_SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def progress(num_requests: int) -> Iterator[Callable[[Counts], None]]:
    """Yield a function that shows the counts it is called with."""
    with _bar(num_requests) if sys.stderr.isatty() else _lines(num_requests) as show:
        yield show


def summary(counts: Counts, *, num_skipped: int, elapsed_s: float) -> str:
    """The line for the end."""
    words = [f"{counts.num_done:,} answered", f"{counts.num_failed:,} of them with an error"]
    if counts.num_cut_off:
        words.append(f"{counts.num_cut_off:,} cut off by a time limit")
    if num_skipped:
        words.append(f"{num_skipped:,} had been answered before")
    if counts.num_retries:
        words.append(f"{counts.num_retries:,} sent again")
    rate = counts.num_output_tokens / max(elapsed_s, 1e-9)
    tokens = f"{counts.num_prompt_tokens:,} prompt and {counts.num_output_tokens:,} output tokens"
    return f"{', '.join(words)}; {tokens} in {elapsed_s:,.1f} s ({rate:,.0f} output tokens/s)"


@contextmanager
def _bar(num_requests: int) -> Iterator[Callable[[Counts], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    started_s = time.monotonic()
    # Twice a second: the model may run on the same cores.
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("", total=num_requests)

        def show(counts: Counts) -> None:
            bar.update(task, completed=counts.num_done, description=_state(counts, started_s))

        yield show


@contextmanager
def _lines(num_requests: int) -> Iterator[Callable[[Counts], None]]:
    started_s = last_s = time.monotonic()

    def show(counts: Counts) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= _SECONDS_BETWEEN_LINES:
            last_s = now_s
            print(
                f"{counts.num_done} of {num_requests} requests, {_state(counts, started_s)}", file=sys.stderr
            )

    yield show


def _state(counts: Counts, started_s: float) -> str:
    rate = counts.num_output_tokens / max(time.monotonic() - started_s, 1e-9)
    return f"{counts.num_failed} with an error, {rate:.0f} output tokens/s"
