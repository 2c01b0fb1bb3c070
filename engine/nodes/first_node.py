"""The start of an engine on several nodes, from the first of them.

Owns: the address where it listens, and the wait until all nodes are there. That has no end: a node may be
replaced meanwhile.
"""

import importlib.metadata
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from engine.nodes.registry import NodeRegistry
from engine.nodes.switchboard import Switchboard
from engine.options.engine_config import EngineConfig
from worker.checkpoint.checkpoint_files import fingerprint
from worker.worker_config import LoadProgress
from worker.worker_errors import StartupError

log = logging.getLogger(__name__)

_RESOLVES_WITHIN_S = 60.0
REPORT_S = 0.5


def gather_nodes(
    config: EngineConfig,
    directory: Path,
    report: Callable[[LoadProgress], None],
    check: Callable[[], None] = lambda: None,
) -> Switchboard:
    """Listen, and wait until all other nodes are there; check while waiting. Raises StartupError."""
    assert config.cluster is not None
    started_s = time.monotonic()
    roll = NodeRegistry(
        config.cluster.num_nodes,
        software=software(),
        checkpoint=checkpoint_of(config),
        num_gpus=config.worker.num_gpus_of_a_node,
    )
    host, port = config.cluster.host, config.cluster.port
    try:
        address = f"tcp://{_resolve(host, started_s + _RESOLVES_WITHIN_S)}:{port}"
        switchboard = Switchboard(config, directory, address, roll)
    except (OSError, zmq.ZMQError) as error:
        raise StartupError(
            f"the first node cannot listen for others on {host}:{port}: {error.strerror or error}",
            fix="give --master-addr an address of this machine (containers: of the container, or with the "
            "host's network), and a --cluster-port that is free",
        ) from error
    reported = ""
    while missing := switchboard.wait_for_nodes(REPORT_S):
        check()
        elapsed_s = time.monotonic() - started_s
        report(LoadProgress(stage=missing, done_bytes=0, total_bytes=0, elapsed_s=elapsed_s))
        if missing != reported:
            log.info("%s on %s", missing, address)
        reported = missing
    return switchboard


def software() -> str:
    """Name the versions that must be the same on all nodes."""
    words = []
    for package in ("tokenyard", "torch", "transformers"):
        try:
            words.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            words.append(f"{package} that is not installed")
    return ", ".join(words)


def checkpoint_of(config: EngineConfig) -> str:
    """Digest this node's checkpoint. Raises StartupError."""
    return fingerprint(Path(config.worker.model_path))


def _resolve(host: str, until_s: float) -> str:
    """Look the IPv4 address up; that of a new pod may be known some seconds late. Raises OSError."""
    while True:
        try:
            found = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
            return str(found[0][4][0])
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(REPORT_S)
