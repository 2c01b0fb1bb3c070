"""One server process: started, waited for, ended, with nothing left behind.

Owns: the process, which leads a group of its own, its log, and the limits of patience.
Never: what the server is asked, or an end to a process that it did not start.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_END_WITHIN_S = 20.0
_POLL_S = 0.05
_PROBE_TIMEOUT_S = 2.0
_MAX_LINE = 300


class PeerFailed(Exception):
    """The server does not run; the text says how far it came, with the last words of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One command, ready to run."""

    command: tuple[str, ...]
    variables: Mapping[str, str]
    """Defaults: one that is set already where the measurement is started stays as it is."""
    folder: Path
    """To run it in. The packages of this project lie in ours alone, where they can hide nobody else's."""
    served_name: str
    """Name by which requests choose the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that answers."""

    pid: int
    ready_s: float
    """From its start until it said that it is ready."""


@contextlib.contextmanager
def running(
    launch: Launch, *, port: int, ready_path: str, log: Path, ready_within_s: float
) -> Iterator[Running]:
    """Start a server and wait until `ready_path` is answered on `port`; ended when this is left.

    Raises PeerFailed.
    """
    started_s = time.monotonic()
    with log.open("ab") as stream:  # a server that is started again goes on in it
        try:
            process = subprocess.Popen(
                launch.command,
                cwd=launch.folder,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**launch.variables, **os.environ},
                start_new_session=True,
            )
        except OSError as error:
            raise PeerFailed(f"cannot be started: {error}") from None
    try:
        probe = f"GET {ready_path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n".encode()
        while not _answers(port, probe):
            if process.poll() is not None:
                raise PeerFailed(f"ended with status {process.returncode}; its log: {last_line(log)}")
            if time.monotonic() - started_s > ready_within_s:
                raise PeerFailed(f"not ready after {ready_within_s:g} s; its log: {last_line(log)}")
            time.sleep(_POLL_S)
        yield Running(pid=process.pid, ready_s=time.monotonic() - started_s)
    finally:
        _end(process)


def last_line(log: Path) -> str:
    """The last line with anything in it; of an error, where one is told after the last traceback."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line and not line.startswith(("File", "raise"))]
    return (told or lines or ["nothing"])[-1][:_MAX_LINE]


def _answers(port: int, probe: bytes) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_PROBE_TIMEOUT_S) as connection:
            connection.sendall(probe)
            return b" 200 " in connection.recv(64)
    except OSError:
        return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask the leader, which ends its own; then kill what is left of the group."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.terminate()
        process.wait(_END_WITHIN_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
