"""The events of a response in the background, kept so that a client can come back to them.

Owns: events by their sequence numbers, and readers that wait for the next.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.types import Send

from engine.errors import RequestRejected
from server.edge.error_replies import ErrorReply
from server.edge.http.edge import Edge
from server.reply.generate.sse import Framing, StreamedResponse, named_event


def _outside(error: ErrorReply) -> list[dict[str, Any]]:
    """An event outside of the numbered ones: the response itself has not failed."""
    return [{"type": "error", "code": error.code, "message": error.message, "param": error.param}]


_FRAMING = Framing(event=named_event, failed=_outside)


class EventLog:
    """Framed events from number `first` on. Readers take them at their own pace."""

    def __init__(self) -> None:
        self.first = 0
        self.num_bytes = 0
        self.is_over = False
        self._events: list[bytes] = []
        self._changed = asyncio.Event()

    def add(self, events: Sequence[dict[str, Any]]) -> None:
        """Add the events that follow on the last one."""
        new = [named_event(event) for event in events]
        self._events += new
        self.num_bytes += sum(map(len, new))
        self._wake()

    def close(self) -> None:
        """Note that there will be no further event, so that readers end."""
        self.is_over = True
        self._wake()

    def drop_half(self) -> None:
        """Forget the older half of the events."""
        num = (len(self._events) + 1) // 2
        self.num_bytes -= sum(map(len, self._events[:num]))
        del self._events[:num]
        self.first += num

    def require(self, number: int) -> None:
        """Raise RequestRejected if the event of this number is not kept any more."""
        if number < self.first:
            raise RequestRejected(
                f"the events of this response before {self.first} are not kept any more; retrieve it without"
                " stream",
                param="starting_after",
            )

    async def read(self, start: int) -> AsyncGenerator[bytes, None]:
        """Yield the events from number `start` on, several at once for a slow reader."""
        while True:
            changed = self._changed
            self.require(start)
            events = self._events[start - self.first :]
            if events:
                start += len(events)
                yield b"".join(events)
            elif self.is_over:
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class LoggedEvents(StreamedResponse):
    """Streams a log. When the client leaves, the log goes on without it."""

    def __init__(self, log: EventLog, start: int, edge: Edge) -> None:
        super().__init__(edge, _FRAMING)
        self._log = log
        self._start = start

    async def _pass_on(self, send: Send) -> bytes:
        async with aclosing(self._log.read(self._start)) as pieces:
            async for piece in pieces:
                if not self._sent_at_once(piece):
                    await self._send(send, piece)
        return b""
