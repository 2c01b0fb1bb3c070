"""Thousands of connections that say nothing, at the limit of open files that most systems set.

What a stream and a probe wait is told apart from what the machine keeps the processes waiting for a core: a
server that stands still for such a crowd runs meanwhile, and a busy machine is no fault of it.
"""

import contextlib
import http.client
import json
import re
import resource
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from campaigns.servers.free_ports import free_port
from tests.e2e.serving import ROOT, RunningServer, running_server, wait_for
from tests.server.certificates import needs_openssl, self_signed

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


class Longest:
    """The longest of many times, but for what the main threads of processes waited for a core meanwhile."""

    def __init__(self, *pids: int) -> None:
        self._files = [Path(f"/proc/{pid}/schedstat") for pid in pids]
        self.seconds = 0.0
        self.num = 0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        began_s, waited_s = time.monotonic(), self._waited_s()
        yield
        lasted_s = time.monotonic() - began_s
        self.seconds = max(self.seconds, lasted_s - (self._waited_s() - waited_s))
        self.num += 1

    def _waited_s(self) -> float:
        """Sum since the processes began, and of the thread that asks; 0 where the kernel does not count."""
        files = (*self._files, Path("/proc/thread-self/schedstat"))
        return sum(int(file.read_text().split()[1]) for file in files if file.exists()) / 1e9


class Others:
    """A stream after another, and probes, beside a crowd. `faults` has what should not have happened."""

    def __init__(self, server: RunningServer, health_url: str, trust: ssl.SSLContext) -> None:
        self._server = server
        self._health_url = health_url
        self._trust = trust
        self._is_over = threading.Event()
        pids = (server.process.pid, server.engine_pid or 0)
        self.pauses, self.probes = Longest(*pids), Longest(*pids)
        self.faults: list[str] = []

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        acts = (self._read_stream, self._probe)
        threads = [threading.Thread(target=self._again_and_again, args=(act,)) for act in acts]
        for each in threads:
            each.start()
        try:
            wait_for(lambda: self.pauses.num)
            yield
        finally:
            self._is_over.set()
            for each in threads:
                each.join()

    def ask(self) -> int:
        body = {"prompt": "Once", "max_tokens": 4, "ignore_eos": True}
        with httpx.Client(verify=self._trust, base_url=self._server.url) as client:
            return client.post("/v1/completions", json=body).status_code

    def num_refused(self) -> float:
        with httpx.Client(verify=self._trust, base_url=self._server.url) as client:
            page = client.get("/metrics").text
        found = re.search(r"^tokenyard:refused_connections_total\S* (\S+)", page, re.MULTILINE)
        assert found
        return float(found[1])

    def _again_and_again(self, act: Callable[[], None]) -> None:
        while not self._is_over.is_set():
            try:
                act()
            except Exception as error:  # noqa: BLE001 -- whatever it is, it is a fault
                self.faults.append(f"{act.__name__}: {error!r}")
            time.sleep(0.05)

    def _read_stream(self) -> None:
        address = urlsplit(self._server.url)
        assert address.hostname
        place = (address.hostname, address.port)
        if address.scheme == "http":
            connection = http.client.HTTPConnection(*place, timeout=60)
        else:
            connection = http.client.HTTPSConnection(*place, timeout=60, context=self._trust)
        body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body))
            reply = connection.getresponse()
            if reply.status in (429, 503):
                return
            assert reply.status == 200
            line = reply.readline()
            while line and line != b"data: [DONE]\n":
                with self.pauses.timed():
                    while (line := reply.readline()) == b"\n":
                        pass
            assert line, "a stream has lost its end"

    def _probe(self) -> None:
        with httpx.Client(verify=self._trust) as client:
            for url in (self._server.url, self._health_url):
                for path in ("/health/live", "/health/ready"):
                    with self.probes.timed():
                        status = client.get(f"{url}{path}").status_code
                    assert status == 200, f"{url}{path}"


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
    options, trust = ["--health-port", str(health_port := free_port())], ssl.create_default_context()
    if scheme == "https":
        pair = self_signed(tmp_path, "server")
        options += ["--tls-cert", str(pair.cert), "--tls-key", str(pair.key)]
        trust.load_verify_locations(pair.cert)
    with running_server(tmp_path, "--num-threads", "1", *options, wrapper=LIMITED) as server:
        process, port = Path(f"/proc/{server.process.pid}"), urlsplit(server.url).port
        assert port
        others = Others(server, f"http://127.0.0.1:{health_port}", trust)
        assert others.ask() == 200
        num_files = len(list((process / "fd").iterdir()))
        with others.busy(), crowd_of(NUM_SILENT, port, says):
            num_events = others.pauses.num
            assert others.ask() in (200, 429, 503)
            time.sleep(HELD_S)
            wait_for(lambda: others.pauses.num > num_events + 10)
        assert not others.faults
        assert others.ask() == 200
        assert others.num_refused() > 0, "the crowd was too small to take all places"
        wait_for(lambda: len(list((process / "fd").iterdir())) <= num_files + SPARE_FILES)
        most = re.search(r"VmHWM:\s+(\d+) kB", (process / "status").read_text())
        assert most
        assert int(most[1]) << 10 < MAX_MEMORY_BYTES
    assert others.pauses.seconds < MAX_PAUSE_S
    assert others.probes.seconds < MAX_PAUSE_S
    assert server.log.stat().st_size < MAX_LOG_BYTES
