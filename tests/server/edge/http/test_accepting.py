"""Places of connections, and an accept loop that stays calm when there are no descriptors."""

import asyncio
import errno
import logging
import socket
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter

from engine.logs.rare_log import RareLog
from server.edge.sockets.accepting import Acceptor, Turns, is_whole_hello
from server.edge.sockets.early_refusal import EarlyRefusal
from server.edge.sockets.places import QUIET_S, RESERVED_PLACES, Place, Places


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def taken(places: Places) -> tuple[Place, list[str]]:
    """A place, and where its end will be noted."""
    place = places.take()
    assert place is not None
    ended: list[str] = []
    place.give_way = lambda: ended.append("gave way")
    return place, ended


def test_a_quiet_connection_keeps_its_place_for_a_while_and_then_gives_it_to_a_newcomer() -> None:
    clock = Clock()
    places = Places(1, clock=clock)
    _, ended = taken(places)
    newcomer, _ = taken(places)
    assert newcomer.is_reserved
    newcomer.leave()
    assert not ended
    clock.now_s += QUIET_S
    newcomer, _ = taken(places)
    assert not newcomer.is_reserved
    assert ended
    assert len(places._taken) == 1


def test_the_one_that_has_been_quiet_for_longest_goes_first_and_one_that_asks_does_not() -> None:
    clock = Clock()
    places = Places(3, clock=clock)
    all_taken = []
    for _ in range(3):
        clock.now_s += 1.0
        all_taken.append(taken(places))
    (asking, _), (_, second), (_, third) = all_taken
    asking.busy()
    clock.now_s += QUIET_S
    taken(places)
    assert (bool(second), bool(third)) == (True, False)
    asking.quiet()  # only now: the third has been quiet for longer
    taken(places)
    assert third


def test_beyond_the_reserve_there_is_a_place_as_long_as_anybody_is_quiet() -> None:
    places = Places(2, clock=Clock())
    all_taken = [taken(places) for _ in range(2 + RESERVED_PLACES)]
    taken(places)
    assert len(places._taken) == 2 + RESERVED_PLACES
    assert [bool(ended) for _, ended in all_taken].count(True) == 1
    busy = Places(0, clock=Clock())
    for _ in range(RESERVED_PLACES):
        taken(busy)[0].busy()
    assert busy.take() is None


def test_a_place_is_given_back_once() -> None:
    places = Places(5)
    place, _ = taken(places)
    place.leave()
    place.leave()
    place.quiet()
    assert len(places._taken) == 0
    assert not places.shed()


class FullSystem:
    """A listening socket on a system without descriptors."""

    def __init__(self) -> None:
        self.own = socket.socket()
        self.num_asked = 0

    def fileno(self) -> int:
        return self.own.fileno()

    def setblocking(self, flag: bool) -> None:
        pass

    def accept(self) -> None:
        self.num_asked += 1
        raise OSError(errno.EMFILE, "too many open files")


async def test_of_a_crowd_that_speaks_at_once_a_few_begin_in_each_turn_of_the_loop() -> None:
    turns, begun = Turns(4), []

    async def begin(place: int) -> None:
        await turns.wait()
        begun.append(place)

    crowd = [asyncio.create_task(begin(place)) for place in range(40)]
    await asyncio.sleep(0)
    for place in (3, 30):
        crowd[place].cancel()
    most = 0
    while not all(each.done() for each in crowd):
        num_before = len(begun)
        await asyncio.sleep(0)
        most = max(most, len(begun) - num_before)
    assert most == 4
    assert sorted(begun) == [place for place in range(40) if place not in (3, 30)]


async def test_behind_a_crowd_both_the_newcomer_and_the_one_that_has_waited_longest_begin_soon() -> None:
    turns, begun = Turns(2), []

    async def begin(place: int) -> None:
        await turns.wait()
        begun.append(place)

    crowd = [asyncio.create_task(begin(place)) for place in range(40)]
    while not begun:
        await asyncio.sleep(0)
    crowd.append(asyncio.create_task(begin(40)))
    await asyncio.gather(*crowd)
    assert begun.index(40) < 10
    assert begun.index(5) < 20


@pytest.mark.parametrize("num_in_a_turn", [1, 2, 3])
async def test_the_first_of_a_line_begins_however_many_newcomers_each_turn_brings(num_in_a_turn: int) -> None:
    turns = Turns(num_in_a_turn)
    first = asyncio.create_task(turns.wait())
    crowd = [asyncio.create_task(turns.wait()) for _ in range(10)]
    for _ in range(10):
        crowd += [asyncio.create_task(turns.wait()) for _ in range(num_in_a_turn)]
        await asyncio.sleep(0)
    assert first.done()
    await asyncio.gather(*crowd)


