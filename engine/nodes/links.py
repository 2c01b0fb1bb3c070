"""The links of one rank, where some are on other nodes: plans, results, agreement, sums, hidden states.

Owns: one connection for each of them to the switchboard of the first node, and the end of the rank when one
is cut: messages under way are lost, and a rank that went on would compute other numbers.
Ranks on GPUs only meet over links, and exchange the rest by libraries of their own.
Never: listens. Ranks of the first node connect within its directory, the others by an address, with keys.

Shapes: S ranks, N numbers, P peers, B bytes.
"""

import logging
import threading
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import torch
import zmq
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from engine.nodes.link_address import (
    INLET,
    OUTLET,
    PEERS,
    PLANS,
    RESULTS,
    STORE,
    WORLD,
    channel_id,
    interface_to,
    read_link,
    secure,
)
from engine.nodes.messages import MAX_MESSAGE_BYTES
from engine.nodes.outbox import Add, Look, Put, ShelfCall
from engine.nodes.rank_plans import Compiled, Order, StageResult, decode_order, encode_plan
from engine.processes.process_end import EXIT_WORKER_BROKEN, leave
from worker.ranks.places import RankPlace
from worker.ranks.stage import pieces_of

log = logging.getLogger(__name__)

_OPEN_MS = 20_000
_LOOK_MS = 500
_PIECE_BYTES = 16 << 20
_PING_MS, _PONG_WITHIN_MS = 1_000, 4_000
_ASK_AGAIN_S = 0.02


