"""The difference between clients that have sent everything and still listen, and clients that have left.

Owns: the time after the end of a client's bytes, while a request of theirs is under way.

Both look the same: the client's half of the connection is closed. The kernel of a client that has left
answers our next bytes with a reset. So bytes are sent that mean nothing, an interim response (102), and the
state of the socket is looked at. HTTP/1.0 has no interim responses: there the kernel asks, and notices a
client that has left once its own kernel has forgotten it, after a minute in Linux. Where the reply has begun,
it has a second to say something itself.
Source: RFC 9110, section 15.2; RFC 9112, section 9.6; RFC 9293, sections 3.6 and 3.8.4.
"""

import asyncio
import socket
from collections.abc import Callable

_FIRST_LOOK_S = 0.01
_MAX_LOOK_S = 16.0
_SILENT_S = 1.0
"""Seconds in which a client that cannot be asked counts as present, although nothing was sent to it."""
_CLOSE_WAIT = 8  # of the kernel's enumeration, include/net/tcp_states.h in Linux


class HalfClosed:
    """The watch over one client. It ends with `stop`, or by one call of `on_left`."""

    def __init__(
        self,
        client: socket.socket,
        *,
        ask: Callable[[], bool],
        num_writes: Callable[[], int],
        on_left: Callable[[], None],
    ) -> None:
        """Begin. `ask` sends bytes that mean nothing, or lets the kernel ask; False if it cannot."""
        self._client = client
        self._ask = ask
        self._num_writes = num_writes
        self._on_left = on_left
        self._num_before = num_writes()
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._pause_s = _FIRST_LOOK_S
        self._is_asked = ask()
        self._timer = self._loop.call_later(self._pause_s, self._look)

    def stop(self) -> None:
        """End the watch; may be called twice."""
        self._timer.cancel()

    def _look(self) -> None:
        waited_s = self._loop.time() - self._began_s
        is_unknown = not self._is_asked and self._num_writes() == self._num_before and waited_s >= _SILENT_S
        if is_unknown or not _is_there(self._client):
            self._on_left()
            return
        if waited_s >= _SILENT_S:
            self._ask()
        self._pause_s = min(2 * self._pause_s, _MAX_LOOK_S)
        self._timer = self._loop.call_later(self._pause_s, self._look)


def let_kernel_ask(client: socket.socket) -> None:
    """Send segments without data, which only a client that has left answers by a reset."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        client.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def can_watch(client: socket.socket) -> bool:
    """Return True if the system shows the state of this socket."""
    return client.family in (socket.AF_INET, socket.AF_INET6)


def _is_there(client: socket.socket) -> bool:
    try:
        return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSE_WAIT
    except OSError:
        return False
