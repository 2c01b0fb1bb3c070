"""A Ray cluster of this machine, one `ray start --block` for each node, with nothing of it left behind.

Ray ties the processes of a node to its command, so that none outlives it by much.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from campaigns.servers.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
_ENDS_WITHIN_S = 60
_HEAD = "127.0.0.1"


class RayCluster:
    """The nodes; the first is the head, at 127.0.0.1, the others follow at 127.0.0.2 and so on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = f"{_HEAD}:{free_port()}"
        self.nodes: list[subprocess.Popen[bytes]] = []

    def add(self, *, num_processors: int) -> "subprocess.Popen[bytes]":
        """Start a node, of which Ray shall believe that it has a GPU; it comes by itself."""
        number = len(self.nodes) + 1
        words = [f"--node-ip-address=127.0.0.{number}", f"--num-cpus={num_processors}", "--num-gpus=1"]
        if self.nodes:
            words.append(f"--address={self.address}")
        else:
            words += ["--head", f"--port={self.address.split(':')[1]}", "--include-dashboard=false"]
        words += ["--disable-usage-stats", f"--temp-dir={self._folder}", "--object-store-memory=80000000"]
        self.nodes.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "from ray.scripts.scripts import main; main()",
                    "start",
                    *words,
                    "--block",
                ],
                env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        return self.nodes[-1]

    def lose_last(self) -> None:
        """Kill all processes of the last node at once, as a machine that loses its power does."""
        for pid in processes_of(self.nodes[-1].pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        for node in reversed(self.nodes):
            node.terminate()
        for node in self.nodes:
            node.wait(_ENDS_WITHIN_S)


def processes_of(pid: int) -> list[int]:
    """List a process and all below it."""
    found, below = [], [pid]
    while below:
        found.append(below.pop())
        with suppress(OSError):
            for thread in Path(f"/proc/{found[-1]}/task").iterdir():
                below += map(int, (thread / "children").read_text().split())
    return found


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Open a cluster without a node."""
    # Ray puts sockets below, whose paths may not be long.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    cluster = RayCluster(folder)
    try:
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)
