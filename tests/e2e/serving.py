"""A real server in its own process, for tests that speak HTTP to it and send it signals."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx

ROOT = Path(__file__).resolve().parents[2]
SERVE = (sys.executable, "-m", "server", "serve")
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'
_URL = re.compile(r"listens on +(?:unix:)?((?:https?:/)?/\S+)")


@dataclass
class RunningServer:
    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine; None while there is no engine process."""
        return self._child_running("engine.core.process")

    @property
    def grammar_pid(self) -> int | None:
        """Process id of the one that tries grammars; None while there is none."""
        return self._child_running("engine.grammars.process")

    @property
    def renderer_pid(self) -> int | None:
        """Process id of the one that renders chats; None while there is none."""
        return self._child_running("engine.text.template_process")

    def _child_running(self, module: str) -> int | None:
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        for child in [pid for each in threads for pid in content_of(each).decode().split()]:
            if module.encode() in content_of(Path(f"/proc/{child}/cmdline")).split(b"\0"):
                return int(child)
        return None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        """Samples by name and labels, as they stand on the page."""
        page = httpx.get(f"{self.url}/metrics").text
        lines = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        return {name.replace(',model_name="tiny"', ""): float(value) for name, value in lines}

    def metric(self, *names: str) -> float:
        """The sum of some metrics over all labels."""
        return sum(value for key, value in self.metrics().items() if key.split("{")[0] in names)

    async def until_in_flight(self, num: int, *tasks: "asyncio.Task[object]") -> None:
        """Wait until `num` sequences run or wait. Raises AssertionError if a task ends before."""
        states = [f"tokenyard:num_requests_{state}" for state in ("running", "waiting")]
        while self.metric(*states) < num:
            assert not any(task.done() for task in tasks), "they end too soon"
            await asyncio.sleep(0.02)

    def wait_until_idle(self) -> None:
        """Wait until no request runs or waits and no block is in use. Raises AssertionError."""
        gauges = (
            "num_requests_running",
            "num_requests_waiting",
            "num_requests_swapped",
            "kv_cache_usage_perc",
            "swap_space_usage_perc",
        )
        wait_for(lambda: not self.metric(*(f"tokenyard:{name}" for name in gauges)))

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        return self.process.wait(timeout_s)


def content_of(file: Path) -> bytes:
    """Content of a file of a thread or process; empty if that has ended."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def wait_for(condition: object, within_s: float = 60.0) -> None:
    """Ask again until it is true: for long, since the machine may be busy. Raises AssertionError."""
    deadline = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"still not true after {within_s} s"
        time.sleep(0.02)


@contextlib.contextmanager
def running_server(
    folder: Path,
    *arguments: str,
    ready_within_s: float = 90.0,
    wrapper: Sequence[str] = (),
    command: Sequence[str] = SERVE,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[RunningServer]:
    """`tokenyard serve` on a free port; ready when this yields, and gone without a trace afterwards.

    `wrapper` is a command that becomes the server, a tracer say; `variables` are added to the environment.
    """
    log = folder / "server.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*wrapper, *command, "--port", "0", *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables, "TMPDIR": str(folder)},
        )
    server = RunningServer(process, log)
    try:
        wait_for(lambda: process.poll() is not None or _URL.search(server.text()), ready_within_s)
        found = _URL.search(server.text())
        assert found, f"it did not start:\n{server.text()}"
        server.url = found[1]
        yield server
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
            process.terminate()
            process.wait(60)
        process.kill()
        process.wait()
        assert not list(folder.glob("tokenyard-*")), "the engine's directory was left behind"