def hello(num_bytes: int, *, num_in_record: int | None = None) -> bytes:
    num_in_record = num_bytes + 4 if num_in_record is None else num_in_record
    head = b"\x16\x03\x01" + num_in_record.to_bytes(2) + b"\x01" + num_bytes.to_bytes(3)
    return head + bytes(num_bytes)


@pytest.mark.parametrize("num_seen", [1, 8, 9, 208])
def test_a_handshake_waits_for_the_whole_of_the_clients_first_message(num_seen: int) -> None:
    assert not is_whole_hello(hello(200)[:num_seen])
    assert is_whole_hello(hello(200))


@pytest.mark.parametrize("seen", [b"", hello(200, num_in_record=100)[:109]])
def test_one_that_leaves_or_divides_its_first_message_gets_no_handshake(seen: bytes) -> None:
    with pytest.raises(ConnectionAbortedError):
        is_whole_hello(seen)


def test_one_that_speaks_no_tls_need_not_be_waited_for() -> None:
    assert is_whole_hello(b"GET / HTTP/1.1")


async def test_without_descriptors_it_tries_once_and_waits_and_a_silent_client_is_ended(caplog) -> None:
    places = Places(10)
    _, ended = taken(places)
    listener = FullSystem()
    server = SimpleNamespace(context=None, early=None, places=places)
    acceptor = Acceptor(server, listener)  # type: ignore[arg-type]
    acceptor.start()
    acceptor.accept_some()
    assert listener.num_asked == 1
    assert ended
    assert not asyncio.get_running_loop().remove_reader(listener.fileno())  # it does not listen meanwhile
    for _ in range(100):
        acceptor.accept_some()
    assert len(caplog.records) == 1
    acceptor.close()
    listener.own.close()


class AlwaysFull:
    """A queue without room. Each request has a body, which comes later."""

    are_likely = True

    def of_bytes(self, seen: bytes) -> EarlyRefusal | None:
        return EarlyRefusal(b"HTTP/1.1 429 X\r\n\r\n", len(seen) + 100)


class LookedAt:
    """An accept loop with two newcomers that are looked at: a silent one, and one that was just refused."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.places = Places(10)
        server = SimpleNamespace(
            context=None,
            early=AlwaysFull(),
            places=self.places,
            refused=Counter("refused", "Refused sockets.", registry=self.registry),
            new_connection=self._note_connection,
        )
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.acceptor = Acceptor(server, self._listener)  # type: ignore[arg-type]
        self.acceptor.start()
        self.silent, self.answered = self._newcomer(b""), self._newcomer(b"POST / HTTP/1.1\r\n\r\n")

    @property
    def num_refused(self) -> float | None:
        return self.registry.get_sample_value("refused_total")

    def _newcomer(self, words: bytes) -> socket.socket:
        client = socket.create_connection(self._listener.getsockname(), timeout=30)
        client.sendall(words)
        self.acceptor.accept_some()
        return client

    def _note_connection(self, place: Place | None) -> asyncio.Protocol:
        self.num_connections += 1
        return asyncio.Protocol()

    def close(self) -> None:
        for each in (self.silent, self.answered, self._listener):
            each.close()


async def test_a_look_ends_with_accepting_and_becomes_no_connection_afterwards(monkeypatch) -> None:
    monkeypatch.setattr("server.edge.sockets.early_refusal._WAIT_S", 0.02)
    looked_at = LookedAt()
    assert len(looked_at.places._taken) == 2
    looked_at.acceptor.close()
    assert len(looked_at.places._taken) == 0
    await asyncio.sleep(0.04)
    assert looked_at.num_connections == 0
    assert looked_at.silent.recv(100) == b""
    assert looked_at.answered.recv(100).startswith(b"HTTP/1.1 429")
    looked_at.close()


async def test_a_silent_newcomer_that_gives_way_counts_as_refused_and_one_that_was_answered_does_not(
    monkeypatch,
) -> None:
    monkeypatch.setattr("server.edge.sockets.early_refusal._WAIT_S", 60.0)
    monkeypatch.setattr("server.edge.sockets.early_refusal._LINGER_S", 60.0)
    looked_at = LookedAt()
    assert looked_at.num_refused == 0
    assert looked_at.places.shed()
    assert (looked_at.num_refused, looked_at.silent.recv(100)) == (1, b"")
    assert looked_at.places.shed()
    assert (looked_at.num_refused, len(looked_at.places._taken)) == (1, 0)
    looked_at.acceptor.close()
    looked_at.close()


def test_what_happens_thousands_of_times_is_a_line_with_a_number(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    rare = RareLog(logging.getLogger("rare"), logging.WARNING, "it happened %d times", clock=clock)
    for _ in range(1000):
        rare.note()
    clock.now_s += 10.0
    rare.note()
    assert [record.getMessage() for record in caplog.records] == [
        "it happened 1 times",
        "it happened 1000 times",
    ]
