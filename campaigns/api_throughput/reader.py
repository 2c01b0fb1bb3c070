"""All clients of a run in one process: plain sockets, no parser, as little as a token can cost.

    python -m campaigns.api_throughput.reader PORT SERVER_PID PATH BODIES_FILE

Reads every stream to its end and prints what came, as JSON. All tokens of a run are alike, so that the length
of the text tells how many there are.

Owns: the sockets, and the clock of each arrival.
Never: what was sent when (stand_in.py), or what follows from both (result.py).
"""

import re
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from campaigns.servers.processes import processor_s

_TEXT = re.compile(rb'"(?:text|content)":"([^"]*)"')
_DONE = b"data: [DONE]"
_BUFFER_BYTES = 1 << 18
_STALLED_S = 30.0


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """Text that came with one read of a socket."""

    time_s: float
    num_chars: int
    num_chunks: int


class Readings(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of all streams of a run. Times are of time.monotonic, which all processes share."""

    streams: list[list[Arrival]]
    ended_s: float
    processor_s: float
    """Used by the server's process until then."""


class StreamFailed(Exception):
    """A stream did not begin, or did not end as it should."""


@dataclass(slots=True)
class _Stream:
    connection: socket.socket
    tail: bytes = b""
    """An event of which only the beginning has come."""
    arrivals: list[Arrival] = field(default_factory=list)

    def take(self, data: bytes) -> bool:
        """Return whether this was the end."""
        *events, self.tail = (self.tail + data).split(b"\n\n")
        texts = [text for event in events for text in _TEXT.findall(event) if text]
        if texts:
            num_chars = sum(map(len, texts))
            self.arrivals.append(Arrival(time.monotonic(), num_chars, len(texts)))
        return any(event.endswith(_DONE) for event in events)


def read(port: int, server_pid: int, path: str, bodies: list[bytes]) -> Readings:
    """Send all requests at once and read their streams to the end. Raises StreamFailed."""
    with selectors.DefaultSelector() as selector:
        streams = [_Stream(_ask(port, path, body)) for body in bodies]
        for stream in streams:
            selector.register(stream.connection, selectors.EVENT_READ, stream)
        while selector.get_map():
            ready = selector.select(_STALLED_S)
            if not ready:
                raise StreamFailed(f"{len(selector.get_map())} streams stand still")
            for key, _ in ready:
                stream = key.data
                data = stream.connection.recv(_BUFFER_BYTES)
                if not data:
                    raise StreamFailed(f"a stream has no end; its last words: {stream.tail[-200:]!r}")
                if stream.take(data):
                    selector.unregister(stream.connection)
                    stream.connection.close()
        return Readings(
            streams=[stream.arrivals for stream in streams],
            ended_s=time.monotonic(),
            processor_s=processor_s(server_pid),
        )


def _ask(port: int, path: str, body: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


if __name__ == "__main__":
    port, server_pid, path, bodies = sys.argv[1:5]
    lines = Path(bodies).read_bytes().splitlines()
    sys.stdout.buffer.write(msgspec.json.encode(read(int(port), int(server_pid), path, lines)))
