"""`tokenyard run-batch`: a file of requests in, a file of answers out.

Owns: the command line, whether the model runs here or a server is asked, progress and summary, the exit code.
Never: opens a port: where the model runs here, its application is called in this process.

Codes: 0 every request has an answer, 1 some have an error, 2 a mistake on the command line or in a file,
69 the server was lost, 130 interrupted (both: run it again to go on), others as of `serve`.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from engine.options.edge_config import EdgeOptions
from engine.options.engine_config import EngineConfig, ServerConfig, resolve
from engine.options.options import OptionError
from engine.options.sources import Source, merge, read_sources, source_of
from engine.options.values import Count, Duration
from server.api.batches.lines import BatchFileError, InputFile, OutputFile, check_input, open_output
from server.api.batches.run import BatchRun, Client, Counts, ServerLost
from server.command.command_line import OptionParser, valued
from server.edge.http.http_client import ExchangeFailed, Reply, Target, fetch, key_from_environment
from server.endpoints import BATCH_PATHS

EXIT_SOME_FAILED = 1
EXIT_USAGE = 2
EXIT_SERVER_LOST = 69
EXIT_INTERRUPTED = 130
_PROGRAM = "tokenyard run-batch"
_GO_ON = "run the same command again to go on from here"
_REMOTE_CONCURRENCY = 64
_CONCURRENCY = Count(low=1, high=4096)
_PATIENCE = Duration(low=0, high=1e6)
_FIRST_CONTACT_S = 30.0
_ABOUT_THE_PORT = (
    *("host", "port", "api_key", "allow_unauthenticated", "enable_admin", "shutdown_timeout"),
    *("drain_delay", "health_port"),
    *(field.name for field in fields(EdgeOptions)),
)
"""Options of `serve` that mean nothing where no port is opened."""
_SECONDS_BETWEEN_LINES = 5.0


class CannotRun(Exception):
    """No model is there to answer. One line for the operator, and the code to end with."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(what)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    input: Path
    output: Path
    target: Target | None
    """A server elsewhere; None: the model runs here."""
    concurrency: int | None
    retry_s: float
    timeout_s: float
    serve_flags: dict[str, Any]
    """Options of `serve`, as text."""


def main(words: Sequence[str]) -> int:
    """Run the command with the words behind it; returns the exit code. Raises OptionError."""
    asked = _read(words)
    try:
        source = check_input(asked.input)
        with open_output(asked.output) as output:
            return asyncio.run(_run(asked, source, output))
    except BatchFileError as error:
        return _say(str(error), EXIT_USAGE)
    except CannotRun as error:
        return _say(str(error), error.code)
    except ServerLost as error:
        return _say(f"{error}; {_GO_ON}", EXIT_SERVER_LOST)
    except OSError as error:  # a full disk
        return _say(f"{asked.output} cannot be written ({error.strerror}); {_GO_ON}", EXIT_SOME_FAILED)
    except KeyboardInterrupt:
        return _say(f"interrupted; {_GO_ON}", EXIT_INTERRUPTED)


def _say(text: str, code: int) -> int:
    print(f"{_PROGRAM}: {text}", file=sys.stderr)
    return code


async def _run(asked: _Asked, source: InputFile, output: OutputFile) -> int:
    num_skipped = sum(request.custom_id in output.answered_ids for request in source.requests())
    num_open = source.num_requests - num_skipped
    counts = Counts()
    started_s = time.monotonic()
    if num_open:
        async with _client(asked) as (client, concurrency):
            started_s = time.monotonic()
            with progress(num_open) as show:
                run = BatchRun(
                    client=client,
                    write=output.append,
                    concurrency=asked.concurrency or concurrency,
                    retry_s=asked.retry_s,
                    counts=counts,
                    show=show,
                )
                still_open = (
                    request for request in source.requests() if request.custom_id not in output.answered_ids
                )
                await run.send_all(still_open, paths=BATCH_PATHS)
    elapsed_s = time.monotonic() - started_s
    print(summary(counts, num_skipped=num_skipped, elapsed_s=elapsed_s), file=sys.stderr)
    return EXIT_SOME_FAILED if counts.num_failed else 0


class _RemoteClient:
    """A server that runs elsewhere."""

    def __init__(self, target: Target, silence_s: float) -> None:
        self._target = target
        self._silence_s = silence_s

    async def post(self, path: str, body: bytes) -> Reply:
        return await fetch(self._target, "POST", path, body, silence_s=self._silence_s)


