"""A node that is not the first: it waits for an engine, and runs the ranks of its stages for it.

Owns: the ranks, which end with it, with the engine that they take part in, or when one of them ends; and the
wait for the next engine. It connects to the first node and opens no port.
"""

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from engine.logs.lines import ProcessName
from engine.logs.setup import Logs
from engine.nodes.first_node import checkpoint_of, software
from engine.nodes.link_address import LinkAddress, secure, write_link
from engine.nodes.messages import (
    BEAT_S,
    LEADER_SILENCE_S,
    MAX_MESSAGE_BYTES,
    SILENCE_S,
    Alive,
    Begin,
    Dismissed,
    Hello,
    RankEnded,
    RankSays,
    Refused,
    ToLeader,
    ToNode,
    Wait,
    WriteStacks,
    decode_to_node,
    encode,
)
from engine.nodes.rank_start import start_rank
from engine.options.engine_config import EngineConfig
from engine.process_messages import Pulse, StartFailed
from engine.processes.child_process import CONFIG_FILE, SIGNAL_FOR_STACKS
from engine.processes.runtime_directory import RuntimeDirectory
from engine.processes.supervisor import compute_environment
from engine.processes.transport import RankReports
from worker.machine import visible_gpus
from worker.ranks.places import make_places
from worker.worker_errors import StartupError

log = logging.getLogger(__name__)

EXIT_REFUSED = 78


def run_node(config: EngineConfig, log_level: str) -> int:
    """Take part in one engine after another until a signal; return the exit code."""
    level = logging.getLevelNamesMapping()[log_level.upper()]
    with Logs(config.log_format, level=level, process=ProcessName.NODE):
        try:
            agent = NodeAgent(config)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda _signal, _frame: agent.stop())
            return agent.run()
        except StartupError as error:
            log.critical("%s; %s", error.what, error.fix)
            return EXIT_REFUSED


class NodeAgent:
    """A node, from `run` to `stop` or a refusal."""

    def __init__(self, config: EngineConfig) -> None:
        """Read the checkpoint's digest. Raises StartupError."""
        assert config.cluster is not None
        self._config = config
        self._cluster = config.cluster
        self._hello = Hello(
            node=self._cluster.node,
            num_nodes=self._cluster.num_nodes,
            software=software(),
            checkpoint=checkpoint_of(config),
            num_gpus=len(visible_gpus()),
        )
        self._stopping = threading.Event()
        self._said = ""

    def stop(self) -> None:
        """End after the present beat. For signal handlers."""
        self._stopping.set()

    def run(self) -> int:
        """Take part in one engine after another; return the exit code."""
        while not self._stopping.is_set():
            refused = self.take_part()
            if refused is not None:
                log.critical("this node is refused: %s; %s", refused.what, refused.fix)
                return EXIT_REFUSED
        return 0

    def take_part(self) -> Refused | None:
        """Dial until an engine begins, and run the ranks of this node for it; return a refusal, if any."""
        while not self._stopping.is_set():
            with self.connected() as leader:
                answer = self._dial(leader, self._hello)
                if isinstance(answer, Refused):
                    return answer
                if answer is not None:
                    if _Part(self._config, answer, leader).run(self._stopping):
                        log.info("the first node has ended, and this one ends with it")
                        self.stop()
                    return None
        return None

    def _dial(self, leader: "Leader", hello: Hello) -> Begin | Refused | None:
        """Say hello until an engine begins; None at a signal, or after a silence."""
        while not self._stopping.is_set():
            for answer in leader.exchange(hello):
                if isinstance(answer, Begin | Refused):
                    return answer
                if isinstance(answer, Wait):
                    self._say(f"connected to the first node: {answer.reason}")
            if leader.silent_s > SILENCE_S:
                leader.socket.linger = 0
                self._say(
                    f"no answer from the first node at {self._cluster.host}:{self._cluster.port}: it has not "
                    "started, cannot be reached, or has another TOKENYARD_CLUSTER_KEY; still trying"
                )
                return None
        return None

    def _say(self, what: str) -> None:
        """Log a sentence, unless it is the same as the last one."""
        if what != self._said:
            log.info("%s", what)
            self._said = what

    @contextmanager
    def connected(self) -> "Iterator[Leader]":
        """Connect anew: the name of the first node may have another address now."""
        context = zmq.Context(io_threads=1)
        socket = context.socket(zmq.DEALER)
        socket.identity = f"node/{self._cluster.node}/{os.urandom(8).hex()}".encode()
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.linger = 1000
        secure(socket, self._cluster.key)
        socket.connect(self._cluster.address)
        try:
            yield Leader(socket)
        finally:
            socket.close()
            # It closes some time later. A hello that still left would take the place of the next connection.
            context.term()


