"""The switchboard of the first node: one address, where all links of all nodes end.

Owns: the two sockets, one with keys for other nodes and one for ranks of this node; the way of each message;
the start of an engine on all nodes; and its end when a node is silent, comes anew or loses a rank.
Never: reads plans, results, sums or hidden states, which it passes on; or computes. It runs in a thread
of the engine process, which sleeps while nothing comes.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq
import zmq.auth.thread

from engine.nodes.link_address import (
    INLET,
    OUTLET,
    PEERS,
    PLANS,
    RESULTS,
    STORE,
    WORLD,
    LinkAddress,
    channel_id,
    leader_keys,
    node_keys,
    write_link,
)
from engine.nodes.messages import (
    MAX_BYTES_FROM_NODES,
    MAX_MESSAGE_BYTES,
    SILENCE_S,
    Alive,
    Begin,
    Dismissed,
    Hello,
    RankEnded,
    RankSays,
    Refused,
    ToNode,
    WriteStacks,
    decode_to_leader,
    encode,
)
from engine.nodes.outbox import Outbox
from engine.nodes.rank_plans import Order, Reports, encode_plan
from engine.nodes.registry import NodeRegistry, describe_missing
from engine.options.engine_config import EngineConfig
from engine.process_messages import StartFailed
from engine.processes.child_process import EXIT_START_FAILED
from engine.processes.process_end import EXIT_WORKER_BROKEN
from engine.processes.transport import PulseSide
from worker.ranks.places import peers_of

log = logging.getLogger(__name__)

_COMMANDS, _OUTCOMES = "inproc://commands", "inproc://results"
_PLAN, _BEGIN, _STACKS, _DISMISS, _CLOSE = b"plan", b"begin", b"stacks", b"dismiss", b"close"
_LOOK_MS = 200
_MOST_AT_ONCE = 1000
_HANDSHAKE_MS = 5_000
_PROMPT_TOKEN_BYTES = 512
"""Most bytes of a result for each token of a step: a prompt token with 20 alternatives."""
_DOMAIN = "nodes"


class _OnlyNodes:
    """Check of a peer's key, as pyzmq asks for it."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - there is one
        """Tell whether a peer is one of the nodes."""
        return secrets.compare_digest(key, self._key)


