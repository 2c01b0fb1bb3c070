"""Everything at once, for as long as is asked: does the server keep anything that it should have let go?

    python -m campaigns.soak --minutes 60 [--attacks] [--lasting]
    python -m campaigns.soak --streams 256 --minutes 3

Starts `tokenyard serve` on the built-in model with everything small, so that queues, KV cache and swap space
are full most of the time, sends it a random mix of all that clients do, kills its engine process once, and
looks afterwards: every request has had exactly one end; nothing runs, waits or holds a block; memory, files
and threads of all processes are as they were. With `--attacks` all of that is among attackers (attacks.py),
and the engine process is killed twice. With `--lasting` there are two engines with drafts, batches and
responses in the background (lasting.py), adapters and pictures (features.py), and all processes are killed
and stopped, the clock jumps, descriptors and memory run out (trouble.py); with `--disk FOLDER`, a small file
system of its own, it fills up too. Ranks are an argument, `--args "--tensor-parallel-size 2"`. With
`--streams`, only streams, whose every piece is compared (streams.py). Exit status 1 if anything was wrong,
pauses of a neighbour's stream among attackers included.

Owns: the run, the samples of what the processes hold, and the verdict.
Never: what clients do (acts.py), or attackers.
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bench.load.report import percentile
from campaigns.servers.own_server import OwnServer, own_server, total
from campaigns.servers.processes import Held, children_of, held_by
from campaigns.soak.acts import Acts, Ends, Known, Pace, ask_alone, keep_acting
from campaigns.soak.attacks import Attacks
from campaigns.soak.features import MAX_MODEL_LEN as MAX_MODEL_LEN_OF_FEATURES
from campaigns.soak.features import Features, prepare
from campaigns.soak.lasting import Lasting
from campaigns.soak.streams import ManyStreams
from campaigns.soak.trouble import CLOCK, HANGS_AFTER, KILLS_UNTIL, Trouble
from server.edge.http.http_client import ExchangeFailed, Timeouts, exchange

MAX_MODEL_LEN = 256
SMALL = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "16", "--max-num-batched-tokens", "64"),
    *("--block-size", "8", "--num-gpu-blocks-override", "64", "--swap-space", "256KiB"),
    *("--scheduling-policy", "priority", "--priority-aging", "1s", "--fairness", "tenant"),
    *("--max-queued-requests", "24", "--num-threads", "1", "--enable-admin", "--log-level", "warning"),
    # Full within a minute, so that what it fills with is not taken for growth.
    *("--responses-store-memory", "256KiB"),
)
"""Room for a few sequences only, and a queue that is full at once."""
CROWDED = ("--num-gpu-blocks-override", "400", "--block-size", "8", "--max-model-len", "512")
"""For the streams: so few blocks that some of 256 have to be preempted."""
_NUM_KNOWN = 12
_KILLED_AT = 0.15
"""After this share of the time the engine process is killed: the next one has the rest to show a leak."""
_KILLED_AGAIN_AT = 0.5
_ENGINE_GONE_S = 3.0
"""Time after the next engine process is ready, within which its predecessor's death may still be reported."""
_SAMPLE_EVERY_S, _TELL_EVERY_S = 0.5, 120.0
_IDLE_WITHIN_S = 20.0
_SETTLED_AFTER_H = 0.05
_SETTLES = 0.1
"""Share of the time after the last death in which processes open what they keep open."""
_GROWTH_WHILE_SETTLING_BYTES, _GROWTH_BYTES = 16 * 2**20, 4 * 2**20
"""Between the second quarter of a process's life under load and the last: heaps settle within minutes, and a
run that is shorter can only tell a large leak."""
_SPARE_FILES, _SPARE_THREADS = 4, 2
IDLE_GAUGES = (
    "tokenyard:num_requests_running",
    "tokenyard:num_requests_waiting",
    "tokenyard:num_requests_swapped",
    "tokenyard:kv_cache_usage_perc",
    "tokenyard:swap_space_usage_perc",
)


_FULL = Pace()


class Beside(Enum):
    """Work of a soak beside its clients."""

    ATTACKS = "attacks"
    LASTING = "lasting"


class Sample(NamedTuple):
    at_s: float
    pid: int
    held: Held


