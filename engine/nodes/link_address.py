"""The address of the first node for ranks, and the encryption of the way there.

Owns: the file with the address in the directory of ranks, and the names of the ends of links.
Never: connects (links.py, node_agent.py).
"""

from pathlib import Path

import msgspec
import zmq

from engine.nodes.cluster_keys import leader_keys, node_keys

_FILE = "link.msgpack"
PLANS, RESULTS, WORLD, PEERS = "plans", "results", "world", "peers"
INLET, OUTLET = "inlet", "outlet"


class LinkAddress(msgspec.Struct, frozen=True):
    """Address of the switchboard, in a file that only the user can read."""

    address: str
    life: str
    key: str | None
    """Secret that all nodes share; None within the first node."""


def write_link(directory: Path, link: LinkAddress) -> None:
    """Leave the address for all ranks with this directory."""
    (directory / _FILE).write_bytes(msgspec.msgpack.encode(link))


def read_link(directory: Path) -> LinkAddress:
    """Read the address that `write_link` left."""
    return msgspec.msgpack.decode((directory / _FILE).read_bytes(), type=LinkAddress)


def channel_id(life: str, channel: str, rank: int) -> bytes:
    """Name one end of a link for the switchboard."""
    return f"{life}/{channel}/{rank}".encode()


def secure(socket: "zmq.Socket[bytes]", key: str | None) -> None:
    """Encrypt a connection to the first node; without a key it stays within the machine."""
    if key is None:
        return
    pair = node_keys(key)
    socket.curve_serverkey = leader_keys(key).public
    socket.curve_publickey, socket.curve_secretkey = pair