class Switchboard:
    """All links of one engine. Made and closed in the main thread, which sends plans and takes results."""

    def __init__(self, config: EngineConfig, directory: Path, address: str, roll: NodeRegistry) -> None:
        """Listen on `address`. Raises zmq.ZMQError where that cannot be."""
        assert config.cluster is not None
        self.life = secrets.token_hex(8)
        self.on_loss: Callable[[int, str], None] = lambda _code, _what: None
        """Call for a node that is lost, from the thread; it ends the process."""
        self._config, self._roll = config, roll
        self._num_shards = config.worker.num_ranks
        self._num_ranks = config.worker.num_ranks * config.worker.num_stages
        self._num_here = min(self._num_shards, self._num_ranks // config.worker.num_nodes)
        self._directory = directory
        self._context = zmq.Context(io_threads=1)
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._authenticator.start()
        key = node_keys(config.cluster.key).public
        self._authenticator.configure_curve_callback(_DOMAIN, credentials_provider=_OnlyNodes(key))
        # A peer without the key can announce a message too.
        most_bytes = config.scheduler.max_num_batched_tokens * _PROMPT_TOKEN_BYTES
        self._nodes = self._router(max(MAX_BYTES_FROM_NODES, most_bytes))
        self._nodes.handshake_ivl = _HANDSHAKE_MS
        self._nodes.zap_domain = _DOMAIN.encode()
        self._nodes.curve_server = True
        self._nodes.curve_publickey, self._nodes.curve_secretkey = leader_keys(config.cluster.key)
        self._here = self._router(MAX_MESSAGE_BYTES)
        link = LinkAddress(f"ipc://{directory / 'switchboard'}", self.life, None, config.cluster.host)
        write_link(directory, link)
        self._orders = self._inproc(zmq.PULL, _COMMANDS)
        self._outcomes = self._inproc(zmq.PUSH, _OUTCOMES)
        self._commands = self._inproc(zmq.PUSH, _COMMANDS)
        self._commands_lock = threading.Lock()
        self.results = Reports(self._inproc(zmq.PULL, _OUTCOMES))
        """Reports of the last stage; `close` closes them too."""
        self._sockets_of: dict[bytes, zmq.Socket[bytes]] = {}
        self._numbers: dict[bytes, list[int]] = {}
        self._parts: dict[range, dict[int, bytes]] = {}
        self._shelf = Outbox()
        self._reports: PulseSide | None = None
        self._is_begun = self._is_closing = False
        self._has_all = threading.Event()
        self._thread = threading.Thread(target=self._run, name="switchboard", daemon=True)
        try:
            self._here.bind(link.address)
            self._nodes.bind(address)
        except zmq.ZMQError:
            self._close()
            raise
        self._thread.start()

    # In the main thread.

    def wait_for_nodes(self, wait_s: float) -> str:
        """Wait up to `wait_s` seconds for all nodes; name missing ones, or return an empty text."""
        return "" if self._has_all.wait(wait_s) else describe_missing(self._roll.missing)

    def begin(self) -> None:
        """Let all nodes load. From now on the loss of one is the end."""
        self._order(_BEGIN)

    def ask_for_stacks(self) -> None:
        """Let the ranks of other nodes write their stacks. For any thread."""
        self._order(_STACKS)

    def send(self, order: Order) -> None:
        """Post to all ranks, without waiting for any."""
        self._order(_PLAN, encode_plan(order))

    def dismiss_nodes(self) -> None:
        """Let all nodes end with their ranks, rather than wait for another engine."""
        self._order(_DISMISS)

    def say_goodbye(self) -> None:
        """Let all ranks end once they have carried out all orders."""
        self._is_closing = True
        self._order(_PLAN, b"")

    def close(self) -> None:
        """End the thread; posted messages have a second to leave."""
        if not self._thread.is_alive():
            return
        self._is_closing = True
        self._order(_CLOSE)
        self._thread.join()
        self._close()

    def _order(self, *frames: bytes) -> None:
        with self._commands_lock:
            self._commands.send_multipart(frames)

    def _router(self, most_bytes: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.ROUTER)
        socket.set_hwm(0)  # bounded by the plans in flight
        socket.maxmsgsize = most_bytes
        socket.router_mandatory = True
        return socket

    def _inproc(self, kind: int, address: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        (socket.bind if kind == zmq.PULL else socket.connect)(address)
        return socket

    def _close(self) -> None:
        self._authenticator.stop()
        self._context.destroy(linger=1000)

    # In the thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._nodes, self._here, self._orders):
            poller.register(socket, zmq.POLLIN)
        look_s = 0.0
        while True:
            poller.poll(_LOOK_MS)
            try:
                for socket in (self._here, self._nodes):
                    for frames in _waiting(socket):
                        self._take(socket, frames)
                for order in _waiting(self._orders):
                    if not self._obey(*order):
                        return
            except Exception as error:
                if not self._is_closing:
                    log.exception("the switchboard of nodes failed")
                    self._lose(EXIT_WORKER_BROKEN, f"the links between nodes failed: {error}")
            # By the clock, since a pause between the messages of many may never come; and after all that were
            # waiting, since one may be of a node that seems silent.
            now_s = time.monotonic()
            if now_s >= look_s:
                self._look(now_s)
                look_s = now_s + _LOOK_MS / 1000

    def _obey(self, order: bytes, payload: bytes = b"") -> bool:
        """Carry out an order of the main thread; tell whether to go on."""
        if order == _PLAN:
            for rank in range(1, self._num_ranks):
                self._pass_on(PLANS, rank, payload)
        elif order == _BEGIN:
            self._is_begun = True
            self._roll.begin()
            if self._roll.missing:
                self._lose(EXIT_WORKER_BROKEN, f"node {self._roll.missing[0]} has left before the start")
            for agent in self._roll.agents:
                self._answer(agent, Begin(life=self.life, config=replace(self._config, cluster=None)))
        elif order in (_STACKS, _DISMISS):
            for agent in self._roll.agents:
                self._answer(agent, WriteStacks() if order == _STACKS else Dismissed())
        return order != _CLOSE

    def _take(self, socket: "zmq.Socket[bytes]", frames: list[bytes]) -> None:
        sender, payload = frames[0], frames[-1]
        life, _, end = sender.decode(errors="replace").partition("/")
        if socket is self._nodes and life == "node":
            self._hear(sender, payload)
            return
        channel, _, rank = end.partition("/")
        if life != self.life or not rank.isdecimal():
            return  # of an engine that has ended
        if sender not in self._sockets_of:
            self._sockets_of[sender] = socket
            socket.send_multipart((sender, b""))
        elif channel == OUTLET:
            self._pass_on(INLET, int(rank) + self._num_shards, payload)
        elif channel == PEERS:
            self._exchange(int(rank), payload)
        elif channel == RESULTS:
            self._outcomes.send(payload)
        elif channel == STORE:
            self._pass_on(STORE, int(rank), self._shelf.answer(payload))
        elif channel == WORLD:
            self._collect(sender, msgspec.msgpack.decode(payload, type=list[int]))

    def _collect(self, sender: bytes, numbers: list[int]) -> None:
        """Answer all ranks with the numbers of all, once each has sent its own."""
        self._numbers[sender] = numbers
        if len(self._numbers) < self._num_ranks:
            return
        ends = [channel_id(self.life, WORLD, rank) for rank in range(self._num_ranks)]
        together = msgspec.msgpack.encode([self._numbers[end] for end in ends])
        self._numbers.clear()
        for rank in range(self._num_ranks):
            self._pass_on(WORLD, rank, together)

    def _exchange(self, rank: int, part: bytes) -> None:
        """Answer ranks with the parts of their peers on other nodes, once each has sent its own."""
        peers = peers_of(rank, num_shards=self._num_shards, num_here=self._num_here)
        parts = self._parts.setdefault(peers, {})
        parts[rank] = part
        if len(parts) < len(peers):
            return
        del self._parts[peers]
        for peer in peers:
            self._pass_on(PEERS, peer, b"".join(parts[each] for each in peers if each != peer))

    def _pass_on(self, channel: str, rank: int, payload: bytes) -> None:
        end = channel_id(self.life, channel, rank)
        self._sockets_of[end].send_multipart((end, payload))

    def _hear(self, agent: bytes, payload: bytes) -> None:
        try:
            message = decode_to_leader(payload)
        except msgspec.DecodeError as error:
            what = f"it says what this version does not know ({error})"
            self._answer(agent, Refused(what=what, fix="install the same version on all nodes"))
            return
        node, now_s = self._roll.node_of(agent), time.monotonic()
        self._roll.hear(agent, now_s)
        if isinstance(message, Hello):
            answer = self._roll.take(agent, message, now_s)
            if isinstance(answer, Refused):
                log.warning("a node is refused: %s; %s", answer.what, answer.fix)
            self._answer(agent, answer)
            if not self._roll.missing:
                self._has_all.set()
        elif isinstance(message, Alive):
            self._answer(agent, Alive(self.life))
        elif node is not None and self._is_begun:
            self._hear_of_rank(node, message)

    def _hear_of_rank(self, node: int, message: RankSays | RankEnded) -> None:
        if isinstance(message, RankEnded):
            what = f"rank {message.rank} on node {node} ended with code {message.exit_code}"
            self._lose(message.exit_code, what)
            return
        said = message.message
        if isinstance(said, StartFailed):
            last = PulseSide(self._directory)
            last.send_last(StartFailed(what=f"node {node}: {said.what}", fix=said.fix))
        else:
            self._reports = self._reports or PulseSide(self._directory)
            self._reports.send(said)

    def _answer(self, agent: bytes, message: ToNode) -> None:
        try:
            self._nodes.send_multipart((agent, encode(message)))
        except zmq.ZMQError:  # it is gone, which its silence will tell
            log.debug("a node is gone before its answer")

    def _look(self, now_s: float) -> None:
        for node in self._roll.silent(now_s):
            if self._is_begun:
                self._lose(EXIT_WORKER_BROKEN, f"node {node} has been silent for {SILENCE_S:.0f} s")
                return
            self._roll.forget(node)
            self._has_all.clear()

    def _lose(self, exit_code: int, what: str) -> None:
        if self._is_begun and not self._is_closing:
            self._is_closing = True
            code = exit_code if exit_code == EXIT_START_FAILED else EXIT_WORKER_BROKEN
            self.on_loss(code, what)


def _waiting(socket: "zmq.Socket[bytes]") -> Iterator[list[bytes]]:
    """Yield the messages that have come, up to a limit, so that no socket keeps the others waiting."""
    for _ in range(_MOST_AT_ONCE):
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield frames
