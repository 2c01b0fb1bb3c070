"""A cable between two addresses of this machine that can be pulled out and put in again.

Owns: connections, and the bytes that wait while it is out: neither end is told, as with a real one.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

_CHUNK_BYTES = 65536


class Relay:
    """A relay from `address` and `port` to another address, from `relaying`."""

    address, port = "127.0.0.2", 0

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._serving: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        self._is_whole.clear()

    def mend(self) -> None:
        self._is_whole.set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a connection both ways until either end closes it."""
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
            await self._is_whole.wait()
            back, forth = await asyncio.open_connection(*self._target)
            ways = [asyncio.create_task(self._carry(*way)) for way in ((reader, forth), (back, writer))]
            self._serving |= set(ways)
            with contextlib.closing(forth):
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await source.read(_CHUNK_BYTES):
                await self._is_whole.wait()
                target.write(piece)
                await target.drain()

    def close(self) -> None:
        for task in self._serving:
            task.cancel()


@contextlib.asynccontextmanager
async def relaying(target: tuple[str, int]) -> AsyncIterator[Relay]:
    relay = Relay(target)
    listener = await asyncio.start_server(relay.accept, relay.address, 0)
    relay.port = listener.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        listener.close()
        relay.close()
