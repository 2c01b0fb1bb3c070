"""One stream after another, read by a process that does nothing else: each read has its time.

    python -m campaigns.pauses.neighbour PORT API_PID ENGINE_PID SECONDS < BODY

At each read it notes as well how long the processes have run and have waited for a core, and prints all
pauses as JSON. It has the precedence of an ordinary program, as the server has, and waits for a core like it.

Owns: the socket, the clock of each read, the counters in /proc.
Never: what the others send (cli.py), or what a pause means (places.py).
Source: Linux, Documentation/scheduler/sched-stats.rst (schedstat); proc(5).
"""

import gc
import os
import socket
import sys
import time

import msgspec

_BUFFER_BYTES = 1 << 18
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_STOLEN_FIELD = 8
"""Place in the first line of /proc/stat."""


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since some time in the past; in a pause, seconds of it."""

    reader_waited_s: float
    """Time without a core in which it could have run."""
    api_ran_s: float
    """Its main thread, in which the event loop is."""
    api_waited_s: float
    engine_ran_s: float
    """Its main thread, in which the steps are; without the threads of a product."""
    engine_waited_s: float
    stolen_s: float
    """Sum over the cores, by other virtual machines; counted in hundredths of a second."""

    def since(self, other: "Counters") -> "Counters":
        names = self.__struct_fields__
        return Counters(**{name: getattr(self, name) - getattr(other, name) for name in names})


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """From one read with an event to the next one."""

    began_s: float
    """Time by time.monotonic, which all processes share."""
    lasted_s: float
    spent: Counters

    @property
    def of_server_s(self) -> float:
        """Time in which the reader could not have read, left out."""
        return self.lasted_s - self.spent.reader_waited_s


class Readings(msgspec.Struct, frozen=True, kw_only=True):
    """Events of the neighbour, and the pauses between its reads."""

    num_events: int
    pauses: list[Pause]


class Meters:
    """Files of counters, kept open: a reading costs a few microseconds."""

    def __init__(self, api_pid: int, engine_pid: int) -> None:
        # Of a process, `schedstat` has its main thread alone.
        self._files = [
            os.open(f"/proc/{name}", os.O_RDONLY)
            for name in ("self/schedstat", f"{api_pid}/schedstat", f"{engine_pid}/schedstat", "stat")
        ]

    def read(self) -> Counters:
        reader, api, engine, machine = (
            os.pread(file, 256, 0).split(b"\n", 1)[0].split() for file in self._files
        )
        return Counters(
            reader_waited_s=int(reader[1]) / 1e9,
            api_ran_s=int(api[0]) / 1e9,
            api_waited_s=int(api[1]) / 1e9,
            engine_ran_s=int(engine[0]) / 1e9,
            engine_waited_s=int(engine[1]) / 1e9,
            stolen_s=int(machine[_STOLEN_FIELD]) * _TICK_S,
        )


class Neighbour:
    """Reads streams until its time is over."""

    def __init__(self, port: int, meters: Meters) -> None:
        self._port = port
        self._meters = meters
        self._num_events = 0
        self._pauses: list[Pause] = []

    def read(self, body: bytes, seconds: float) -> Readings:
        """Raises OSError if there is no server, or it says nothing any more."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._read_stream(body)
        return Readings(num_events=self._num_events, pauses=self._pauses)

    def _read_stream(self, body: bytes) -> None:
        with socket.create_connection(("127.0.0.1", self._port), 60.0) as connection:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
            last: tuple[float, Counters] | None = None
            while data := connection.recv(_BUFFER_BYTES):
                now_s = time.monotonic()
                if not (num_events := data.count(b"data: ")):
                    continue
                counters = self._meters.read()
                self._num_events += num_events
                if last is not None:
                    last_s, before = last
                    spent = counters.since(before)
                    self._pauses.append(Pause(began_s=last_s, lasted_s=now_s - last_s, spent=spent))
                last = now_s, counters


def main(words: list[str]) -> None:
    port, api_pid, engine_pid = map(int, words[:3])
    gc.disable()  # a search for garbage would be a pause of its own
    neighbour = Neighbour(port, Meters(api_pid, engine_pid))
    readings = neighbour.read(sys.stdin.buffer.read(), float(words[3]))
    sys.stdout.buffer.write(msgspec.json.encode(readings))


if __name__ == "__main__":
    main(sys.argv[1:])
