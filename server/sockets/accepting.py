"""Sockets of clients, from the listening socket to a connection.

Owns: the accept loop, the TLS handshakes under way, and the pause while there are no descriptors.
Never: the number of places (places.py), or HTTP (connections.py).

The loop of asyncio accepts as many sockets in a turn as the kernel may queue. When descriptors run out, it
logs an error with its stack for each of these turns. This one accepts a few, and waits.
"""

import asyncio
import logging
import socket
import ssl
from functools import partial
from typing import Any

import uvicorn
from prometheus_client import Counter

from server.sockets.places import Place, Places
from server.sockets.rare_log import RareLog

log = logging.getLogger(__name__)

_AT_ONCE = 16
"""Sockets accepted in one turn of the event loop: streams have their turn between them."""
_PAUSE_S = 0.1
"""Seconds without accepting after the system had no descriptor or memory for a socket."""
HANDSHAKE_TIMEOUT_S = 10.0
_RESERVED_HANDSHAKE_TIMEOUT_S = 2.0
_GOODBYE_S = 5.0
"""Seconds in which a client may confirm the end of an encrypted connection."""


class ClientServer(uvicorn.Server):
    """uvicorn's server with an accept loop of ours. The protocol of its configuration takes a `place`."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        max_connections: int,
        refused: Counter,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """Count refusals in `refused`. With `context`, connections begin with a handshake."""
        super().__init__(config)
        self.context = context
        self.refused = refused
        self.places = Places(max_connections)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving the given sockets."""
        await self.lifespan.startup()
        acceptors = [Acceptor(self, listener) for listener in sockets or ()]
        for each in acceptors:
            each.start()
        # uvicorn closes them, and asks nothing else of them.
        self.servers = acceptors  # type: ignore[assignment]
        self.started = True

    def new_connection(self, place: Place | None) -> asyncio.Protocol:
        """Make the protocol of a socket that has a place, or of one that is to be refused."""
        protocol: Any = self.config.http_protocol_class
        made: asyncio.Protocol = protocol(self.config, self.server_state, self.lifespan.state, place=place)
        return made


class Acceptor:
    """The accept loop of one listening socket."""

    def __init__(self, server: ClientServer, listener: socket.socket) -> None:
        self._server = server
        self._listener = listener
        self._context = server.context
        self._loop = asyncio.get_running_loop()
        self._places = server.places
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._no_files = RareLog(log, logging.ERROR, "no descriptor for a connection, %d times")

    def start(self) -> None:
        self._listener.setblocking(False)  # noqa: FBT003 (the standard library's own signature)
        self._resume()

    def close(self) -> None:
        """Accept no more. Connections go on; handshakes under way end."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
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
        opening = self._loop.create_task(self._open(client, place))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        if place is not None and place.give_way is None:
            place.give_way = partial(self._end, opening)

    def _end(self, opening: "asyncio.Task[None]") -> None:
        """End a handshake, for the sake of a newcomer."""
        self._server.refused.inc()
        opening.cancel()

    async def _open(self, client: socket.socket, place: Place | None) -> None:
        """Make a connection of a socket; under TLS, after the handshake."""
        is_open = False
        is_reserved = place is not None and place.is_reserved
        timeout_s = _RESERVED_HANDSHAKE_TIMEOUT_S if is_reserved else HANDSHAKE_TIMEOUT_S
        try:
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