@dataclass(slots=True)
class Life:
    """Memory of one process, from sample to sample under load, and at the end when nothing was asked."""

    name: str
    samples: list[Sample]
    at_rest_before: Held
    at_rest_after: Held

    @property
    def quarters_bytes(self) -> list[float]:
        """Memory in each quarter of the samples; nothing of fewer than four.

        Of each the tenth percentile: large bodies hold hundreds of MiB for a second, and a leak stays.
        """
        size = len(self.samples) // 4
        sizes = [float(sample.held.memory_bytes) for sample in self.samples]
        starts = (0, size, 2 * size, len(sizes) - size)
        return [percentile(sorted(sizes[start : start + size]), 10) for start in starts] if size else []

    @property
    def growth_bytes(self) -> float:
        """From the second quarter to the last."""
        quarters = self.quarters_bytes
        return quarters[3] - quarters[1] if quarters else 0.0

    @property
    def hours(self) -> float:
        """Between the middles of those quarters."""
        return (self.samples[-1].at_s - self.samples[0].at_s) * 0.5 / 3600 if self.samples else 0.0

    def faults(self) -> list[str]:
        before, after = self.at_rest_before, self.at_rest_after
        faults = []
        allowed_bytes = _GROWTH_BYTES if self.hours > _SETTLED_AFTER_H else _GROWTH_WHILE_SETTLING_BYTES
        if self.growth_bytes > allowed_bytes:
            faults.append(f"the {self.name} has grown by {self.growth_bytes / 2**20:.1f} MiB")
        if after.num_files > before.num_files + _SPARE_FILES:
            faults.append(f"the {self.name} has {after.num_files} files open, not {before.num_files}")
        if after.num_threads > before.num_threads + _SPARE_THREADS:
            faults.append(f"the {self.name} has {after.num_threads} threads, not {before.num_threads}")
        return faults

    def __str__(self) -> str:
        before, after = self.at_rest_before, self.at_rest_after
        growth = self.growth_bytes / 2**20
        slope = f" ({growth / self.hours:+.1f} MiB/h)" if self.hours > 0.1 else ""
        quarters = ", ".join(f"{each / 2**20:.1f}" for each in self.quarters_bytes)
        return (
            f"{self.name}: memory {before.memory_bytes / 2**20:.1f} MiB at first, "
            f"{after.memory_bytes / 2**20:.1f} MiB at the end, under load {growth:+.1f} MiB{slope}, "
            f"in quarters {quarters}; "
            f"files {before.num_files} and {after.num_files}; threads {before.num_threads} and "
            f"{after.num_threads}"
        )


