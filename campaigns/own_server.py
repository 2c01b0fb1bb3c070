"""Our own server as a measurement sees it from outside: its two processes, what they hold, its counters.

Owns: the start with given options, and what /proc and /metrics tell.
Never: requests that compute.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from campaigns.peers.catalogue import ROOT, Launch
from campaigns.peers.running import PeerFailed, free_port, running
from server.http.http_client import Target, Timeouts, exchange

SERVED_NAME = "tiny"
_READY_WITHIN_S = 120.0
_METRICS_WITHIN_S = 30.0
_ENGINE_PROCESS = b"engine.core.process"
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")

Metrics = dict[str, float]
"""By name and labels, as they stand on the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one process holds."""

    memory_bytes: int
    """Resident and its own: what it shares with files is not counted."""
    num_files: int
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnServer:
    """A server that is ready."""

    pid: int
    """Of the API process."""
    target: Target
    log: Path

    @property
    def engine_pid(self) -> int | None:
        """None while there is no engine process."""
        for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            with contextlib.suppress(OSError):  # gone meanwhile
                if _ENGINE_PROCESS in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        return None

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


def held_by(pid: int) -> Held:
    """Raises OSError for a process that is gone."""
    process = Path(f"/proc/{pid}")
    _, resident, shared = (int(field) for field in (process / "statm").read_text().split()[:3])
    return Held(
        memory_bytes=(resident - shared) * _PAGE_BYTES,
        num_files=sum(1 for _ in (process / "fd").iterdir()),
        num_threads=sum(1 for _ in (process / "task").iterdir()),
    )


@contextlib.contextmanager
def own_server(words: Sequence[str]) -> Iterator[OwnServer]:
    """`tokenyard serve` with these words, ended when this is left. Raises PeerFailed."""
    port = free_port()
    command = (
        *(sys.executable, "-m", "server", "serve", "--port", str(port)),
        *("--served-model-name", SERVED_NAME, *words),
    )
    launch = Launch(command=command, variables={}, folder=ROOT, served_name=SERVED_NAME)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        try:
            with running(
                launch, port=port, ready_path="/v1/models", log=log, ready_within_s=_READY_WITHIN_S
            ) as server:
                target = Target.parse(f"http://127.0.0.1:{port}")
                yield OwnServer(pid=server.pid, target=target, log=log)
        except PeerFailed as failure:
            raise SystemExit(f"the server {failure}") from None
