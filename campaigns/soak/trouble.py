"""Trouble beside the clients of a soak: processes that are killed and stopped, a machine without room.

In the first part of the time every kind of process is killed, the API too, which is started again; an engine
or a rank at most once in two minutes, or it is stopped for good, until the server replaces it. From then on
all live, so that what each of them keeps can be seen, and are only stopped for a while. All the time the disk
fills up now and then, descriptors and memory run out, and the clock jumps.

Owns: what is done to processes and machine, and when; whether the clients may notice.
Never: requests.
"""

import asyncio
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from campaigns.servers.own_server import OwnServer
from campaigns.servers.processes import children_of, engines_of, held_by, ranks_of
from campaigns.servers.running import ROOT

KILLS_UNTIL = 0.4
"""Share of the time in which processes are killed."""
CLOCK = {"PYTHONPATH": f"{ROOT / 'tests/faults/jumping_clock'}:{ROOT}"}
"""Variables of a server whose wall clock can be set, with CLOCK_OFFSET, a file."""
HANGS_AFTER = ("--heartbeat-timeout", "8s")
"""Words of a server that soon replaces an engine which is stopped for good."""
_EVERY_S, _ENGINES_EVERY_S = 20.0, 120.0
_STOPPED_S, _FULL_S, _STARVED_S, _JUMPED_S = 1.0, 4.0, 2.0, 3.0
_SPARE_FILES, _SPARE_MEMORY_BYTES = 2, 2**20
_DAY_S = 86_400
_SETTLES_S = 4.0
_BACK_WITHIN_S = 120.0
_API_KILLED_AT = 0.1
_BALLAST_BYTES = 2**20


