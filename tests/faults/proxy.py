"""A load balancer as small as one can be honest: bytes back and forth, to whoever says that it is ready.

Owns: round robin over replicas, a probe of /health/ready a few times a second, retries of connections.
Never: reads what it carries: as a cluster's Service does, it pins a client's connection to one replica.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_PROBE_EVERY_S = 0.1
_CHUNK_BYTES = 65536


@dataclass
class Proxy:
    """Replicas are URLs; they may come and go at any time."""

    url: str = ""
    replicas: list[str] = field(default_factory=list)
    ready: list[str] = field(default_factory=list)
    num_connections: dict[str, int] = field(default_factory=dict)
    serving: "set[asyncio.Task[None]]" = field(default_factory=set)
    _turn: int = 0

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self.serving.add(task)
        task.add_done_callback(self.serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            for _ in range(len(self.ready)):
                self._turn += 1
                replica = self.ready[self._turn % len(self.ready)]
                with contextlib.suppress(OSError):
                    upstream, downstream = await asyncio.open_connection(*_address(replica))
                    self.num_connections[replica] = self.num_connections.get(replica, 0) + 1
                    with contextlib.closing(downstream):
                        await _join(reader, downstream, upstream, writer)
                    return

    async def watch(self) -> None:
        while True:
            self.ready = [replica for replica in list(self.replicas) if await _is_ready(replica)]
            await asyncio.sleep(_PROBE_EVERY_S)


@contextlib.asynccontextmanager
async def proxying() -> AsyncIterator[Proxy]:
    proxy = Proxy()
    listener = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    watching = asyncio.create_task(proxy.watch())
    try:
        yield proxy
    finally:
        listener.close()
        for task in (watching, *proxy.serving):
            task.cancel()
        await asyncio.gather(watching, *proxy.serving, return_exceptions=True)


async def _join(
    client: asyncio.StreamReader,
    server: asyncio.StreamWriter,
    answers: asyncio.StreamReader,
    back: asyncio.StreamWriter,
) -> None:
    """Until either side closes; what was read is still delivered."""
    ways = [asyncio.create_task(_pipe(client, server)), asyncio.create_task(_pipe(answers, back))]
    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    for way in ways:
        way.cancel()
    await asyncio.gather(*ways, return_exceptions=True)


async def _pipe(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await source.read(_CHUNK_BYTES):
            target.write(piece)
            await target.drain()


async def _is_ready(replica: str) -> bool:
    """Ask as a probe does: a status line, soon, or no."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(1):
            reader, writer = await asyncio.open_connection(*_address(replica))
            with contextlib.closing(writer):
                writer.write(b"GET /health/ready HTTP/1.1\r\nHost: probe\r\nConnection: close\r\n\r\n")
                return b" 200 " in await reader.readline()
    return False


def _address(replica: str) -> tuple[str, int]:
    parts = urlsplit(replica)
    assert parts.hostname
    assert parts.port
    return parts.hostname, parts.port
