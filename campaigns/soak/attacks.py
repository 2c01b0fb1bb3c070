"""Attackers beside the clients of a soak: each does for the whole time what should cost nobody else anything.

Owns: large bodies, dear grammars, silent and half-closed connections, processes that stand still; a probe and
a neighbour's stream that show what all of it does to others.
Never: kills (run.py), or judges all of the neighbour's pauses, which are the machine's as well: they are
printed, and the longest are faults.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import orjson

from campaigns.servers.own_server import SERVED_NAME, OwnServer
from server.http.http_client import ExchangeFailed, Timeouts, exchange

_MIB = 2**20
_TIMEOUT_S = 60.0
_RIGHT_STATUSES = frozenset({200, 400, 408, 413, 429})
"""Statuses that are right for an attack: it is served, or its fault is named, or it comes too often."""
_NO_ENGINE_STATUSES = frozenset({500, 503})
_NUM_SILENT, _SILENT_S = 300, 5.0
_LEAST_REST_S = 0.05
_STANDS_STILL_EVERY_S, _STANDS_STILL_S = 20.0, 1.0
_PROBE_EVERY_S = 0.5
_LARGE = 3 * _MIB + _MIB // 2
_MAX_PAUSE_S = 2.0
"""Pause of the neighbour's stream that is a fault, without the time in which a process stood still.
Twenty times what is promised, which `campaigns.pauses` measures: the machine does other work, and the soak's
clients are a crowd themselves."""
_LOOK_EVERY_S = 0.2
_STOOD_STILL_S = 0.5
"""Lateness of a look that is a standstill of this process. Less is usual on a busy machine and adds up: with
all of it subtracted, a stall of the server would pass."""
_AMBIGUOUS = "start: s\ns: /[a-z ]/ | s s | s s s | s s s s"


class Attacks:
    """All attackers of one soak. `faults` has what should not have happened, `ends` all that did."""

    def __init__(
        self, server: OwnServer, *, seed: int, is_engine_gone: Callable[[], bool], rest_s: float = 0.0
    ) -> None:
        self._rest_s = max(rest_s, _LEAST_REST_S)
        self._server = server
        self._dice = random.Random(seed)
        self._is_engine_gone = is_engine_gone
        self.ends: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._is_still = False
        self._late_s = 0.0
        """Time in which this process stood still by the machine's doing, or one of the server's by ours."""
        self.pauses_s: list[float] = []
        """Times between two events of the neighbour's stream, but for those while a process stood still."""
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

    def report(self) -> str:
        lines = ["attacks: " + ", ".join(f"{num} {end}" for end, num in sorted(self.ends.items()))]
        for name, seconds in (("pause of the neighbour's stream", self.pauses_s), ("probe", self.probes_s)):
            ordered = sorted(seconds) or [0.0]
            p99 = ordered[int(len(ordered) * 0.99)]
            lines.append(
                f"{name}: p99 {p99 * 1e3:.0f} ms, longest {ordered[-1] * 1e3:.0f} ms, {len(ordered)} times"
            )
        return "\n".join(lines)

    async def _again_and_again(
        self, act: Callable[[], Coroutine[Any, Any, None]], until: asyncio.Event
    ) -> None:
        while not until.is_set():
            try:
                await act()
            except (ExchangeFailed, OSError, TimeoutError) as error:
                kind = error.kind if isinstance(error, ExchangeFailed) else type(error).__name__
                self.faults[f"{act.__name__}: {kind}"] += 1
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
            self.faults[f"{name}: {reply.status} {reply.body[:120]!r}"] += 1

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
        writers = []
        for place in range(_NUM_SILENT):
            _, writer = await self._connect()
            if place % 2:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: t")
            writers.append(writer)
        await asyncio.sleep(_SILENT_S)
        for writer in writers:
            writer.close()
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
            self.faults["half-closed: no reply"] += 1
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
        target, sent_s = self._server.target, time.perf_counter()
        reply = await exchange(
            target, target.request("GET", "/health/live"), timeouts=Timeouts(whole_s=_TIMEOUT_S)
        )
        self.probes_s.append(time.perf_counter() - sent_s)
        if reply.status != 200:
            self.faults[f"liveness {reply.status}"] += 1
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
        self.pauses_s.append(pause_s)
        if pause_s - late_s > _MAX_PAUSE_S:
            self.faults[f"a pause of the neighbour's stream of {pause_s:.1f} s"] += 1

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._server.target.host, self._server.target.port)
