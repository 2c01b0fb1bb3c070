"""A client of completions that shares no code with the server or with the other client of the campaigns.

    python -m campaigns.servers.plain_client PORT MODEL OUTPUT_LEN SECONDS (rate HZ | clients N) [--seed N]

One process, blocking nowhere, a new TCP connection for each request, with the headers that common libraries
send and the body in a segment of its own. Prints what it has seen as one JSON object of lists of seconds.

Owns: connections, requests and their times. Never: the verdict (overload.py).
"""

import argparse
import json
import random
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence

_COME_AGAIN_S = 0.05
_LONGEST_S = 120.0
_READ_BYTES = 1 << 16
_WORDS = ("one", "two", "red", "blue", "tree", "house", "runs", "sees")
_HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUser-Agent: python-requests/2.32\r\n"
    "Accept-Encoding: gzip, deflate\r\nAccept: */*\r\nConnection: close\r\n"
    "Content-Length: {length}\r\nContent-Type: application/json\r\n\r\n"
)


class _Exchange:
    """One request on a connection of its own."""

    def __init__(self, port: int, body: bytes) -> None:
        self.began_s = time.perf_counter()
        self.first_s = 0.0
        self.received = bytearray()
        self._unsent = [_HEAD.format(port=port, length=len(body)).encode(), body]
        self.socket = socket.socket()
        self.socket.setblocking(False)  # noqa: FBT003 -- the standard library's own signature
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.connect_ex(("127.0.0.1", port))

    @property
    def events(self) -> int:
        return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ

    def go_on(self) -> bool:
        """Send or receive what can be; return True at the end. Raises OSError."""
        if self._unsent:
            num_sent = self.socket.send(self._unsent[0])
            self._unsent[0] = self._unsent[0][num_sent:]
            if not self._unsent[0]:
                del self._unsent[0]
            return False
        piece = self.socket.recv(_READ_BYTES)
        if not self.first_s and b"data: " in piece:
            self.first_s = time.perf_counter()
        self.received += piece
        return not piece


class Client:
    """All exchanges under way, and what those at their end were like."""

    def __init__(self, port: int, model: str, output_len: int, seed: int) -> None:
        self._port, self._model, self._output_len = port, model, output_len
        self._dice = random.Random(seed)
        self._selector = selectors.DefaultSelector()
        self.times: dict[str, list[float]] = {
            name: [] for name in ("ttft_s", "e2e_s", "refused_s", "retry_after_s", "late_s")
        }
        self.others: Counter[str] = Counter()

    def open_loop(self, rate_hz: float, seconds: float) -> None:
        """Begin requests at random moments, whatever becomes of those before."""
        began_s = due_s = time.perf_counter()
        while (due_s := due_s + self._dice.expovariate(rate_hz)) - began_s < seconds:
            while (wait_s := due_s - time.perf_counter()) > 0:
                self._turn(wait_s)
            self.times["late_s"].append(time.perf_counter() - due_s)
            self._begin()
        while self._selector.get_map():
            self._turn(1.0)

    def closed_loop(self, num_clients: int, seconds: float) -> None:
        """Keep so many asking; one that is refused comes again soon."""
        began_s, due = time.perf_counter(), [0.0] * num_clients
        while time.perf_counter() - began_s < seconds or self._selector.get_map():
            now_s = time.perf_counter()
            if now_s - began_s < seconds:
                for _ in range(sum(each <= now_s for each in due)):
                    self._begin()
            due = [each for each in due if each > now_s]
            for was_served in self._turn(_COME_AGAIN_S):
                due.append(0.0 if was_served else time.perf_counter() + _COME_AGAIN_S)

    def _begin(self) -> None:
        words = " ".join(
            self._dice.choice(["one", "two", "red", "blue", "tree", "house", "runs", "sees"])
            for _ in range(24)
        )
        fields = {"model": self._model, "prompt": words, "max_tokens": self._output_len}
        body = json.dumps(fields | {"ignore_eos": True, "stream": True}).encode()
        exchange = _Exchange(self._port, body)
        self._selector.register(exchange.socket, exchange.events, exchange)

    def _turn(self, wait_s: float) -> list[bool]:
        """Go on with all that are ready; for each that has ended, return whether it was served."""
        ended = []
        for key, _ in self._selector.select(max(wait_s, 0.0)):
            exchange: _Exchange = key.data
            try:
                is_over = exchange.go_on()
            except OSError as error:
                self.others[type(error).__name__] += 1
                is_over = True
                exchange.received.clear()
            if is_over or time.perf_counter() - exchange.began_s > _LONGEST_S:
                self._selector.unregister(exchange.socket)
                exchange.socket.close()
                ended.append(self._note(exchange))
            elif exchange.events != key.events:
                self._selector.modify(exchange.socket, exchange.events, exchange)
        return ended

    def _note(self, exchange: _Exchange) -> bool:
        took_s = time.perf_counter() - exchange.began_s
        head = bytes(exchange.received).partition(b"\r\n\r\n")[0].decode("latin-1").lower()
        status = head[9:12]
        if status == "200" and b"[DONE]" in exchange.received:
            self.times["ttft_s"].append(exchange.first_s - exchange.began_s)
            self.times["e2e_s"].append(took_s)
            return True
        if status == "429":
            self.times["refused_s"].append(took_s)
            asked = head.partition("retry-after: ")[2].partition("\r")[0]
            self.times["retry_after_s"].append(int(asked or 0))
        elif exchange.received:
            self.others[f"HTTP {status}"] += 1
        return False


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.servers.plain_client", allow_abbrev=False)
    parser.add_argument("port", type=int)
    parser.add_argument("model")
    parser.add_argument("output_len", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("kind", choices=("rate", "clients"))
    parser.add_argument("number", type=float)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(list(argv))
    client = Client(asked.port, asked.model, asked.output_len, asked.seed)
    began_s = time.perf_counter()
    if asked.kind == "rate":
        client.open_loop(asked.number, asked.seconds)
    else:
        client.closed_loop(int(asked.number), asked.seconds)
    took_s = time.perf_counter() - began_s
    print(json.dumps(client.times | {"others": client.others, "took_s": took_s}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
