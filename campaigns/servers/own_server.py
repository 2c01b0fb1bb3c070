"""Our own server as a measurement sees it from outside: its two processes, what they hold, its counters.

Owns: the start with given options, and what /proc and /metrics tell.
Never: requests that compute.
"""

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from campaigns.servers.free_ports import free_port
from campaigns.servers.processes import engine_of
from campaigns.servers.running import ROOT, Launch, PeerFailed, Running, running
from server.edge.http.http_client import Target, Timeouts, exchange

SERVED_NAME = "tiny"
_READY_WITHIN_S = 120.0
_METRICS_WITHIN_S = 30.0
_SHOWN_CHARS = 20_000

Metrics = dict[str, float]
"""Metrics by name and labels, as they stand on the page."""


@dataclass(slots=True, kw_only=True)
class OwnServer:
    """A server that is ready, and is started again with the same words on the same port if that is asked."""

    pid: int
    """Process id of the API process."""
    target: Target
    log: Path
    launch: Launch | None = None
    _life: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine process; None while there is none."""
        return engine_of(self.pid)

    def start(self) -> None:
        """End it if it runs, start it, and wait until it is ready. Raises PeerFailed."""
        assert self.launch is not None
        self._life.close()
        self.pid = self._life.enter_context(self._running(self.launch)).pid

    def end(self) -> None:
        """End it if it runs."""
        self._life.close()

    def _running(self, launch: Launch) -> contextlib.AbstractContextManager[Running]:
        return running(
            launch,
            port=self.target.port,
            ready_path="/v1/models",
            log=self.log,
            ready_within_s=_READY_WITHIN_S,
        )

    async def metrics(self) -> Metrics:
        """Raises ExchangeFailed."""
        reply = await exchange(
            self.target, self.target.request("GET", "/metrics"), timeouts=Timeouts(whole_s=_METRICS_WITHIN_S)
        )
        lines = (line for line in reply.body.decode().splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def total(metrics: Metrics, name: str) -> float:
    """Over all labels."""
    return sum(value for key, value in metrics.items() if key.partition("{")[0] == name)


@contextlib.contextmanager
def own_server(words: Sequence[str], *, variables: Mapping[str, str] = {}) -> Iterator[OwnServer]:
    """`tokenyard serve` with these words, ended when this is left. Raises SystemExit if it does not start.

    The end of its log is shown when it keeps the measurement waiting too long.
    """
    port = free_port()
    command = (
        *(sys.executable, "-m", "server", "serve", "--port", str(port)),
        *("--served-model-name", SERVED_NAME, *words),
    )
    launch = Launch(command=command, variables=variables, folder=ROOT, served_name=SERVED_NAME)
    with tempfile.TemporaryDirectory() as folder:
        target, log = Target.parse(f"http://127.0.0.1:{port}"), Path(folder) / "server.log"
        server = OwnServer(pid=0, target=target, log=log, launch=launch)
        try:
            server.start()
            yield server
        except PeerFailed as failure:
            raise SystemExit(f"the server {failure}") from None
        except TimeoutError:
            print(log.read_text(errors="replace")[-_SHOWN_CHARS:], file=sys.stderr)
            raise
        finally:
            server.end()
