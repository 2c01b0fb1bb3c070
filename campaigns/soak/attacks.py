"""Attackers beside the clients of a soak: each does for the whole time what should cost nobody else anything.

Owns: large bodies, dear grammars, silent and half-closed connections, processes that stand still; a probe and
a neighbour's stream that show what all of it does to others.
Never: kills (run.py), or holds the neighbour's pauses to what is promised on an idle machine, as
campaigns/pauses does: the machine does other work, and the soak's clients are a crowd themselves.
"""

import asyncio
import os
import random
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from typing import Any

import orjson

from bench.load.report import percentile
from campaigns.servers.own_server import SERVED_NAME, OwnServer
from campaigns.soak.acts import Pace
from server.edge.http.http_client import ExchangeFailed, Timeouts, exchange

_MIB = 2**20
_TIMEOUT_S = 60.0
_RIGHT_STATUSES = frozenset({200, 400, 408, 413, 429})
"""Statuses that are right for an attack: it is served, or its fault is named, or it comes too often."""
_NO_ENGINE_STATUSES = frozenset({500, 503})
_SILENT_S = 5.0
_OTHER_FILES = 512
"""Open files of the soak itself, with those of its clients."""
_LEAST_REST_S = 0.05
_STANDS_STILL_EVERY_S, _STANDS_STILL_S = 20.0, 1.0
_PROBE_EVERY_S = 0.5
_LARGE = 3 * _MIB + _MIB // 2
_MAX_PAUSE_S, _MAX_P99_S = 2.0, 0.2
"""Longest pause of the neighbour's stream, and 99th percentile of all, that are no fault: twenty times and
twice what is promised. Without the time in which a process stood still."""
_LEAST_FOR_P99 = 100
_LOOK_EVERY_S = 0.2
_STOOD_STILL_S = 0.5
"""Lateness of a look that is a standstill of this process. Less is usual on a busy machine and adds up: with
all of it subtracted, a stall of the server would pass."""
_AMBIGUOUS = "start: s\ns: /[a-z ]/ | s s | s s s | s s s s"


