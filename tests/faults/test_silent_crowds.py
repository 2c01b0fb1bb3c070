"""Thousands of connections that say nothing, at the limit of open files that most systems set.

What a stream and a probe wait is told apart from what the machine keeps the processes waiting for a core
(bystander.py).
"""

import contextlib
import re
import resource
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from campaigns.servers.free_ports import free_port
from tests.e2e.serving import ROOT, RunningServer, running_server, wait_for
from tests.server.certificates import needs_openssl, self_signed

pytestmark = pytest.mark.alone

NUM_SILENT = 4_600
"""More than there are places."""
LIMITED = ("sh", "-c", 'ulimit -Sn 1024; exec "$@"', "sh")
HELD_S = 2.0
"""Time for which the crowd stays once all of it is there."""
MAX_PAUSE_S = 1.0
"""Ten times what is promised of a pause."""
MAX_MEMORY_BYTES = 512 << 20
"""Memory of the API process at its most. asyncio's own buffers of so many encrypted connections are a GiB."""
MAX_LOG_BYTES = 50_000
SPARE_FILES = 4


class Others:
    """Two processes beside a crowd: one reads streams, the other probes (bystander.py)."""

    def __init__(self, server: RunningServer, folder: Path, health_port: int, cert: str) -> None:
        self._url = server.url
        self._client = partial(httpx.Client, verify=ssl.create_default_context(cafile=cert or None))
        pids = (str(server.process.pid), *([str(server.engine_pid)] if server.engine_pid else []))
        self._words = (server.url, f"http://127.0.0.1:{health_port}", cert, *pids)
        self._folder = folder

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        processes = [self._begin(act) for act in ("stream", "probes")]
        try:
            wait_for(lambda: self.times("stream") and self.times("probes"))
            yield
        finally:
            for each in processes:
                each.communicate()

    def times(self, act: str) -> list[float]:
        """List what each wait has taken, in seconds."""
        return [float(line) for line in (self._folder / f"{act}.times").read_text().splitlines()]

    def faults(self) -> str:
        return "".join(file.read_text() for file in self._folder.glob("*.faults"))

    def ask(self) -> int:
        body = {"prompt": "Once", "max_tokens": 4, "ignore_eos": True}
        with self._client(base_url=self._url) as client:
            return client.post("/v1/completions", json=body).status_code

    def num_refused(self) -> float:
        with self._client(base_url=self._url) as client:
            page = client.get("/metrics").text
        found = re.search(r"^tokenyard:refused_connections_total\S* (\S+)", page, re.MULTILINE)
        assert found
        return float(found[1])

    def _begin(self, act: str) -> "subprocess.Popen[bytes]":
        with (
            (self._folder / f"{act}.times").open("w") as times,
            (self._folder / f"{act}.faults").open("w") as faults,
        ):
            return subprocess.Popen(
                [sys.executable, "-m", "tests.faults.bystander", act, *self._words],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=times,
                stderr=faults,
            )


@contextlib.contextmanager
def crowd_of(num: int, port: int, says: str) -> Iterator[None]:
    """All have connected, and said what they say, when this yields; they leave afterwards."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard - 64  # in one process
    sizes = [min(most, num - begun) for begun in range(0, num, most)]
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.faults.silent_crowd", str(port), str(size), says],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for size in sizes
    ]
    try:
        for child in children:
            assert child.stdout
            assert child.stdout.readline() == b"all are here\n"
        yield
    finally:
        for child in children:
            child.communicate()


@pytest.mark.parametrize(
    ("scheme", "says"),
    [
        ("http", "nothing"),
        pytest.param("https", "nothing", marks=needs_openssl),
        pytest.param("https", "hello", marks=needs_openssl),
    ],
)
def test_a_crowd_of_thousands_costs_no_stream_no_probe_and_few_lines_of_the_log(
    tmp_path: Path, scheme: str, says: str
) -> None:
    options, cert = ["--health-port", str(health_port := free_port())], ""
    if scheme == "https":
        pair = self_signed(tmp_path, "server")
        cert = str(pair.cert)
        options += ["--tls-cert", cert, "--tls-key", str(pair.key)]
    with running_server(tmp_path, "--num-threads", "1", *options, wrapper=LIMITED) as server:
        process, port = Path(f"/proc/{server.process.pid}"), urlsplit(server.url).port
        assert port
        others = Others(server, tmp_path, health_port, cert)
        assert others.ask() == 200
        num_files = len(list((process / "fd").iterdir()))
        with others.busy(), crowd_of(NUM_SILENT, port, says):
            num_events = len(others.times("stream"))
            assert others.ask() in (200, 429, 503)
            time.sleep(HELD_S)
            wait_for(lambda: len(others.times("stream")) > num_events + 10)
        assert not others.faults()
        assert others.ask() == 200
        assert others.num_refused() > 0, "the crowd was too small to take all places"
        wait_for(lambda: len(list((process / "fd").iterdir())) <= num_files + SPARE_FILES)
        most = re.search(r"VmHWM:\s+(\d+) kB", (process / "status").read_text())
        assert most
        assert int(most[1]) << 10 < MAX_MEMORY_BYTES
    for act in ("stream", "probes"):
        assert max(others.times(act)) < MAX_PAUSE_S, act
    assert server.log.stat().st_size < MAX_LOG_BYTES
