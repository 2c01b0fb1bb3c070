"""The end of a connection, such that its last reply arrives.

Owns: the time between our last byte and the end of the connection; the head of a reply until its body comes.

To close a socket on which bytes lie unread, or on which more arrive, makes the kernel reset the connection,
and a reset takes back what the client has not read of the reply. So our half is closed first; what still
comes is dropped until the client has closed its own, for a second at most. Source: RFC 9112, section 9.6.

Each write to a socket wakes the client up, so that a head and a body of their own cost twice. The head waits
for what follows in this turn of the event loop.
"""

import asyncio
from collections.abc import Callable
from typing import Any

_LINGER_S = 1.0
_HEAD_BEGINS = b"HTTP/1.1 "


class LingeringTransport:
    """A transport that half-closes before it closes; all other calls go to the inner transport."""

    def __init__(self, transport: asyncio.Transport, *, may_hear_more: Callable[[], bool]) -> None:
        """`may_hear_more` is asked at the end: whether the client may be saying something."""
        self._transport = transport
        self._may_hear_more = may_hear_more
        self._is_paused = False
        self._end: asyncio.TimerHandle | None = None
        self._head = b""
        self.num_writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def is_lingering(self) -> bool:
        """Read and drop bytes that arrive now."""
        return self._end is not None

    def is_closing(self) -> bool:
        return self.is_lingering or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if self.is_lingering or not data:
            return
        self.num_writes += 1
        if data.startswith(_HEAD_BEGINS):
            self._flush()
            self._head = data
            asyncio.get_running_loop().call_soon(self._flush)
            return
        if self._head:
            data, self._head = self._head + data, b""
        self._transport.write(data)

    def _flush(self) -> None:
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head)
        self._head = b""

    def forget_connection(self) -> None:
        """Ask the connection nothing more: it is over.

        Both transports are freed with their last user; but under TLS asyncio's is two, a cycle in which
        nothing of ours is, and waits for Python's collector.
        """
        self._may_hear_more = lambda: False
        # asyncio's keeps a bound method of its own: a cycle, which stays unless it is broken here.
        getattr(self._transport, "__dict__", {}).pop("_read_ready_cb", None)

    def pause_reading(self) -> None:
        self._is_paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._transport.resume_reading()

    def close(self) -> None:
        """May be asked again."""
        self._flush()
        if self._end is not None:
            if self._transport.is_closing():  # the client has closed its half
                self._end.cancel()
        elif not self._transport.is_closing() and self._may_hear_more() and self._close_our_half():
            self._end = asyncio.get_running_loop().call_later(_LINGER_S, self._transport.close)
        else:
            self._transport.close()

    def _close_our_half(self) -> bool:
        """Half-close after all written bytes; not under TLS, which has one end for both."""
        if not self._transport.can_write_eof():
            return False
        try:
            self._transport.write_eof()
        except OSError:  # the client is gone
            return False
        if self._is_paused:
            self.resume_reading()
        return True