class Attacks:
    """All attackers of one soak. `faults` tells what should not have happened, `ends` all that did."""

    def __init__(
        self, server: OwnServer, *, seed: int, is_engine_gone: Callable[[], bool], pace: Pace
    ) -> None:
        self._rest_s = max(pace.rest_s, _LEAST_REST_S)
        self._num_silent = _num_silent(pace.num_silent)
        self._server = server
        self._dice = random.Random(seed)
        self._is_engine_gone = is_engine_gone
        self.ends: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._is_still = False
        self._late_s = 0.0
        """Time in which this process stood still by the machine's doing, or one of the server's by ours."""
        self.pauses_s: list[float] = []
        """Times between two events of the neighbour's stream, without those of a standstill."""
        self.probes_s: list[float] = []

    async def run(self, until: asyncio.Event) -> None:
        """Attack until the event is set."""
        each: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = (
            self._large_body,
            self._grammar,
            self._silent_crowd,
            self._half_closed,
            self._stand_still,
            self._probe,
            self._neighbour,
            self._look_at_clock,
        )
        await asyncio.gather(*(self._again_and_again(act, until) for act in each))

    def faults(self) -> list[str]:
        """List what should not have happened, a line for each kind."""
        faults = [f"{num} times {kind}" for kind, num in self._faults.items()]
        p99_s, _ = _p99_and_longest(self.pauses_s)
        if p99_s > _MAX_P99_S and len(self.pauses_s) >= _LEAST_FOR_P99:
            faults.append(f"the p99 of the pauses of the neighbour's stream is {p99_s * 1e3:.0f} ms")
        return faults

    def report(self) -> str:
        lines = ["attacks: " + ", ".join(f"{num} {end}" for end, num in sorted(self.ends.items()))]
        lines.append(f"silent crowds of {self._num_silent} connections")
        for name, seconds in (("pauses of the neighbour's stream", self.pauses_s), ("probes", self.probes_s)):
            p99_s, longest_s = _p99_and_longest(seconds)
            lines.append(f"{len(seconds)} {name}: p99 {p99_s * 1e3:.0f} ms, longest {longest_s * 1e3:.0f} ms")
        lines[2] += f" (at most {_MAX_P99_S * 1e3:.0f} and {_MAX_PAUSE_S * 1e3:.0f}; standstills left out)"
        return "\n".join(lines)

    async def _again_and_again(
        self, act: Callable[[], Coroutine[Any, Any, None]], until: asyncio.Event
    ) -> None:
        while not until.is_set():
            try:
                await act()
            except (ExchangeFailed, OSError, TimeoutError) as error:
                kind = error.kind if isinstance(error, ExchangeFailed) else type(error).__name__
                self._faults[f"{act.__name__}: {kind}"] += 1
            await asyncio.sleep(
                _LEAST_REST_S if act in (self._neighbour, self._look_at_clock) else self._rest_s
            )

    async def _post(self, name: str, path: str, body: bytes) -> None:
        target = self._server.target
        reply = await exchange(
            target, target.request("POST", path, body), timeouts=Timeouts(whole_s=_TIMEOUT_S)
        )
        allowed = _RIGHT_STATUSES | (_NO_ENGINE_STATUSES if self._is_engine_gone() else frozenset())
        self.ends[f"{name} {reply.status}"] += 1
        if reply.status not in allowed:
            self._faults[f"{name}: {reply.status} {reply.body[:120]!r}"] += 1

    async def _large_body(self) -> None:
        bodies: tuple[tuple[str, bytes], ...] = (
            ("/v1/completions", b'{"prompt": "' + b"word " * (_LARGE // 5) + b'"}'),
            ("/v1/completions", b'{"prompt": [' + b"7," * (_LARGE // 2) + b"7]}"),
            ("/v1/completions", b'{"prompt": "x", "unknown": [' + b"[]," * (_LARGE // 3) + b"[]]}"),
            ("/v1/completions", b'{"prompt": "' + b"a" * _LARGE + b'"}'),
            ("/detokenize", b'{"tokens": [' + b"7," * (_LARGE // 2) + b"7]}"),
            ("/tokenize", b'{"prompt": "' + b"word " * (_LARGE // 5) + b'"}'),
        )
        path, body = self._dice.choice(bodies)
        await self._post("large body", path, body)
        await asyncio.sleep(1.0)

    async def _grammar(self) -> None:
        ways: tuple[dict[str, Any], ...] = (
            {"grammar": _AMBIGUOUS},
            {"regex": "(.*a.{50}){20}"},
            {"regex": "(a|aa)+" * 10},
            {"json": {"anyOf": [{"type": "object", "properties": {f"k{i}": {}}} for i in range(200)]}},
        )
        fields: dict[str, Any] = {"prompt": "x", "n": self._dice.choice((1, 8)), "max_tokens": 60}
        fields["structured_outputs"] = self._dice.choice(ways)
        body = orjson.dumps({"model": SERVED_NAME, **fields})
        await self._post("grammar", "/v1/completions", body)

    async def _silent_crowd(self) -> None:
        """Open connections that say nothing, or half a head."""
        address = (self._server.target.host, self._server.target.port)
        with ExitStack() as crowd:
            for place in range(self._num_silent):
                client = crowd.enter_context(socket.socket())
                client.setblocking(False)  # noqa: FBT003 (the standard library's own signature)
                await asyncio.get_running_loop().sock_connect(client, address)
                if place % 2:
                    with suppress(OSError):  # the server needed its place
                        client.send(b"POST /v1/completions HTTP/1.1\r\nHost: t")
            await asyncio.sleep(_SILENT_S)
        self.ends["silent crowd"] += 1

    async def _half_closed(self) -> None:
        reader, writer = await self._connect()
        body = orjson.dumps({"prompt": "x", "max_tokens": 8, "stream": self._dice.random() < 0.5})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        writer.write_eof()
        async with asyncio.timeout(_TIMEOUT_S):
            reply = await reader.read(-1)
        writer.close()
        self.ends["half-closed"] += 1
        if b"HTTP/1.1 " not in reply.replace(b"HTTP/1.1 102 ", b"") and not self._is_engine_gone():
            self._faults["half-closed: no reply"] += 1
        await asyncio.sleep(0.5)

    async def _stand_still(self) -> None:
        """Stop a process for a while, as a frozen container does."""
        await asyncio.sleep(_STANDS_STILL_EVERY_S)
        pid = self._dice.choice((self._server.pid, self._server.engine_pid))
        if pid is None or self._is_engine_gone():
            return
        os.kill(pid, signal.SIGSTOP)
        self._is_still, stopped_s = True, time.monotonic()
        try:
            await asyncio.sleep(_STANDS_STILL_S)
        finally:
            os.kill(pid, signal.SIGCONT)
            self._late_s += time.monotonic() - stopped_s  # of a pause that ends after all have caught up
        self.ends["stood still"] += 1
        await asyncio.sleep(_STANDS_STILL_S)  # until all have caught up
        self._is_still = False

    async def _probe(self) -> None:
        target, sent_s, was_still = self._server.target, time.perf_counter(), self._is_still
        reply = await exchange(
            target, target.request("GET", "/health/live"), timeouts=Timeouts(whole_s=_TIMEOUT_S)
        )
        if not (was_still or self._is_still):  # a process that stands still answers nobody
            self.probes_s.append(time.perf_counter() - sent_s)
        if reply.status != 200:
            self._faults[f"liveness {reply.status}"] += 1
        await asyncio.sleep(_PROBE_EVERY_S)

    async def _neighbour(self) -> None:
        """Stream with the highest priority, so that its pauses are no preemption."""
        last_s = last_late_s = 0.0

        def on_event(_: bytes, now_s: float) -> None:
            nonlocal last_s, last_late_s
            if last_s and not self._is_still and not self._is_engine_gone():
                self._note_pause(now_s - last_s, late_s=self._late_s - last_late_s)
            last_s, last_late_s = now_s, self._late_s

        fields = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True, "priority": -100}
        target = self._server.target
        wire = target.request("POST", "/v1/completions", orjson.dumps({"model": SERVED_NAME, **fields}))
        await exchange(target, wire, timeouts=Timeouts(whole_s=_TIMEOUT_S), on_event=on_event)

    async def _look_at_clock(self) -> None:
        due_s = time.monotonic() + _LOOK_EVERY_S
        await asyncio.sleep(_LOOK_EVERY_S)
        self._note_look(late_s=time.monotonic() - due_s)

    def _note_look(self, *, late_s: float) -> None:
        if late_s > _STOOD_STILL_S and not self._is_still:  # the stop of a process is counted by itself
            self._late_s += late_s

    def _note_pause(self, pause_s: float, *, late_s: float) -> None:
        self.pauses_s.append(max(0.0, pause_s - late_s))
        if pause_s - late_s > _MAX_PAUSE_S:
            self._faults[f"a pause of the neighbour's stream of {pause_s:.1f} s"] += 1

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._server.target.host, self._server.target.port)


def _num_silent(wanted: int) -> int:
    """Number of sockets that this process may open, its own limit raised. The server has started before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + _OTHER_FILES:
        soft = wanted + _OTHER_FILES if hard == resource.RLIM_INFINITY else min(wanted + _OTHER_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - _OTHER_FILES))


def _p99_and_longest(seconds: list[float]) -> tuple[float, float]:
    ordered = sorted(seconds) or [0.0]
    return percentile(ordered, 99), ordered[-1]