@asynccontextmanager
async def _client(asked: _Asked) -> AsyncIterator[tuple[Client, int]]:
    """Open the client, and say how many requests keep its server busy. Raises CannotRun."""
    if asked.target is None:
        async with _local_client(asked) as found:
            yield found
        return
    try:
        # A server that is not there at all is a mistake; one that goes away later is waited for.
        await fetch(asked.target, "GET", "/health", silence_s=_FIRST_CONTACT_S)
    except ExchangeFailed as error:
        advice = "check --base-url, or leave it out to run the model here"
        raise CannotRun(f"{error}; {advice}", EXIT_SERVER_LOST) from None
    yield _RemoteClient(asked.target, asked.timeout_s), _REMOTE_CONCURRENCY


@asynccontextmanager
async def _local_client(asked: _Asked) -> AsyncIterator[tuple[Client, int]]:
    engine_config, server_config = _configs(asked.serve_flags)
    # Not at the top: this is where the seconds of imports begin.
    from server.api.batches.app_client import AppClient
    from server.command.batch.local_engine import local_app

    # Twice what runs at once, so that the next one is there when one ends; more would only wait.
    concurrency = min(2 * engine_config.scheduler.max_num_seqs, engine_config.max_queued_requests)
    async with local_app(engine_config, server_config) as app:
        yield AppClient(app), concurrency


def _read(words: Sequence[str]) -> _Asked:
    """Read the words of the command. Raises OptionError."""
    found = build_parser().read(words)
    own = {name: found.pop(name) for name in ("input", "output", "concurrency", "retry_for", "timeout")}
    base_url = found.pop("base_url")
    target = None
    if base_url is not None:
        given = found.pop("api_key", None)
        target = _target(base_url, given[0] if given else key_from_environment())
        _refuse(found, "the server at --base-url has options of its own")
    else:
        _refuse([name for name in found if name in _ABOUT_THE_PORT], "run-batch opens no port")
        _configs(found)  # mistakes first, before the files are looked at
    return _Asked(
        input=own["input"],
        output=own["output"],
        target=target,
        concurrency=own["concurrency"],
        retry_s=own["retry_for"],
        timeout_s=own["timeout"],
        serve_flags=found,
    )


def _configs(serve_flags: dict[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """Configuration of the model that is loaded here. Raises OptionError."""
    sources = read_sources(serve_flags, os.environ)
    options = merge(sources)
    if source_of("request_timeout", sources) is Source.DEFAULT:
        # No client waits at the other end, and half of all requests wait in the queue by intent.
        options = replace(options, request_timeout=0.0)
    engine, server = resolve(options)
    if engine.cluster is not None and engine.cluster.node:
        raise OptionError(
            f"--node-rank {engine.cluster.node}",
            "the first node reads the file",
            "run `tokenyard serve` with the same options here",
        )
    return engine, server


def _refuse(names: Any, why: str) -> None:
    for name in names:
        flag = "MODEL" if name == "positional_model" else f"--{name.replace('_', '-')}"
        raise OptionError(flag, why, "leave it out")


def _target(base_url: str, api_key: str) -> Target:
    try:
        return Target.parse(base_url, api_key=api_key)
    except ValueError as error:
        raise OptionError("--base-url", str(error), "write http://127.0.0.1:8000, say") from None


def build_parser() -> OptionParser:
    parser = OptionParser(
        prog=_PROGRAM,
        description="Answer a file of requests in OpenAI's batch format, with a model that is loaded for it"
        " or a server that runs already. Run it again to go on after an interruption. Requests to a model"
        " that is loaded for it have no time limit unless --request-timeout is given.",
    )
    own = parser.add_argument_group("Batch")
    own.add_argument("-i", "--input", type=Path, metavar="FILE", required=True, help="requests, one a line")
    own.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        required=True,
        help="answers, one a line; those that are there already are not asked for again",
    )
    own.add_argument("--base-url", metavar="URL", help="ask this server instead of loading a model")
    own.add_argument(
        "--concurrency",
        type=valued(_CONCURRENCY),
        metavar="N",
        help=f"requests under way at once (default: enough to keep the model busy; {_REMOTE_CONCURRENCY}"
        " with --base-url)",
    )
    own.add_argument(
        "--retry-for",
        type=valued(_PATIENCE),
        default=600.0,
        metavar="SECONDS",
        help="how long a request is sent again that met 429, 503 or a lost connection (default: 600)",
    )
    own.add_argument(
        "--timeout",
        type=valued(_PATIENCE),
        default=3600.0,
        metavar="SECONDS",
        help="with --base-url: how long a server may be silent about a request (default: 3600)",
    )
    return parser


def progress(num_requests: int) -> AbstractContextManager[Callable[[Counts], None]]:
    """Open a function that shows the counts it is called with."""
    return _bar(num_requests) if sys.stderr.isatty() else _lines(num_requests)


def summary(counts: Counts, *, num_skipped: int, elapsed_s: float) -> str:
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