class Soak:
    """One run against one server."""

    def __init__(self, server: OwnServer, *, seed: int, pace: Pace = _FULL) -> None:
        self._server = server
        self._pace = pace
        self.attacks: Attacks | None = None
        self.lasting: Lasting | None = None
        self.features: Features | None = None
        self.trouble: Trouble | None = None
        self.max_model_len = MAX_MODEL_LEN
        self._num_kills = 0
        self._seed = seed
        self._dice = random.Random(seed)
        self._known: list[Known] = []
        self.ends = Ends()
        self.faults: list[str] = []
        self.lives: list[Life] = []
        self._samples: list[Sample] = []
        self._since_s: dict[int, float] = {}
        """Start of the samples that count, by process, if it is not the last death."""
        self._over = asyncio.Event()

    async def run(self, seconds: float) -> None:
        """Raises ExchangeFailed if the server cannot be asked at all."""
        self._known = await ask_alone(self._server.target, num=_NUM_KNOWN, seed=self._seed)
        num_files = held_by(self._server.pid).num_files  # attackers hold some from now on
        works = (self.attacks, self.lasting, self.features, self.trouble)
        beside = [asyncio.create_task(work.run(self._over)) for work in works if work is not None]
        await self._act_for(min(5.0, seconds / 10))  # the first of everything
        api_before = replace(held_by(self._server.pid), num_files=num_files)
        beside += [asyncio.create_task(self._sample()), asyncio.create_task(self._tell())]
        passed = await self._deaths(seconds)
        before, since_s = {pid: held_by(pid) for pid in self._pids()}, time.monotonic()
        await self._act_for(seconds * (1 - passed))
        self._over.set()
        await asyncio.gather(*beside)
        await self._rest()
        if self.trouble is None:
            before[self._server.pid], self._since_s[self._server.pid] = api_before, 0.0
        for pid in before.keys() & set(self._pids()):
            self._add_life(pid, before[pid], since_s=self._since_s.get(pid, since_s))
        await self._check_counters()

    async def _deaths(self, seconds: float) -> float:
        """Act while processes are killed and come back. Return the share of the time that has passed."""
        if self.trouble is not None:
            acting = asyncio.create_task(self._act_for(seconds * KILLS_UNTIL))
            await self.trouble.kill_for(seconds * KILLS_UNTIL, self._is_ready)
            await acting
            await self._act_for(seconds * _SETTLES)  # the last that was replaced, too
            return KILLS_UNTIL + _SETTLES
        passed = 0.0
        for share in (_KILLED_AT,) if self.attacks is None else (_KILLED_AT, _KILLED_AGAIN_AT):
            await self._act_for(seconds * (share - passed))
            await self._replace_engine()
            passed = share
        return passed

    def _pids(self) -> list[int]:
        """List the processes of the server: the API process, its children, and theirs."""
        children = children_of(self._server.pid)
        found = [self._server.pid, *children]
        for child in children:
            with contextlib.suppress(OSError):  # killed meanwhile
                found += children_of(child)
        return found

    async def _act_for(self, seconds: float) -> None:
        until = asyncio.Event()
        clients = []
        for _ in range(self._pace.num_clients):
            acts = Acts(random.Random(self._dice.random()), self._known, max_model_len=self.max_model_len)
            acting = keep_acting(self._server.target, acts, self.ends, until, rest_s=self._pace.rest_s)
            clients.append(asyncio.create_task(acting))
        await asyncio.sleep(seconds)
        until.set()
        await asyncio.gather(*clients)

    async def _replace_engine(self) -> None:
        """Kill the engine process with requests in flight; return when the next one has found its stride."""
        pid = self._server.engine_pid
        self._num_kills += 1
        self.ends.is_engine_gone = True
        busy = asyncio.create_task(self._act_for(_ENGINE_GONE_S))
        await asyncio.sleep(_ENGINE_GONE_S / 3)
        os.kill(pid or 0, signal.SIGKILL)
        await busy
        async with asyncio.timeout(60):
            while not await self._is_ready():
                await asyncio.sleep(0.1)
        await self._act_for(_ENGINE_GONE_S)
        self.ends.is_engine_gone = False

    async def _is_ready(self) -> bool:
        """Whether all engines are ready."""
        with contextlib.suppress(ExchangeFailed):
            target = self._server.target
            wire = target.request("GET", "/health/ready")
            is_ready = (await exchange(target, wire, timeouts=Timeouts(whole_s=30))).status == 200
            metrics = await self._server.metrics()
            several = [each for name, each in metrics.items() if name.startswith("tokenyard:engine_ready")]
            return is_ready and all(several)
        return False

    async def _sample(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(OSError):  # killed meanwhile
                for pid in self._pids():
                    self._samples.append(Sample(time.monotonic(), pid, held_by(pid)))
            await asyncio.sleep(_SAMPLE_EVERY_S)

    async def _tell(self) -> None:
        """Print what is wrong so far, now and then."""
        started_s = time.monotonic()
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), _TELL_EVERY_S)
            passed = (time.monotonic() - started_s) / 60
            print(f"{passed:.0f} minutes, {self.ends.num_acts} acts, faults: {self.all_faults()}", flush=True)

    def _add_life(self, pid: int, before: Held, *, since_s: float) -> None:
        name = f"{_kind_of(pid)} {pid}"
        own = [sample for sample in self._samples if sample.pid == pid and sample.at_s >= since_s]
        self.lives.append(Life(name, own, before, held_by(pid)))

    async def _rest(self) -> None:
        """Wait until all is idle: what is still in use now is lost."""
        ends_s = time.monotonic() + _IDLE_WITHIN_S
        while busy := {
            name: used for name in IDLE_GAUGES if (used := total(await self._server.metrics(), name))
        }:
            if time.monotonic() > ends_s:
                self.faults += [f"{name} is still {used:g}" for name, used in busy.items()]
                return
            await asyncio.sleep(0.2)
        await asyncio.sleep(1.0)  # sockets and threads are closed a little later

    async def _check_counters(self) -> None:
        metrics = await self._server.metrics()
        num_kills = self._num_kills if self.trouble is None else self.trouble.num_engines_killed
        if total(metrics, "tokenyard:engine_restarts_total") != num_kills:
            self.faults.append("the engine process was replaced by itself")
        if not total(metrics, "tokenyard:num_preemptions_total"):
            self.faults.append("nothing was preempted: the KV cache is too large to prove anything")
        log = self._server.log.read_text(errors="replace")
        for word in _ALARMS:
            if word in log:
                where = log.index(word)
                said = log[where : where + _MOST_SHOWN]
                self.faults.append(f"the log has {log.count(word)} times {word!r}, first: {said!r}")

    def all_faults(self) -> list[str]:
        acts = [f"{num} times {kind}" for kind, num in self.ends.faults.items()]
        if self.attacks is not None:
            acts += self.attacks.faults()
        for work in (self.lasting, self.features):
            acts += [] if work is None else [f"{num} times {kind}" for kind, num in work.faults.items()]
        return [*self.faults, *acts, *(fault for life in self.lives for fault in life.faults())]

    def report(self) -> str:
        lines = [f"{self.ends.num_acts} acts of {self._pace.num_clients} clients; how they ended:"]
        for name, ends in sorted(self.ends.ends.items()):
            lines.append(f"  {name:16}" + ", ".join(f"{num} {end}" for end, num in ends.most_common()))
        works = (self.attacks, self.lasting, self.features, self.trouble)
        lines += [each.report() for each in works if each is not None]
        lines += [str(life) for life in self.lives]
        lines += [f"FAULT: {fault}" for fault in self.all_faults()] or ["no promise broken"]
        return "\n".join([*lines, *(f"  {example}" for example in self.ends.examples)])


