"""KV events: the changes of all prefix caches, in the form in which routers outside read vLLM's.

Owns: that form, and the blocks that some engine has: a block that two engines have is stored once, and
removed when the last of them has lost it. Also the sockets on which events are published, and asked for
again; the numbers of the batches, and the newest of them, bounded. A reader that is too slow loses batches,
sees it by their numbers, and asks for them; one that asks for more than there is begins anew.
Never: tells of blocks of a private key: salt and tokens are its secrets.
Source: vLLM's KV events: msgpack arrays of a time and events, each event a map with its name under "type";
and its publisher: (topic, number, batch); asked for by (empty, number), answered by (empty, topic,
number, batch) for each that is there, and number -1 at the end.
"""

import contextlib
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import msgspec
import zmq

from engine.options.api_keys import is_private
from engine.options.declaration import OptionError
from engine.options.engine_split import KVEventsConfig
from scheduler.cache_groups import LifetimeKind
from scheduler.prefix_keys import ChangeKind, PrefixChange

_MAX_KEPT = 10_000
_MAX_KEPT_BYTES = 64 * 2**20
_MAX_ASKED_BYTES = 1024
_END = (-1).to_bytes(8, "big", signed=True)

_encode = msgspec.msgpack.Encoder().encode


_MEDIUM = "GPU"
"""The wire's word for blocks that are used where they are, on CPUs too. Blocks in the swap space are not."""
_KINDS = {
    LifetimeKind.ALL: "full_attention",
    LifetimeKind.WINDOW: "sliding_window",
    LifetimeKind.CHUNK: "chunked_local_attention",
}
_GroupKey = tuple[int | None, bytes]
"""Group of layers, None if there is one, and key of a block."""


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """One block that is found now."""

    block_hashes: tuple[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None
    extra_keys: tuple[tuple[str, ...]] | None = None
    """Name of the adapter, and cache salt of a first block."""
    group_idx: int | None = None
    """Group of layers, where a model has several: a prompt needs what it reads of each."""
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Blocks that are no longer found."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """No block is found any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class SharedBlocks:
    """The blocks of all engines, by key: for a router, they are one server."""

    def __init__(self) -> None:
        self._num_holders: Counter[_GroupKey] = Counter()
        self._of_engine: dict[int, set[_GroupKey]] = {}

    def events(self, engine: int, changes: Iterable[PrefixChange]) -> list[KVEvent]:
        """Return the events that changes of one engine make, in order."""
        events: list[KVEvent] = []
        for change in changes:
            if change.group is not None and change.group.lifetime.kind not in _KINDS:
                continue  # a state is none of the blocks before it
            if change.kind is ChangeKind.STORED:
                events += self._stored(engine, change)
            elif change.kind is ChangeKind.FORGOTTEN:
                events += self._removed(engine, {_key_of(change)})
            else:
                events += self.forget(engine)
        return events

    def forget(self, engine: int) -> list[KVEvent]:
        """Return the events of an engine that has lost all blocks, or is gone."""
        events = self._removed(engine, set(self._held(engine)))
        return [AllBlocksCleared()] if events and not self._num_holders else events

    def _held(self, engine: int) -> set[_GroupKey]:
        return self._of_engine.setdefault(engine, set())

    def _stored(self, engine: int, change: PrefixChange) -> list[KVEvent]:
        key = _key_of(change)
        if key in self._held(engine) or is_private(change.salt):
            return []
        self._held(engine).add(key)
        self._num_holders[key] += 1
        return [_stored_event(change)] if self._num_holders[key] == 1 else []

    def _removed(self, engine: int, keys: set[_GroupKey]) -> list[KVEvent]:
        held = self._held(engine)
        gone: dict[int | None, list[int]] = {}
        for key in keys & held:
            held.discard(key)
            self._num_holders[key] -= 1
            if not self._num_holders[key]:
                del self._num_holders[key]
                gone.setdefault(key[0], []).append(block_hash(key[1]))
        return [
            BlockRemoved(block_hashes=hashes, medium=_MEDIUM, group_idx=group)
            for group, hashes in gone.items()
        ]


def _key_of(change: PrefixChange) -> _GroupKey:
    return None if change.group is None else change.group.number, change.key


def block_hash(key: bytes) -> int:
    """Return the number by which routers know a block: 64 bits of its key."""
    return int.from_bytes(key[:8], "big")


def _stored_event(change: PrefixChange) -> BlockStored:
    token_ids = array("I", change.token_ids).tolist()
    lora_name = change.adapter.rpartition("@")[0] or None  # what requests name: the rest is of its content
    salt = "" if change.parent else change.salt
    extra_keys = tuple(filter(None, (lora_name, salt)))
    return BlockStored(
        block_hashes=(block_hash(change.key),),
        parent_block_hash=block_hash(change.parent) if change.parent else None,
        token_ids=token_ids,
        block_size=len(token_ids),
        lora_id=None,
        medium=_MEDIUM,
        lora_name=lora_name,
        extra_keys=(extra_keys,) if extra_keys else None,
        group_idx=_key_of(change)[0],
        kv_cache_spec_kind=None if change.group is None else _KINDS[change.group.lifetime.kind],
        kv_cache_spec_sliding_window=change.group.lifetime.window or None if change.group else None,
    )


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
