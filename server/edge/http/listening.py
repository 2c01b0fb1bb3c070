"""The listening socket, taken before anything slow happens.

Owns: the options that its connections inherit, how many there can be, and the words when the
port cannot be had.
"""

import contextlib
import errno
import os
import resource
import socket
import stat
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from server.edge.sockets.places import MAX_CONNECTIONS, RESERVED_PLACES

_BACKLOG = 2048
_NUM_OTHER_FILES = 128
"""Descriptors for all that is not a client: the engine, the model's files, the event loop, probes on their
own port, and connections that were ended in this turn of the loop."""
_SOCKET_MODE = 0o660
_UNREAD_TIMEOUT_MS = 60_000
"""Time in which a peer may leave sent bytes unread, or unacknowledged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """The ports of one server; None: it has no such port."""

    main: socket.socket
    probes: socket.socket | None = None
    """A listener for questions about health alone."""
    admin: socket.socket | None = None


class PortInUse(Exception):
    """Another program listens there. One line for the operator; the command ends with code 98, EADDRINUSE."""


class CannotListen(Exception):
    """The address is not this machine's, or not allowed. One line for the operator."""


def listen(host: str, port: int, *, flag: str = "--port") -> socket.socket:
    """Open a socket that listens already, so that the port stays ours while the model loads.

    Port 0 takes any free one: ask `getsockname`. Raises PortInUse or CannotListen, which name the `flag`.
    """
    _allow_files(MAX_CONNECTIONS + RESERVED_PLACES + _NUM_OTHER_FILES)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise CannotListen(
            f"--host {host}: it is not an address ({error}); "
            "use 127.0.0.1 for this machine alone, 0.0.0.0 for all"
        ) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # A port whose last connections linger may be taken; one that is listened on may not.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _drop_peers_that_do_not_read(listener)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(_in_use(flag, port)) from error
        raise CannotListen(_why_not(host, f"{flag} {port}", error)) from error
    listener.setblocking(False)  # noqa: FBT003 (the standard library's own signature)
    return listener


@contextlib.contextmanager
def listen_unix(path: str) -> Generator[socket.socket, None, None]:
    """Listen on a Unix socket, which is removed afterwards. Raises PortInUse or CannotListen.

    A socket that a dead server left behind is replaced.
    """
    _allow_files(MAX_CONNECTIONS + RESERVED_PLACES + _NUM_OTHER_FILES)
    _remove_dead_socket(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(path)
            os.chmod(path, _SOCKET_MODE)
            listener.listen(_BACKLOG)
        except OSError as error:
            raise CannotListen(f"--uds {path}: {error.strerror}; name another path") from error
        listener.setblocking(False)  # noqa: FBT003 (the standard library's own signature)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _remove_dead_socket(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise CannotListen(f"--uds {path}: this is a file; name a path where there is none")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        os.unlink(path)
        return
    except OSError as error:
        raise CannotListen(f"--uds {path}: {error.strerror}; name another path") from error
    raise PortInUse(f"--uds {path}: another program listens there already; stop it, or name another path")


def url_of(listener: socket.socket, *, scheme: str = "http") -> str:
    """The URL from this machine: the wildcard addresses become the loopback address.

    For a Unix socket its path, as `unix:/run/tokenyard.sock`.
    """
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def num_connections_allowed() -> int:
    """Connections for which there are descriptors: a server that cannot accept cannot answer its probes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - RESERVED_PLACES - _NUM_OTHER_FILES))


def _allow_files(num_files: int) -> None:
    """Raise the soft limit as far as needed and allowed, and no further.

    In containers the hard limit may be a thousand million, and a child that closes every descriptor there
    could be would take minutes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= num_files:
        return
    wanted = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _drop_peers_that_do_not_read(listener: socket.socket) -> None:
    """Set the time limit that accepted sockets inherit. It also ends closed ones, which wait for the peer."""
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_TIMEOUT_MS)


def _in_use(flag: str, port: int) -> str:
    owner = _owner_of(port)
    who = f"process {owner}" if owner else "another program"
    return (
        f"{flag} {port}: {who} listens there already; stop it, or choose another port (0 takes any free one)"
    )


def _why_not(host: str, port: str, error: OSError) -> str:
    if error.errno == errno.EACCES:
        return f"{port}: this user may not open it; use a port from 1024 on"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host}: this machine has no such address; use one of its own, or 0.0.0.0 for all"
    return f"--host {host} {port}: {error.strerror}; choose another address"


def _owner_of(port: int) -> str | None:
    """`4711 (python)`: found where /proc shows it, which it does for processes of the same user."""
    inodes = {
        inode for table in ("tcp", "tcp6") for inode in _listening_inodes(Path("/proc/net") / table, port)
    }
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(link.readlink()) in wanted for link in (process / "fd").iterdir()):
                return f"{process.name} ({(process / 'comm').read_text(encoding='utf-8').strip()})"
        except OSError:
            continue  # gone meanwhile, or another user's
    return None


def _listening_inodes(table: Path, port: int) -> list[str]:
    try:
        lines = table.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    is_listening = "0A"
    return [row[9] for row in rows if row[3] == is_listening and row[1].endswith(f":{port:04X}")]