_ALARMS = ("Traceback", "never awaited", "was never retrieved", "Exception in callback")
_MOST_SHOWN = 2000
"""Characters of the log from the first alarm of a kind on."""


def _kind_of(pid: int) -> str:
    """Return the module that a process runs, from its command line."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return next((word for before, word in pairwise(words) if before == "-m"), words[0])


def soak(
    minutes: float,
    *,
    seed: int,
    words: Sequence[str] = (),
    pace: Pace = _FULL,
    beside: Collection[Beside] = (),
    disk: Path | None = None,
) -> Soak:
    """Start a server, soak it with these beside, and return what was seen."""
    with tempfile.TemporaryDirectory() as name:
        folder, variables = Path(name), {}
        if Beside.LASTING in beside:
            state = folder if disk is None else disk
            words = (*prepare(folder), *HANGS_AFTER, "--state-folder", str(state / "state"), *words)
            clock = folder / "clock"
            clock.write_text("0")
            variables = {**CLOCK, "CLOCK_OFFSET": str(clock)}
        with own_server((*SMALL, *words), variables=variables) as server:
            run = Soak(server, seed=seed, pace=pace)
            ends = run.ends
            if Beside.ATTACKS in beside:
                run.attacks = Attacks(
                    server, seed=seed, is_engine_gone=lambda: ends.is_engine_gone, pace=pace
                )
            if Beside.LASTING in beside:
                run.max_model_len = MAX_MODEL_LEN_OF_FEATURES
                trouble = run.trouble = Trouble(server, seed=seed, disk=disk, clock=clock)
                ends.is_disturbed = trouble.is_under_way
                load: dict[str, Any] = {"seed": seed, "is_disturbed": trouble.is_under_way}
                load["rest_s"] = pace.rest_s
                run.lasting = Lasting(server, **load)
                run.features = Features(server, **load)
            asyncio.run(run.run(minutes * 60))
    return run


def many_streams(num_streams: int, minutes: float, *, seed: int, words: Sequence[str] = ()) -> int:
    """Only streams, each compared; the exit status."""
    seats = ("--max-num-seqs", str(num_streams), "--num-threads", "1")
    with own_server((*seats, *CROWDED, *words)) as server:
        streams = ManyStreams(server.target, num_streams=num_streams, seed=seed)
        tally = asyncio.run(streams.run(minutes * 60))
        preempted = total(asyncio.run(server.metrics()), "tokenyard:num_preemptions_total")
    print(f"{tally}\n{preempted:g} preemptions")
    return 1 if tally.faults or tally.most_open < num_streams else 0


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.soak", allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=60.0, metavar="M", help="default %(default)g")
    parser.add_argument("--streams", type=int, metavar="N", help="only streams, so many at a time")
    parser.add_argument("--attacks", action="store_true", help="among attackers (campaigns/soak/attacks.py)")
    parser.add_argument("--lasting", action="store_true", help="with all features and faults (lasting.py)")
    parser.add_argument(
        "--clients", type=int, default=_FULL.num_clients, metavar="N", help="not of --streams"
    )
    parser.add_argument(
        "--rest", type=float, default=0.0, metavar="S", help="of each client and attacker after an act"
    )
    parser.add_argument(
        "--crowd",
        type=int,
        default=_FULL.num_silent,
        metavar="N",
        help="silent connections of the attackers; default %(default)d",
    )
    parser.add_argument(
        "--disk", type=Path, metavar="FOLDER", help="small file system for the state, to be filled up"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--args", default="", metavar="WORDS", help="added to `tokenyard serve`")
    options = parser.parse_args(list(argv))
    words = options.args.split()
    try:
        if options.streams:
            return many_streams(options.streams, options.minutes, seed=options.seed, words=words)
        beside = [each for each in Beside if getattr(options, each.value)]
        pace = Pace(options.clients, options.rest, options.crowd)
        run = soak(
            options.minutes, seed=options.seed, words=words, pace=pace, beside=beside, disk=options.disk
        )
    except ExchangeFailed as failure:
        print(f"campaigns.soak: {failure.kind}: {failure}", file=sys.stderr)
        return 1
    print(run.report())
    return 1 if run.all_faults() else 0
