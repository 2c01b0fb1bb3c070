"""Probes on a port of their own, while the event loop of the API does what it should not."""

import asyncio
import contextlib
import dataclasses
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.types import EngineState, Health
from server.api.operations.ops import HealthPage
from server.edge.http.health_listener import HealthListener
from server.edge.http.listening import listen
from tests.server.fake_engine import READY

LOADING = dataclasses.replace(
    READY, state=EngineState.LOADING, detail="reading weights", progress=0.25, num_steps=0
)
BLOCKED_S = 1.5


class Asked:
    """A listener and who asks it; health is what the test says."""

    def __init__(self, listener: socket.socket, heartbeat_timeout_s: float) -> None:
        self.port = listener.getsockname()[1]
        self.health = READY
        self._listener = HealthListener(listener, self._judge, heartbeat_timeout_s=heartbeat_timeout_s)
        self._listener.start()

    def _judge(self) -> Health:
        return self.health

    def close(self) -> None:
        self._listener.close()

    def get(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        """Blocks: for another thread, if the event loop is to go on."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()


@contextlib.contextmanager
def listening(heartbeat_timeout_s: float = 60.0) -> Iterator[Asked]:
    asked = Asked(listen("127.0.0.1", 0), heartbeat_timeout_s)
    try:
        yield asked
    finally:
        asked.close()


@pytest.mark.parametrize(
    ("health", "ready", "live"),
    [
        (READY, 200, 200),
        (LOADING, 503, 200),
        (dataclasses.replace(READY, state=EngineState.DRAINING), 503, 200),
        (dataclasses.replace(READY, is_live=False), 503, 503),
    ],
)
async def test_it_says_what_the_main_port_says(client, engine, health, ready, live) -> None:
    with listening() as asked:
        asked.health = engine.state = health
        for path, status in (("/health", ready), ("/health/ready", ready), ("/health/live?a", live)):
            assert asked.get(path)[0] == status
            assert asked.get(path)[1] == (await client.get(path)).content
            assert asked.get(path, "HEAD") == (status, b"")
        HealthPage.model_validate_json(asked.get("/health")[1], strict=True)


class Prober(threading.Thread):
    """Asks all the time, as nothing else runs in its way."""

    def __init__(self, asked: Asked, path: str) -> None:
        super().__init__()
        self._asked, self._path = asked, path
        self._is_over = False
        self.took_s: list[float] = []
        self.statuses: list[int] = []
        self.bodies: list[bytes] = []

    def run(self) -> None:
        while not self._is_over:
            asked_s = time.monotonic()
            status, body = self._asked.get(self._path)
            self.took_s.append(time.monotonic() - asked_s)
            self.statuses.append(status)
            self.bodies.append(body)
            time.sleep(0.02)

    def finish(self) -> None:
        self._is_over = True
        self.join()


def block_loop(seconds: float) -> None:
    """Compute without giving way, as a handler never may."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        sum(range(1000))


async def test_it_answers_while_the_event_loop_is_blocked() -> None:
    with listening() as asked:
        await asyncio.sleep(0.05)
        prober = Prober(asked, "/health/live")
        prober.start()
        block_loop(BLOCKED_S)
        prober.finish()
    assert set(prober.statuses) == {200}
    assert len(prober.took_s) > 10
    assert sorted(prober.took_s)[len(prober.took_s) // 2] < 0.3, "0.02 s on an idle machine"


async def test_an_event_loop_that_stands_still_is_not_alive() -> None:
    with listening(heartbeat_timeout_s=0.5) as asked:
        await asyncio.sleep(0.05)
        prober = Prober(asked, "/health/live")
        prober.start()
        block_loop(BLOCKED_S)
        await asyncio.sleep(0.6)
        prober.finish()
    assert prober.statuses[0] == 200
    assert 503 in prober.statuses
    assert prober.statuses[-1] == 200, "and when it turns again, it is"
    assert any(b"the event loop of the API has not moved" in body for body in prober.bodies)


@pytest.mark.parametrize(
    ("asked_for", "status"),
    [
        (b"GET /v1/models HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /health HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /health\r\n\r\n", b"400"),
        (b"\x16\x03\x01 \xff\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.0\r\nHost: x\r\n\r\n", b"200"),
        (b"GET /health HTTP/1.1\r\nX: " + b"x" * 70_000, b""),
    ],
)
def test_it_answers_nothing_but_probes(asked_for, status) -> None:
    async def ask() -> bytes:
        with listening() as asked:
            reader, writer = await asyncio.open_connection("127.0.0.1", asked.port)
            with contextlib.closing(writer):
                writer.write(asked_for)
                with contextlib.suppress(ConnectionError):
                    return await reader.read()
        return b""

    assert asyncio.run(ask())[9:12] == status


async def test_the_silent_for_longest_gives_way_to_a_probe() -> None:
    with listening() as asked, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", asked.port))) for _ in range(80)]
        silent[0].settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""
        for _ in range(10):
            assert asked.get("/health")[0] == 200


async def test_probes_are_answered_beside_silent_clients_that_come_again() -> None:
    over = threading.Event()

    def come_again(port: int) -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as silent:
                silent.settimeout(0.5)
                silent.recv(1)

    with listening() as asked, ThreadPoolExecutor(100) as crowd:
        for _ in range(100):
            crowd.submit(come_again, asked.port)
        await asyncio.sleep(0.5)
        try:
            assert [asked.get("/health/live")[0] for _ in range(30)] == [200] * 30
        finally:
            over.set()
