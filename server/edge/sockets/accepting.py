"""Sockets of clients, from the listening socket to a connection.

Owns: the accept loop, the TLS handshakes under way, and the pause while there are no descriptors.

The loop of asyncio accepts as many sockets in a turn as the kernel may queue. When descriptors run out, it
logs an error with its stack for each of these turns. This one accepts a few, and waits.
"""

import asyncio
import logging
import socket
import ssl
from asyncio import sslproto
from collections import deque
from functools import partial
from typing import Any

import uvicorn
from prometheus_client import Counter

from engine.logs.rare_log import RareLog
from server.edge.sockets.early_refusal import EarlyRefusals, FirstLook, FirstLooks
from server.edge.sockets.places import Place, Places

log = logging.getLogger(__name__)

_AT_ONCE = 16
"""Sockets accepted in one turn of the event loop: streams have their turn between them."""
_PAUSE_S = 0.1
"""Seconds without accepting after the system had no descriptor or memory for a socket."""
HANDSHAKE_TIMEOUT_S = 10.0
_RESERVED_HANDSHAKE_TIMEOUT_S = 2.0
HANDSHAKES_IN_A_TURN = 4
"""TLS handshakes that begin in one turn of the event loop: each takes a millisecond or two of processor time,
and thousands of clients may speak at once."""
_HANDSHAKE_RECORD = 22
_HELLO_HEAD_BYTES = 9
"""Bytes of the heads of the record and of the message in it."""
_MAX_HELLO_BYTES = 16 * 1024 + 5
_FIRST_LOOK_S, _MAX_LOOK_S = 0.002, 0.25
_GOODBYE_S = 5.0
"""Seconds in which a client may confirm the end of an encrypted connection."""
ENCRYPTED_READ_BYTES = 32 * 1024
"""Buffer of a connection under TLS, from the beginning of its handshake to its end; a record has 16 KiB."""
# asyncio's is of 256 KiB, and cleared, so that all of it is taken from the system: one GiB for a crowd. It is
# made with the connection, so the class is changed, for the whole process (docs/decisions/python-objects.md).
sslproto.SSLProtocol.max_size = ENCRYPTED_READ_BYTES


class ClientServer(uvicorn.Server):
    """uvicorn's server with an accept loop of ours. The protocol of its configuration takes a `place`."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        max_connections: int,
        refused: Counter,
        context: ssl.SSLContext | None = None,
        early: EarlyRefusals | None = None,
    ) -> None:
        """Count refusals in `refused`. With `context`, connections begin with a handshake.

        Without one, `early` may refuse requests before there is a connection.
        """
        super().__init__(config)
        self.early = early if context is None else None
        self.context = context
        self.refused = refused
        self.places = Places(max_connections)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving the given sockets."""
        await self.lifespan.startup()
        acceptors = [Acceptor(self, listener) for listener in sockets or ()]
        for each in acceptors:
            each.start()
        # uvicorn only closes them.
        self.servers = acceptors  # type: ignore[assignment]
        self.started = True

    def new_connection(self, place: Place | None) -> asyncio.Protocol:
        """Make the protocol of a socket that has a place, or of one that is to be refused."""
        protocol: Any = self.config.http_protocol_class
        made: asyncio.Protocol = protocol(self.config, self.server_state, self.lifespan.state, place=place)
        return made


class Turns:
    """A line that lets a few pass in each turn of the event loop.

    Passes go by turns to the one that has waited for longest and to the one that came last: a newcomer, a
    probe say, does not wait for thousands that speak at once, and none of these waits for ever.
    """

    def __init__(self, num_in_a_turn: int) -> None:
        self._num_in_a_turn = num_in_a_turn
        self._num_passed = 0
        self._line: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return when it is this one's turn. One that is cancelled leaves the line."""
        loop = asyncio.get_running_loop()
        if not self._line:
            loop.call_soon(self._let_pass)
        passed = loop.create_future()
        self._line.append(passed)
        await passed

    def _let_pass(self) -> None:
        num_left = self._num_in_a_turn
        while self._line and num_left:
            # Counted over all turns of the loop: of a single pass in each, every other goes to the oldest.
            passed = self._line.pop() if self._num_passed % 2 else self._line.popleft()
            if not passed.done():  # cancelled
                passed.set_result(None)
                self._num_passed += 1
                num_left -= 1
        if self._line:
            asyncio.get_running_loop().call_soon(self._let_pass)