class Trouble:
    """Deeds to one server. While `is_under_way`, clients may be refused and cut off."""

    def __init__(self, server: OwnServer, *, seed: int, disk: Path | None, clock: Path) -> None:
        self._server = server
        self._dice = random.Random(seed)
        self._disk = disk
        self._clock = clock
        self._num_causes = 0
        self._deed = asyncio.Lock()
        """Held by what is done to processes: a new one would inherit the limits of another."""
        self.num_engines_killed = 0
        """Deaths since the start of the API process."""
        self.ends: Counter[str] = Counter()

    def is_under_way(self) -> bool:
        return self._num_causes > 0

    def report(self) -> str:
        disk = "" if self._disk is not None else "; no small disk was given to be filled"
        return "trouble: " + ", ".join(f"{num} {end}" for end, num in sorted(self.ends.items())) + disk

    async def kill_for(self, seconds: float, is_ready: Callable[[], Awaitable[bool]]) -> None:
        """Kill processes for so long. Raises TimeoutError if the server does not come back."""
        started_s = last_engine_s = time.monotonic()
        is_api_due = True
        while (passed_s := time.monotonic() - started_s) < seconds:
            await asyncio.sleep(min(_EVERY_S, seconds / 20))
            if is_api_due and passed_s > _API_KILLED_AT * seconds:
                is_api_due = False
                await self._disturb("API killed", self._kill_api, is_ready)
            elif time.monotonic() - last_engine_s > min(_ENGINES_EVERY_S, seconds / 4):
                last_engine_s = time.monotonic()
                how = self._dice.choice((signal.SIGKILL, signal.SIGSTOP))
                await self._disturb(f"engine or rank {how.name}", partial(self._end_engine, how), is_ready)
            else:
                await self._disturb("small process killed", self._kill_small, is_ready)

    async def run(self, until: asyncio.Event) -> None:
        """Stop processes and starve the server until the event is set."""
        starved = (self._fill_disk, self._take_files, self._take_memory)
        kinds = (self._stop_one, self._stop_one, *starved, self._set_clock)
        while not until.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), _EVERY_S)
            with suppress(ProcessLookupError, FileNotFoundError):  # killed meanwhile
                await self._dice.choice(kinds)()

    async def _disturb(
        self, name: str, act: Callable[[], Awaitable[None]], is_ready: Callable[[], Awaitable[bool]]
    ) -> None:
        async with self._deed:
            with self._cause():
                await act()
                self.ends[name] += 1
                async with asyncio.timeout(_BACK_WITHIN_S):
                    while not await is_ready():
                        await asyncio.sleep(0.2)
                await asyncio.sleep(_SETTLES_S)

    @contextmanager
    def _cause(self) -> Iterator[None]:
        self._num_causes += 1
        try:
            yield
        finally:
            self._num_causes -= 1

    async def _kill_api(self) -> None:
        os.kill(self._server.pid, signal.SIGKILL)
        await asyncio.to_thread(self._server.start)
        self.num_engines_killed = 0

    async def _end_engine(self, how: signal.Signals) -> None:
        """Kill or stop the oldest engine or one of its ranks; return when the engine is gone.

        The engines take turns so: one that dies more than three times in five minutes is given up.
        """
        async with asyncio.timeout(_BACK_WITHIN_S):
            while not (engines := engines_of(self._server.pid)):
                await asyncio.sleep(0.2)
            engine = engines[0]
            os.kill(self._dice.choice(ranks_of(engine)), how)
            self.num_engines_killed += 1
            while engine in engines_of(self._server.pid):
                await asyncio.sleep(0.2)

    async def _kill_small(self) -> None:
        small = set(children_of(self._server.pid)) - set(engines_of(self._server.pid))
        if small:
            os.kill(self._dice.choice(sorted(small)), signal.SIGKILL)

    async def _stop_one(self) -> None:
        pid = self._dice.choice([*self._large(), *children_of(self._server.pid)])
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(_STOPPED_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        self.ends["stopped for a while"] += 1

    async def _fill_disk(self) -> None:
        """Fill the disk of the state folder for a while."""
        if self._disk is None:
            return
        ballast = self._disk / "ballast"
        with self._cause():
            try:
                with suppress(OSError), ballast.open("wb", buffering=0) as file:
                    while file.write(bytes(_BALLAST_BYTES)):
                        pass
                await asyncio.sleep(_FULL_S)
            finally:
                ballast.unlink(missing_ok=True)
            await asyncio.sleep(_SETTLES_S)
        self.ends["disk full for a while"] += 1

    async def _take_files(self) -> None:
        """Leave the API process only a few more descriptors than it has."""
        async with self._deed:
            pid = self._server.pid
            await self._limit(pid, resource.RLIMIT_NOFILE, held_by(pid).num_files + _SPARE_FILES)
        self.ends["without descriptors for a while"] += 1

    async def _take_memory(self) -> None:
        """Leave one process only a little more address space than it has."""
        async with self._deed:
            pid = self._dice.choice(self._large())
            used_bytes = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
            await self._limit(pid, resource.RLIMIT_AS, used_bytes + _SPARE_MEMORY_BYTES)
        self.ends["without memory for a while"] += 1

    async def _limit(self, pid: int, kind: int, most: int) -> None:
        """Limit a resource of a process for a while."""
        before = resource.prlimit(pid, kind)
        with self._cause():
            try:
                resource.prlimit(pid, kind, (most, before[1]))
                await asyncio.sleep(_STARVED_S)
            finally:
                with suppress(ProcessLookupError):
                    resource.prlimit(pid, kind, before)
            await asyncio.sleep(_SETTLES_S)

    def _large(self) -> list[int]:
        """List the API process, the engines and their ranks."""
        return [self._server.pid, *(rank for each in engines_of(self._server.pid) for rank in ranks_of(each))]

    async def _set_clock(self) -> None:
        """Let the wall clock jump, and back."""
        self._clock.write_text(str(self._dice.choice((-_DAY_S, _DAY_S))))
        await asyncio.sleep(_JUMPED_S)
        self._clock.write_text("0")
        self.ends["clock jumped by a day and back"] += 1