class Links:
    """All links of a rank, open until the process ends. Each is for one thread at a time."""

    def __init__(self, directory: Path, place: RankPlace) -> None:
        """Connect. Raises zmq.Again where there is no answer."""
        self._link = read_link(directory)
        self._rank, self._peers = place.rank, place.peers
        self._context = zmq.Context(io_threads=1)
        self._monitors: list[zmq.Socket[bytes]] = []
        names = [WORLD]
        names += [PLANS] if place.rank else []
        names += [RESULTS] if place.is_reporting else []
        names += [PEERS] if place.needs_peers else []
        names += [INLET] if place.needs_inlet else []
        names += [OUTLET] if place.needs_outlet else []
        self._sockets = {name: self._open(name) for name in names}
        self._store: LinkedStore | None = None
        self._is_closing = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="links", daemon=True)
        self._watching.start()

    def world(self) -> "LinkedWorld":
        return LinkedWorld(self._sockets[WORLD], self._rank)

    def peers(self) -> "LinkedPeers":
        """Return the sums of all nodes of this stage."""
        return LinkedPeers(self._sockets[PEERS], self._peers.index(self._rank), len(self._peers))

    def inlet(self) -> "LinkedReceiver":
        """Return the receiver of the stage before."""
        return LinkedReceiver(self._sockets[INLET])

    def outlet(self) -> "LinkedSender":
        """Return the sender to the next stage."""
        return LinkedSender(self._sockets[OUTLET])

    def store(self) -> "LinkedStore":
        """Return the place where the ranks of all nodes meet, which is opened once."""
        if self._store is None:  # kept here: the libraries keep only the part of it that is not Python's
            self._store = LinkedStore(self._open(STORE))
        return self._store

    def interface(self) -> str:
        """Name the network interface that the nodes share. Raises StartupError."""
        return interface_to(self._link.host)

    def has_any(self, wait_s: float = 0.0) -> bool:
        """Wait up to `wait_s` seconds for an order; return whether there is one."""
        return bool(self._sockets[PLANS].poll(int(wait_s * 1000)))

    def receive(self) -> Order | None:
        """Wait for the next step, or for what comes before it; None at the end."""
        message = self._sockets[PLANS].recv()
        return decode_order(message) if message else None

    def send(self, report: StageResult | Compiled) -> None:
        """Post the result of a step, or that grammars are compiled."""
        self._sockets[RESULTS].send(encode_plan(report))

    def close(self) -> None:
        """Close; posted messages have a second to leave."""
        self._is_closing.set()
        self._watching.join()
        if self._store is not None:
            self._store.close()
        self._context.destroy(linger=1000)

    def _open(self, channel: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        socket.set_hwm(0)  # bounded by the plans in flight
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.identity = channel_id(self._link.life, channel, self._rank)
        if self._link.key is not None:
            secure(socket, self._link.key)
            socket.reconnect_ivl = -1
            socket.heartbeat_ivl, socket.heartbeat_timeout = _PING_MS, _PONG_WITHIN_MS
            self._monitors.append(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        socket.rcvtimeo = _OPEN_MS
        socket.connect(self._link.address)
        socket.send(b"")  # the switchboard knows its peers by their first message
        socket.recv()
        socket.rcvtimeo = -1
        return socket

    def _watch(self) -> None:
        if self._link.key is None:
            return
        poller = zmq.Poller()
        while not self._is_closing.is_set():
            for monitor in self._monitors:
                if monitor not in poller:  # that of the store, which is opened later
                    poller.register(monitor, zmq.POLLIN)
            if poller.poll(_LOOK_MS):
                log.critical("the link to the first node is cut: rank %d ends", self._rank)
                leave(EXIT_WORKER_BROKEN)


class LinkedWorld:
    """World over a link to the switchboard."""

    def __init__(self, socket: "zmq.Socket[bytes]", rank: int) -> None:
        self._socket = socket
        self.rank = rank

    def join(self, library: Path | None) -> None:
        """Do nothing: the exchange needs no kernels."""

    def of_all(self, numbers: list[int]) -> Tensor:
        self._socket.send(msgspec.msgpack.encode(numbers))
        numbers_SN = msgspec.msgpack.decode(self._socket.recv(), type=list[list[int]])
        return torch.tensor(numbers_SN, dtype=torch.int64)


class LinkedPeers:
    """Peers over a link to the switchboard."""

    def __init__(self, socket: "zmq.Socket[bytes]", place: int, count: int) -> None:
        self._socket = socket
        self._place, self._count = place, count
        self._others = [each for each in range(count) if each != place]

    def of_all(self, own: Tensor) -> Tensor:
        whole = own.new_empty((self._count, *own.shape))
        whole[self._place] = own
        whole_PB = whole.flatten(1).view(torch.uint8).numpy()
        begin = 0
        for part in pieces_of(own, _PIECE_BYTES):
            self._socket.send(part.numpy().data)
            came = np.frombuffer(self._socket.recv(copy=False).buffer, dtype=np.uint8)
            if len(came) != len(part) * len(self._others):
                raise ValueError(f"nodes do not compute the same: {len(came)} bytes came for {len(part)}")
            whole_PB[self._others, begin : begin + len(part)] = came.reshape(len(self._others), len(part))
            begin += len(part)
        return whole


class LinkedSender:
    """HiddenSender over a link. It never waits: the plans in flight bound the queue."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket

    def send(self, hidden: Tensor) -> None:
        for part in pieces_of(hidden, _PIECE_BYTES):
            self._socket.send(part.numpy().data)

    def close(self) -> None:
        """Do nothing: see Links."""


class LinkedReceiver:
    """HiddenReceiver over a link."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket

    def receive(self, hidden: Tensor) -> None:
        for part in pieces_of(hidden, _PIECE_BYTES):
            came = np.frombuffer(self._socket.recv(copy=False).buffer, dtype=np.uint8)
            if len(came) != len(part):
                raise ValueError(f"stages do not compute the same: {len(came)} bytes came for {len(part)}")
            part.numpy()[:] = came

    def close(self) -> None:
        """Do nothing: see Links."""


class LinkedStore(Store):
    """The calls by which ranks of torch.distributed meet, and no others. For several threads at once."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        super().__init__()
        self._socket = socket
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        """Leave a text for all ranks."""
        self._ask(Put(key, value if isinstance(value, bytes) else value.encode()))

    def get(self, key: str) -> bytes:
        """Wait for a text. Raises DistStoreError where it has not come within the store's time limit."""
        return self._get(key, time.monotonic(), None)

    def add(self, key: str, value: int) -> int:
        """Add to a number of all ranks."""
        return int(self._ask(Add(key, value)) or b"0")

    def check(self, keys: list[str]) -> bool:
        """Tell whether all texts are there."""
        return all(self._ask(Look(key)) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for texts, so long for all of them. Raises as `get`."""
        started_s = time.monotonic()
        for key in keys:
            self._get(key, started_s, timeout)

    def clone(self) -> "LinkedStore":
        """Return this one: calls are for any thread."""
        return self

    def close(self) -> None:
        """Refuse later calls, which threads of the libraries make as long as the process lives."""
        with self._lock:
            self._socket.close(linger=0)

    def _get(self, key: str, started_s: float, limit: timedelta | None) -> bytes:
        limit = limit or self.timeout  # type: ignore[attr-defined]
        limit_s = limit.total_seconds()
        while (found := self._ask(Look(key))) is None:
            if time.monotonic() - started_s > limit_s:
                raise DistStoreError(f"no rank has left {key} within {limit_s:g} s")
            time.sleep(_ASK_AGAIN_S)
        return found

    def _ask(self, call: ShelfCall) -> bytes | None:
        with self._lock:
            self._socket.send(msgspec.msgpack.encode(call))
            return msgspec.msgpack.decode(self._socket.recv(), type=bytes | None)