class Leader:
    """The connection to the first node."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket
        self._heard_s = time.monotonic()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._heard_s

    def send(self, message: ToLeader) -> None:
        """Post without waiting; what finds no room is repeated, or missed and noticed."""
        with suppress(zmq.Again):
            self.socket.send(encode(message), zmq.NOBLOCK)

    def exchange(self, message: ToLeader) -> list[ToNode]:
        """Send a message; return all that come within a beat."""
        self.send(message)
        until_s = time.monotonic() + BEAT_S
        found: list[ToNode] = []
        while self.socket.poll(int(max(0.0, until_s - time.monotonic()) * 1000)):
            self._heard_s = time.monotonic()
            try:
                found.append(decode_to_node(self.socket.recv()))
            except msgspec.DecodeError as error:
                what = f"the first node says what this version does not know ({error})"
                found.append(Refused(what=what, fix="install the same version on all nodes"))
        return found


class _Part:
    """The part of this node in one engine."""

    def __init__(self, own: EngineConfig, begin: Begin, leader: Leader) -> None:
        assert own.cluster is not None
        self._cluster = own.cluster
        self._life, self._leader = begin.life, leader
        worker = replace(  # the first node's, with this node's files and threads
            begin.config.worker,
            model_path=own.worker.model_path,
            checksums_file=own.worker.checksums_file,
            chat_template_file=own.worker.chat_template_file,
            num_threads=own.worker.num_threads,
        )
        self._config = replace(begin.config, worker=worker, log_format=own.log_format)
        self._is_dismissed = False

    def run(self, stopping: threading.Event) -> bool:
        """Run the ranks until one of them ends, the engine ends, or a signal comes.

        Returns True if no other engine is to be waited for.
        """
        runtime = RuntimeDirectory.make()
        reports = RankReports(runtime.path)
        children: dict[int, subprocess.Popen[bytes]] = {}
        try:
            self._start(runtime.path, children)
            while not stopping.is_set() and self._goes_on(children, reports):
                pass
        finally:
            if stopping.is_set() and children:  # so that the first node need not wait for silence
                self._leader.send(RankEnded(rank=min(children), exit_code=-signal.SIGTERM))
            for child in children.values():
                child.kill()
                child.wait()
            reports.close()
            runtime.remove()
        return self._is_dismissed

    def _start(self, directory: Path, children: dict[int, subprocess.Popen[bytes]]) -> None:
        worker = self._config.worker
        (directory / CONFIG_FILE).write_bytes(msgspec.msgpack.encode(self._config))
        link = LinkAddress(self._cluster.address, self._life, self._cluster.key, self._cluster.host)
        write_link(directory, link)
        places = make_places(
            worker.num_stages, worker.num_ranks, node=self._cluster.node, num_nodes=worker.num_nodes
        )
        log.info("an engine begins; ranks %d to %d are here", places[0].rank, places[-1].rank)
        try:
            for place in places:
                children[place.rank] = start_rank(directory, place, compute_environment(directory))
        finally:
            for descriptor in {each for place in places for each in place.descriptors}:
                os.close(descriptor)

    def _goes_on(self, children: dict[int, subprocess.Popen[bytes]], reports: RankReports) -> bool:
        """Exchange a beat; tell whether the engine goes on."""
        for message in self._leader.exchange(Alive(self._life)):
            if isinstance(message, WriteStacks):
                for child in children.values():
                    child.send_signal(SIGNAL_FOR_STACKS)
            self._is_dismissed |= isinstance(message, Dismissed)
            if isinstance(message, Alive) and message.life != self._life:
                log.warning("the engine has ended, and the next is there")
                return False
        if self._leader.silent_s > LEADER_SILENCE_S:
            log.critical("the first node has been silent for %.0f s: the ranks here end", LEADER_SILENCE_S)
            return False
        ended = {rank: code for rank, child in children.items() if (code := child.poll()) is not None}
        for said in reports.receive():  # after the look: a rank that has ended has said why before
            if isinstance(said, Pulse | StartFailed):
                self._leader.send(RankSays(said))
        failed = {rank: code for rank, code in ended.items() if code}
        for rank, code in failed.items():
            log.critical("rank %d ended with code %d, and all others here end with it", rank, code)
            self._leader.send(RankEnded(rank=rank, exit_code=code))
        return not failed and len(ended) < len(children)
