"""The sockets on which KV events are published, and asked for again.

Owns: the numbers of the batches, and the newest of them, bounded. A reader that is too slow loses batches,
sees it by their numbers, and asks for them; one that asks for more than there is begins anew.
Source: vLLM's publisher: (topic, number, batch); asked for by (empty, number), answered by (empty, topic,
number, batch) for each that is there, and number -1 at the end.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import zmq

from engine.options.declaration import OptionError
from engine.options.engine_split import KVEventsConfig
from engine.reports.kv_events import AllBlocksCleared, KVEvent, SharedBlocks
from scheduler.prefix_keys import PrefixChange

_MAX_KEPT = 10_000
_MAX_KEPT_BYTES = 64 * 2**20
_MAX_ASKED_BYTES = 1024
_END = (-1).to_bytes(8, "big", signed=True)

_encode = msgspec.msgpack.Encoder().encode


class KVPublisher:
    """Publishes from the thread that made it; another one answers questions for old batches."""

    def __init__(self, config: KVEventsConfig) -> None:
        """Raises OptionError if a port cannot be had."""
        self._topic = config.topic.encode()
        self._blocks = SharedBlocks()
        self._context = zmq.Context(io_threads=1)
        self._out: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
        self._asked: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        # Room for all batches: a full queue would drop the last ones silently.
        self._asked.sndhwm = _MAX_KEPT + 1
        self._asked.router_mandatory = 1
        for place, end in enumerate((self._out, self._asked)):
            self._bind(end, config.host, config.port + place)
        self._lock = threading.Lock()
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._num_kept_bytes = 0
        self._num_sent = 0
        self._publish([AllBlocksCleared()])  # for readers of a server that was here before
        self._thread = threading.Thread(target=self._answer, name="kv-events", daemon=True)
        self._thread.start()

    def note(self, engine: int, changes: Iterable[PrefixChange]) -> None:
        self._publish(self._blocks.events(engine, changes))

    def forget(self, engine: int) -> None:
        """Publish that an engine is gone, with its prefix cache."""
        self._publish(self._blocks.forget(engine))

    def close(self) -> None:
        self._out.close(linger=0)
        self._context.term()  # ends the wait of the thread, which closes its socket
        self._thread.join()

    def _bind(self, end: "zmq.Socket[bytes]", host: str, port: int) -> None:
        end.linger = 0
        end.maxmsgsize = _MAX_ASKED_BYTES
        end.ipv6 = ":" in host
        try:
            end.bind(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            reason = zmq.strerror(error.errno or 0).lower()
            raise OptionError(
                f"KV events at {host}, port {port}", reason, "change --kv-events-port or --kv-events-host"
            ) from None

    def _publish(self, events: Sequence[KVEvent]) -> None:
        if not events:
            return
        batch = _encode((time.time(), events))
        with self._lock:
            number = self._num_sent.to_bytes(8, "big")
            self._num_sent += 1
            self._kept.append((number, batch))
            self._num_kept_bytes += len(batch)
            while len(self._kept) > _MAX_KEPT or self._num_kept_bytes > _MAX_KEPT_BYTES:
                self._num_kept_bytes -= len(self._kept.popleft()[1])
        self._out.send_multipart((self._topic, number, batch))

    def _answer(self) -> None:
        try:
            while True:
                self._replay(self._asked.recv_multipart())
        except zmq.ContextTerminated:
            self._asked.close(linger=0)

    def _replay(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # in another form, from a program that reads no events
        client, _, first = frames
        with self._lock:
            batches = [each for each in self._kept if each[0] >= first]
        # A reader that has left, or leaves its answers unread, gets no more of them; it may ask again.
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            for number, batch in batches:
                self._asked.send_multipart((client, b"", self._topic, number, batch), zmq.NOBLOCK)
            self._asked.send_multipart((client, b"", b"", _END, b""), zmq.NOBLOCK)
