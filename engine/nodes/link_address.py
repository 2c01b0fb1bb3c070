"""The address of the first node for ranks, and the encryption and the interface of the way there.

Owns: the file with the address in the directory of ranks, the names of the ends of links, and the keys that
are made of the secret which all nodes share: a peer without the secret has neither public key.
Source: netdevice(7), for the address of an interface; CurveZMQ, https://rfc.zeromq.org/spec/26/, for keys.
"""

import fcntl
import hashlib
import hmac
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq
from zmq.utils import z85

from worker.worker_errors import StartupError

_FILE = "link.msgpack"
PLANS, RESULTS, WORLD, PEERS = "plans", "results", "world", "peers"
INLET, OUTLET = "inlet", "outlet"
STORE = "store"

_SIOCGIFADDR = 0x8915
_REQUEST = struct.Struct("16s4x4s16x")
"""The name of an interface, and the IPv4 address of the answer."""
_ANY_PORT = 9
_FIX = "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that the nodes share"


class LinkAddress(msgspec.Struct, frozen=True):
    """Address of the switchboard, in a file that only the user can read."""

    address: str
    life: str
    key: str | None
    """Secret that all nodes share; None within the first node."""
    host: str
    """Address of the first node for the others."""


def write_link(directory: Path, link: LinkAddress) -> None:
    """Leave the address for all ranks with this directory."""
    (directory / _FILE).write_bytes(msgspec.msgpack.encode(link))


def read_link(directory: Path) -> LinkAddress:
    return msgspec.msgpack.decode((directory / _FILE).read_bytes(), type=LinkAddress)


def channel_id(life: str, channel: str, rank: int) -> bytes:
    """Name one end of a link for the switchboard."""
    return f"{life}/{channel}/{rank}".encode()


class KeyPair(NamedTuple):
    """A pair in the form that ZeroMQ takes, Z85."""

    public: bytes
    secret: bytes


def leader_keys(shared: str) -> KeyPair:
    return _pair(shared, "leader")


def node_keys(shared: str) -> KeyPair:
    return _pair(shared, "node")


def _pair(shared: str, role: str) -> KeyPair:
    numbers = hmac.digest(shared.encode(), f"tokenyard {role}".encode(), hashlib.sha256)
    secret = z85.encode(numbers)
    return KeyPair(zmq.curve_public(secret), secret)


def secure(socket: "zmq.Socket[bytes]", key: str | None) -> None:
    """Encrypt a connection to the first node; without a key it stays within the machine."""
    if key is None:
        return
    pair = node_keys(key)
    socket.curve_serverkey = leader_keys(key).public
    socket.curve_publickey, socket.curve_secretkey = pair


def interface_to(host: str) -> str:
    """Name the interface by which this machine reaches an address, or has it. Raises StartupError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, _ANY_PORT))  # which only chooses a way: nothing is sent
        except OSError as error:
            raise StartupError(f"no way leads to the first node, {host}: {error}", fix=_FIX) from error
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # without an IPv4 address
                request = _REQUEST.pack(name.encode(), b"")
                _, address = _REQUEST.unpack(fcntl.ioctl(probe, _SIOCGIFADDR, request))
                if socket.inet_ntoa(address) == own:
                    return name
    raise StartupError(
        f"no network interface has {own}, the address by which this machine reaches the first node",
        fix=_FIX,
    )
