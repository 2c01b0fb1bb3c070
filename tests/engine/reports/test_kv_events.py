"""KV events on the wire: what a router rebuilds from them is what the prefix caches have."""

import random
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from campaigns.servers.free_ports import free_ports
from engine.options.api_keys import is_private
from engine.options.declaration import OptionError
from engine.options.engine_split import KVEventsConfig
from engine.reports import kv_publisher
from engine.reports.kv_publisher import KVPublisher, SharedBlocks, block_hash
from scheduler.config import SchedulerConfig
from scheduler.messages import ModelRunnerOutput, SamplingParams, SequenceId, SequenceInputs, ServiceTerms
from scheduler.prefix_keys import (
    ChangeKind,
    JournalContent,
    PrefixChange,
    PrefixJournal,
    block_key,
    root_key,
)
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from tests.invariants import published

CONFIG = SchedulerConfig(
    max_num_seqs=4, max_num_batched_tokens=64, num_blocks=24, block_size=4, max_model_len=64, max_adapters=2
)
TOPIC = b"kv@127.0.0.1:8000@tiny"
PRIVATE = f"{7:064x}/mine"
ADAPTER = "poet@1f2e"


class Reader:
    """A router's index, from the wire alone. It loses messages, and asks for what it missed."""

    def __init__(self, port: int, *, losses: float) -> None:
        self._losses = losses
        self._rng = random.Random(3)
        self._context = zmq.Context()
        self._in = self._context.socket(zmq.SUB)
        self._in.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self._in.connect(f"tcp://127.0.0.1:{port}")
        self._ask = self._context.socket(zmq.DEALER)
        self._ask.rcvhwm = 1  # a reader that is slow
        self._ask.connect(f"tcp://127.0.0.1:{port + 1}")
        self._key_of_hash: dict[int, bytes] = {}
        self.keys: set[bytes] = set()
        self.num_taken = self.num_lost = self.num_replayed = 0

    def close(self) -> None:
        self._context.destroy(linger=0)

    def read(self) -> None:
        while self._in.poll(0):
            topic, number, batch = self._in.recv_multipart()
            assert topic == TOPIC
            if self._rng.random() < self._losses:
                self.num_lost += 1
                continue
            if int.from_bytes(number, "big") > self.num_taken:
                self.catch_up()
            elif int.from_bytes(number, "big") == self.num_taken:
                self.take(batch)

    def catch_up(self) -> None:
        for number, batch in self.ask(self.num_taken):
            assert number == self.num_taken
            self.num_replayed += 1
            self.take(batch)

    def ask(self, first: int) -> list[tuple[int, bytes]]:
        """All batches from a number on."""
        self._ask.send_multipart((b"", first.to_bytes(8, "big")))
        batches = []
        while True:
            assert self._ask.poll(20_000)
            empty, topic, number, batch = self._ask.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert topic == batch == b""
                return batches
            assert topic == TOPIC
            batches.append((int.from_bytes(number, "big"), batch))

    def take(self, batch: bytes) -> None:
        self.num_taken += 1
        _, events = msgspec.msgpack.decode(batch)
        for event in events:
            if event["type"] == "BlockStored":
                self._store(event)
            elif event["type"] == "BlockRemoved":
                for each in event["block_hashes"]:
                    self.keys.remove(self._key_of_hash[each])
            else:
                assert event == {"type": "AllBlocksCleared"}
                self.keys.clear()

    def _store(self, event: dict) -> None:
        """The key is computed from tokens, parent, salt and adapter: all of them must be right."""
        (number,), parent = event["block_hashes"], event["parent_block_hash"]
        (extra_keys,) = event.get("extra_keys", [[]])
        assert len(event["token_ids"]) == event["block_size"] == CONFIG.block_size
        if event["lora_name"] is not None:
            assert extra_keys.pop(0) == event["lora_name"] == "poet"
        adapter = "" if event["lora_name"] is None else ADAPTER
        salt = extra_keys.pop() if extra_keys else ""
        assert not extra_keys
        assert not is_private(salt)
        assert parent is None or not salt, "a salt is of the first block"
        root = root_key(salt, adapter) if parent is None else self._key_of_hash[parent]
        key = block_key(root, event["token_ids"])
        assert block_hash(key) == number
        assert key not in self.keys
        self._key_of_hash[number] = key
        self.keys.add(key)