class Acceptor:
    """The accept loop of one listening socket."""

    def __init__(self, server: ClientServer, listener: socket.socket) -> None:
        self._server = server
        self._listener = listener
        self._context = server.context
        self._loop = asyncio.get_running_loop()
        self._places = server.places
        self._looks = None if server.early is None else FirstLooks(server.early, server.refused)
        self._handshakes = Turns(HANDSHAKES_IN_A_TURN)
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._no_files = RareLog(log, logging.ERROR, "no descriptor for a connection, %d times")

    def start(self) -> None:
        self._listener.setblocking(False)  # noqa: FBT003 (the standard library's own signature)
        self._resume()

    def close(self) -> None:
        """Accept no more. Connections go on; handshakes and first looks under way end."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
        if self._looks is not None:
            self._looks.close()
        for each in tuple(self._opening):
            each.cancel()

    async def wait_closed(self) -> None:
        """Wait for the handshakes to end."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def accept_some(self) -> None:
        """Accept a few sockets: called when there is one."""
        for _ in range(_AT_ONCE):
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._no_files.note()
                self._places.shed()
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(_PAUSE_S, self._resume)
                return
            self._take(client)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self.accept_some)

    def _take(self, client: socket.socket) -> None:
        place = self._places.take()
        if place is None and self._context is not None:
            # Before its handshake, which costs more than any answer.
            self._server.refused.inc()
            client.close()
            return
        client.setblocking(False)  # noqa: FBT003 (the standard library's own signature)
        looks = self._looks
        if looks is None or place is None or place.is_reserved or not looks.refusals.are_likely:
            self._begin(client, place)
        else:
            FirstLook(client, place, looks, on_request=partial(self._begin, client, place))

    def _begin(self, client: socket.socket, place: Place | None) -> None:
        opening = self._loop.create_task(self._open(client, place))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        if place is not None and place.give_way is None:
            place.give_way = partial(self._end, opening)

    def _end(self, opening: "asyncio.Task[None]") -> None:
        """End a handshake, so that a new socket has its place."""
        self._server.refused.inc()
        opening.cancel()

    async def _open(self, client: socket.socket, place: Place | None) -> None:
        """Make a connection of a socket; under TLS, after the handshake."""
        is_open = False
        is_reserved = place is not None and place.is_reserved
        timeout_s = _RESERVED_HANDSHAKE_TIMEOUT_S if is_reserved else HANDSHAKE_TIMEOUT_S
        try:
            if self._context is not None:
                async with asyncio.timeout(timeout_s):
                    await self._hear(client)
                    await self._handshakes.wait()
            await self._loop.connect_accepted_socket(
                lambda: self._server.new_connection(place),
                client,
                ssl=self._context,
                ssl_handshake_timeout=None if self._context is None else timeout_s,
                ssl_shutdown_timeout=None if self._context is None else _GOODBYE_S,
            )
            is_open = True
        except (TimeoutError, OSError):
            pass  # a client that speaks no TLS, or left
        finally:
            if not is_open:
                client.close()
                if place is not None:
                    place.leave()

    async def _hear(self, client: socket.socket) -> None:
        """Wait for a whole ClientHello, and leave it unread: one that is silent or slow costs no turn."""
        heard = self._loop.create_future()
        self._loop.add_reader(client, _wake, heard)
        try:
            await heard
        finally:
            self._loop.remove_reader(client)
        pause_s = _FIRST_LOOK_S
        while not is_whole_hello(client.recv(_MAX_HELLO_BYTES, socket.MSG_PEEK)):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_LOOK_S)


def _wake(heard: "asyncio.Future[None]") -> None:
    """Set the result once: a reader is called until it is removed."""
    if not heard.done():
        heard.set_result(None)


def is_whole_hello(seen: bytes) -> bool:
    """Return True if a handshake can begin with these bytes. Raises ConnectionAbortedError if none ever can.

    A ClientHello that is divided into several records is refused: no usual client sends one, and its last
    piece could come from thousands at once. Source: RFC 8446, sections 4 and 5.1.
    """
    if not seen:
        raise ConnectionAbortedError
    if seen[0] != _HANDSHAKE_RECORD:
        return True  # no TLS, which costs nothing
    if len(seen) < _HELLO_HEAD_BYTES:
        return False
    num_in_record, num_in_hello = int.from_bytes(seen[3:5]), int.from_bytes(seen[6:9])
    if num_in_record < num_in_hello + 4:
        raise ConnectionAbortedError
    return len(seen) >= num_in_record + 5
