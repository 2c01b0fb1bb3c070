"""A look at the request of a newcomer, while most are refused, before it costs a connection.

Owns: a socket from its acceptance until its request has been refused, or until it becomes a connection.
Never: which request is refused (server/reply/generate/full_queue.py), or reads a byte of one that is not.

Under a crowd, transport, parser and timers of a connection are most of what a refusal costs. Here its bytes
are only looked at, and stay in the kernel for the connection if there is to be one.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import NamedTuple, Protocol

from prometheus_client import Counter

from server.edge.sockets.places import Place

_MAX_LOOK_BYTES = 8 * 1024
"""Bytes of a head that are looked at; with a larger one it becomes a connection."""
_MAX_DROP_BYTES = 64 * 1024
_WAIT_S = 0.25
"""Seconds in which the first bytes may come; then it becomes a connection, which has its own limits."""
_LINGER_S = 1.0
"""Seconds in which the client may go on sending after its refusal: see lingering_close.py."""


class EarlyRefusal(NamedTuple):
    """Refusal of a request whose head is known."""

    reply: bytes
    num_bytes: int
    """Bytes of the whole request, its body included."""


class EarlyRefusals(Protocol):
    """Decision about heads that were not parsed yet."""

    @property
    def are_likely(self) -> bool:
        """Whether looking at a newcomer's head is worth it."""

    def of_bytes(self, seen: bytes) -> EarlyRefusal | None:
        """Refuse the request that begins with these bytes; None: it has to become a connection."""


class FirstLooks:
    """Looks at the newcomers of one listening socket."""

    def __init__(self, refusals: EarlyRefusals, refused: Counter) -> None:
        """Count in `refused` sockets that gave way to others before they were answered."""
        self.refusals = refusals
        self.refused = refused
        self.under_way: set[FirstLook] = set()
        """Looks that wait for bytes of the client, those after a refusal too."""

    def close(self) -> None:
        """End the looks under way; their sockets are closed."""
        for each in tuple(self.under_way):
            each.end()


class FirstLook:
    """The look at one socket, which is not blocking. Ends with a refusal, or with `on_request`."""

    def __init__(
        self, client: socket.socket, place: Place, looks: FirstLooks, on_request: Callable[[], None]
    ) -> None:
        """Begin. The look may have ended already when this returns."""
        self._client = client
        self._place = place
        self._looks = looks
        self._is_answered = False
        self._on_request = on_request
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def _look(self) -> None:
        try:
            seen = self._client.recv(_MAX_LOOK_BYTES, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            self._watch(self._look, _WAIT_S, self._hand_over)
            return
        except OSError:  # it has left
            self.end()
            return
        try:
            refusal = self._looks.refusals.of_bytes(seen)
        except Exception:
            self.end()
            raise
        if refusal is None:
            self._hand_over()
        else:
            self._refuse(refusal, num_here=len(seen))

    def _hand_over(self) -> None:
        self._stop_watching()
        self._place.give_way = None
        self._on_request()

    def _refuse(self, refusal: EarlyRefusal, *, num_here: int) -> None:
        self._stop_watching()
        try:
            self._client.recv(num_here)
            self._client.send(refusal.reply)
            self._is_answered = True
            if num_here == refusal.num_bytes:
                self.end()
                return
            self._client.shutdown(socket.SHUT_WR)  # to close now would take the reply back
        except OSError:
            self.end()
            return
        self._watch(self._drop, _LINGER_S, self.end)

    def _drop(self) -> None:
        """Drop bytes that are sent after the refusal, until the client has read it and closes its half."""
        try:
            if self._client.recv(_MAX_DROP_BYTES):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        self.end()

    def _give_way(self) -> None:
        """End, so that a new socket has this place."""
        if not self._is_answered:
            self._looks.refused.inc()
        self.end()

    def _watch(self, on_bytes: Callable[[], None], wait_s: float, on_late: Callable[[], None]) -> None:
        if self._timer is None:
            self._place.give_way = self._give_way
            self._looks.under_way.add(self)
            self._loop.add_reader(self._client, on_bytes)
            self._timer = self._loop.call_later(wait_s, on_late)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._loop.remove_reader(self._client)
            self._looks.under_way.discard(self)

    def end(self) -> None:
        """Close the socket and give its place back."""
        self._stop_watching()
        with contextlib.suppress(OSError):
            self._client.close()
        self._place.leave()
