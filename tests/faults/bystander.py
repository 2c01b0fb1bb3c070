"""A client beside a crowd, in a process that does nothing else: streams one after another, or probes.

    python -m tests.faults.bystander stream|probes URL HEALTH_URL CERT API_PID ENGINE_PID

Each wait, for a line of the stream or for the answer to a probe, is a line of the standard output, in
seconds; what should not have happened is a line of the standard error. Goes on until its standard input ends.

What the main threads of the three processes waited for a core meanwhile is left out: a server that stands
still for a crowd runs while it does, and a busy machine is no fault of it. There is no second thread here,
since the kernel does not count what a thread waits for the interpreter.

Owns: its clock. Never: bounds (test_silent_crowds.py).
"""

import contextlib
import gc
import http.client
import json
import select
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import httpx

_PATIENCE_S = 60.0
_PAUSE_S = 0.05
"""Time between two streams, or rounds of probes."""


class Bystander:
    """A client of one server, whose certificate is its own authority; without TLS `cert` is empty."""

    def __init__(self, url: str, health_url: str, cert: str, pids: Sequence[str]) -> None:
        self._url = urlsplit(url)
        self._places = (url, health_url)
        self._trust = ssl.create_default_context(cafile=cert or None)
        files = [Path(f"/proc/{name}/schedstat") for name in ("self", *pids)]
        self._files = [file for file in files if file.exists()]
        """Counters of main threads; none where the kernel does not count."""

    def stream(self) -> None:
        """Read one stream to its end, unless it is refused."""
        body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with contextlib.closing(self._connection()) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body))
            reply = connection.getresponse()
            if reply.status in (429, 503):
                return
            assert reply.status == 200, reply.status
            line = reply.readline()
            while line and line != b"data: [DONE]\n":
                with self._timed():
                    while (line := reply.readline()) == b"\n":
                        pass
            assert line, "a stream has lost its end"

    def probes(self) -> None:
        """Ask for each of the server's states, on both of its ports."""
        with httpx.Client(verify=self._trust, timeout=_PATIENCE_S) as client:
            for url in self._places:
                for path in ("/health/live", "/health/ready"):
                    with self._timed():
                        status = client.get(f"{url}{path}").status_code
                    assert status == 200, f"{url}{path} {status}"

    def _connection(self) -> http.client.HTTPConnection:
        address = self._url.hostname or "", self._url.port
        if self._url.scheme == "http":
            return http.client.HTTPConnection(*address, timeout=_PATIENCE_S)
        return http.client.HTTPSConnection(*address, timeout=_PATIENCE_S, context=self._trust)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began_s, waited_s = time.monotonic(), self._waited_s()
        yield
        lasted_s = time.monotonic() - began_s
        print(lasted_s - (self._waited_s() - waited_s), flush=True)

    def _waited_s(self) -> float:
        """Sum of what the processes waited for a core since they began."""
        return sum(int(file.read_text().split()[1]) for file in self._files) / 1e9


def main(act: str, url: str, health_url: str, cert: str, *pids: str) -> None:
    bystander = Bystander(url, health_url, cert, pids)
    do = {"stream": bystander.stream, "probes": bystander.probes}[act]
    gc.disable()  # a search for garbage would be a pause of its own
    while not select.select([sys.stdin], [], [], _PAUSE_S)[0]:
        try:
            do()
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is a fault
            print(f"{act}: {error!r}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