class Engine:
    """A scheduler under random requests."""

    def __init__(self, rng: random.Random) -> None:
        self.scheduler = Scheduler(CONFIG)
        self.journal = self.scheduler.kv.index.main_cache.journal = PrefixJournal(JournalContent.TOKENS)
        self._rng = rng
        self._num = 0
        self.private: set[bytes] = set()

    def step(self) -> list[PrefixChange]:
        if self._rng.random() < 0.3:
            self._num += 1
            tokens = tuple(self._rng.choice((1, 2)) for _ in range(self._rng.randrange(1, 30)))
            params = SamplingParams(max_tokens=self._rng.randrange(1, 20))
            terms = ServiceTerms(cache_salt=self._rng.choice(("", "", "salt", PRIVATE)))
            inputs = SequenceInputs(adapter=self._rng.choice(("", "", ADAPTER)))
            seq = Sequence(SequenceId(self._num), tokens, params, terms, inputs=inputs)
            self.scheduler.add_request(seq, now_s=0.0)
        if self._rng.random() < 0.002:
            self.scheduler.reset_prefix_cache()
        plan = self.scheduler.schedule(now_s=0.0)
        sampled = {share.sequence_id: (1,) for share in plan.scheduled if share.samples}
        if not plan.is_empty:
            result = ModelRunnerOutput(token_ids=sampled, logprobs={}, failures={})
            self.scheduler.update_from_output(plan, result)
        changes = self.journal.take()
        self.private |= {each.key for each in changes if each.salt == PRIVATE}
        return changes

    def found(self) -> set[bytes]:
        return set(published(self.scheduler.kv.index.main_cache).values()) - self.private


@pytest.fixture
def port() -> int:
    return free_ports(2)


@pytest.fixture
def publisher(port: int) -> Iterator[KVPublisher]:
    publisher = KVPublisher(KVEventsConfig(host="127.0.0.1", port=port, topic=TOPIC.decode()))
    yield publisher
    publisher.close()


@pytest.fixture
def reader(port: int, publisher: KVPublisher) -> Iterator[Reader]:
    reader = Reader(port, losses=0.05)
    yield reader
    reader.close()


def test_an_index_rebuilt_from_the_wire_is_the_prefix_caches(reader: Reader, publisher: KVPublisher) -> None:
    rng = random.Random(7)
    engines = [Engine(rng), Engine(rng)]
    num_private = 0
    for step in range(6_000):
        number = rng.randrange(2)
        publisher.note(number, engines[number].step())
        if step % 3000 == 2999:  # an engine dies; the next one has nothing
            publisher.forget(number)
            engines[number] = Engine(rng)
        if step % 100 == 99:
            reader.read()
            reader.catch_up()
            assert reader.keys == engines[0].found() | engines[1].found(), step
            num_private = max(num_private, *(len(each.private) for each in engines))
    assert reader.num_lost > 50
    assert reader.num_replayed > 1000
    assert num_private > 50


def test_a_reader_that_comes_late_gets_all_batches_and_their_end(
    reader: Reader, publisher: KVPublisher
) -> None:
    rng = random.Random(1)
    engine = Engine(rng)
    for _ in range(9000):
        publisher.note(0, engine.step())
    reader.catch_up()
    assert reader.num_taken > 2000  # more than sockets hold by themselves
    assert reader.keys == engine.found()


def test_a_block_of_two_engines_is_stored_once_and_removed_with_the_last() -> None:
    blocks = SharedBlocks()
    key = block_key(root_key(""), [1, 2])
    stored = PrefixChange(ChangeKind.STORED, key, b"", bytes(8))
    forgotten = PrefixChange(ChangeKind.FORGOTTEN, key)
    assert len(blocks.events(0, [stored])) == 1
    assert blocks.events(1, [stored]) == []
    assert blocks.events(0, [forgotten, forgotten]) == []
    assert len(blocks.forget(1)) == 1
    assert blocks.forget(1) == []


def test_only_the_newest_batches_are_kept(
    reader: Reader, publisher: KVPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_publisher, "_MAX_KEPT", 3)
    for number in range(9):
        key = block_key(root_key(""), [number])
        publisher.note(0, [PrefixChange(ChangeKind.STORED, key, b"", bytes(4))])
    assert [number for number, _ in reader.ask(0)] == [7, 8, 9]


def test_a_question_in_another_form_is_not_answered_and_ends_nothing(reader: Reader) -> None:
    for question in ((b"", b"1"), (b"1",), (b"", bytes(2000))):
        reader._ask.send_multipart(question)
    time.sleep(0.05)
    assert len(reader.ask(0)) == 1


def test_ports_in_use_are_refused_by_their_options(port: int, publisher: KVPublisher) -> None:
    for place in (0, 1, -1):
        with pytest.raises(OptionError, match=r"port \d+: address already in use; .*--kv-events-port"):
            KVPublisher(KVEventsConfig(host="127.0.0.1", port=port + place, topic="kv@"))
