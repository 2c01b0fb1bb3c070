"""Ten times more requests than the server can serve: latency of the served, and cost of a refusal.

    python -m campaigns.overload [--factor 10] [--seconds 100] [--turns 20] [--client plain] [--args WORDS]

Starts `tokenyard serve` on the built-in model with a short queue, and measures three times: as many clients
as there are seats, which gives the capacity; as many as there are seats and places in the queue, who come
again when they are refused; and an open loop that offers `--factor` times the capacity, each request on a
connection of its own. The second is what the third must be compared with: the same queue, without the crowd
outside. So these two come in turns, and what a machine does more slowly for a while meets both. Client, API
process and engine process share this machine's cores, and the figures include that. `--client plain` asks by
a client that shares no code with the other: what only one of them sees is that client's own.

Owns: the three rounds and their table.
Never: the requests' bytes on the wire (http_client.py).
"""

import argparse
import asyncio
import gc
import os
import platform
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import orjson

from bench.load.report import percentile
from bench.load.workload import words
from campaigns.servers.own_server import SERVED_NAME, OwnServer, own_server
from campaigns.servers.processes import held_by, processor_s
from server.edge.http.http_client import ExchangeFailed, Target, Timeouts, exchange

NUM_SEATS, NUM_PLACES = 8, 16
_NUM_WORDS = 24
_COME_AGAIN_S = 0.05
_TIMEOUT_S = 120.0
_MIN_RETRY_S, _MAX_RETRY_S = 1, 60
"""Bounds of what Retry-After may say."""
_REFUSAL_P99_S = 0.050
_MAX_TTFT_RATIO = 1.2
_MAX_REFUSING_SHARE = 0.1
"""Part of one core that refusals may take at ten times the capacity, on machines of any size. What they take
from those who are served is judged by itself."""
_MIN_SERVED_RATIO = 0.9
"""Served requests a second with the crowd outside, as a share of those without: the crowd's client takes its
part of the same cores."""

_ROUNDS = ("seats taken", "queue full", "overload")


@dataclass(slots=True)
class Seen:
    """Replies that the clients of one round have seen."""

    ttft_s: list[float] = field(default_factory=list)
    """Times of the served requests, from sending."""
    e2e_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    """From sending to the whole 429."""
    retry_after_s: list[int] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)
    """Replies that should not happen."""
    late_s: list[float] = field(default_factory=list)
    """Delay of the open loop behind its plan: where it is long, the client is what is measured."""
    took_s: float = 0.0

    def add(self, later: "Seen") -> None:
        """Take in what another turn of the same round has seen."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(later, each.name))


class Crowd:
    """Clients that all ask for the same amount of work, each with a prompt of its own."""

    def __init__(self, target: Target, *, output_len: int, seed: int) -> None:
        self._target = target
        self._output_len = output_len
        self._dice = random.Random(seed)
        self._num_sent = 0

    async def closed_loop(self, num_clients: int, seconds: float) -> Seen:
        """Each asks, and asks again; who is refused comes again soon."""
        seen = Seen()
        started_s = time.perf_counter()

        async def insist() -> None:
            while time.perf_counter() - started_s < seconds:
                if not await self._ask(seen):
                    await asyncio.sleep(_COME_AGAIN_S)

        await asyncio.gather(*(insist() for _ in range(num_clients)))
        seen.took_s = time.perf_counter() - started_s
        return seen

    async def open_loop(self, rate_hz: float, seconds: float) -> Seen:
        """One after the other at random moments, whatever becomes of those before."""
        seen, tasks = Seen(), []
        started_s = due_s = time.perf_counter()
        while (due_s := due_s + self._dice.expovariate(rate_hz)) - started_s < seconds:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            seen.late_s.append(time.perf_counter() - due_s)
            tasks.append(asyncio.create_task(self._ask(seen)))
        await asyncio.gather(*tasks)
        seen.took_s = time.perf_counter() - started_s
        return seen

    async def _ask(self, seen: Seen) -> bool:
        """Whether it was served."""
        self._num_sent += 1
        body = {
            "model": SERVED_NAME,
            "prompt": f"{self._num_sent} {words(_NUM_WORDS, self._dice)}",
            "max_tokens": self._output_len,
            "ignore_eos": True,
            "stream": True,
        }
        wire = self._target.request("POST", "/v1/completions", orjson.dumps(body))
        first_s = 0.0

        def on_event(_: bytes, now_s: float) -> None:
            nonlocal first_s
            first_s = first_s or now_s

        sent_s = time.perf_counter()
        try:
            reply = await exchange(
                self._target, wire, timeouts=Timeouts(whole_s=_TIMEOUT_S), on_event=on_event
            )
        except ExchangeFailed as failure:
            seen.others[failure.kind] += 1
            return False
        took_s = time.perf_counter() - sent_s
        if reply.status == 200:
            seen.ttft_s.append(first_s - sent_s)
            seen.e2e_s.append(took_s)
            return True
        if reply.status == 429:
            seen.refused_s.append(took_s)
            seen.retry_after_s.append(int(reply.headers.get("retry-after", "0")))
        else:
            seen.others[f"HTTP {reply.status}"] += 1
        return False


class PlainCrowd:
    """The same by servers/plain_client.py, in a process of its own."""

    def __init__(self, target: Target, *, output_len: int) -> None:
        self._target, self._output_len = target, output_len
        self._num_runs = 0
        self.spent_s = 0.0
        """Processor time of the client so far."""

    async def closed_loop(self, num_clients: int, seconds: float) -> Seen:
        return await self._run(seconds, "clients", num_clients)

    async def open_loop(self, rate_hz: float, seconds: float) -> Seen:
        return await self._run(seconds, "rate", rate_hz)

    async def _run(self, seconds: float, kind: str, number: float) -> Seen:
        self._num_runs += 1
        words = (self._target.port, SERVED_NAME, self._output_len, seconds, kind, number)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "campaigns.servers.plain_client",
                *map(str, words),
                f"--seed={self._num_runs}",
            ),
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await process.communicate()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.spent_s += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if process.returncode:
            raise RuntimeError(f"the client ended with code {process.returncode}")
        found = orjson.loads(said)
        return Seen(**{**found, "others": Counter(found["others"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Number of cores that each process kept busy."""

    client: float
    api: float
    engine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """All figures that were measured."""

    alone: Seen
    full_queue: Seen
    overload: Seen
    factor: float
    grown_bytes: int
    """Growth of the API process meanwhile."""
    cores_alone: "Cores"
    cores: "Cores"
    """While the crowd was there."""

    @property
    def capacity_hz(self) -> float:
        return _rate(self.alone)

    @property
    def ttft_ratio(self) -> float:
        """Ratio of the 99th percentiles, with the crowd outside and without."""
        return _ratio(_p(self.overload.ttft_s, 99), _p(self.full_queue.ttft_s, 99))

    @property
    def served_ratio(self) -> float:
        """Ratio of the served requests a second, with the crowd outside and without."""
        return _ratio(_rate(self.overload), _rate(self.full_queue))

    @property
    def refusal_s(self) -> float:
        """Processor time of the API process for each refusal: what is left after those who were served."""
        served_s = _ratio(self.cores_alone.api, _rate(self.alone))
        refusing = self.cores.api - served_s * _rate(self.overload)
        return max(0.0, refusing) / max(_refusals_hz(self.overload), 1e-9)

    @property
    def refusing_share(self) -> float:
        """Part of one core that all refusals took."""
        return self.refusal_s * _refusals_hz(self.overload)

    def faults(self) -> list[str]:
        """Faults that were found; nothing on a good day."""
        faults = [f"{num} times {kind}" for each in self._all() for kind, num in each.others.items()]
        named = zip(_ROUNDS, self._all(), strict=True)
        faults += [f"nobody was served: {name}" for name, each in named if not each.e2e_s]
        if _p(self.overload.refused_s, 99) > _REFUSAL_P99_S:
            faults.append(f"the 99th percentile of the 429s is over {_REFUSAL_P99_S * 1e3:.0f} ms")
        if self.ttft_ratio > _MAX_TTFT_RATIO:
            faults.append(f"the crowd outside makes the first token {self.ttft_ratio:.2f} times as late")
        if self.served_ratio < _MIN_SERVED_RATIO:
            faults.append(f"the crowd outside leaves {self.served_ratio:.2f} of those who are served")
        if self.refusing_share > _MAX_REFUSING_SHARE:
            faults.append(f"refusals take {self.refusing_share:.1%} of one core")
        told = self.overload.retry_after_s
        if told and not _MIN_RETRY_S <= min(told) <= max(told) <= _MAX_RETRY_S:
            faults.append(f"Retry-After was from {min(told)} to {max(told)} s")
        return faults

    def table(self) -> str:
        lines = [
            f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores for client, API and engine process; "
            f"{NUM_SEATS} seats, {NUM_PLACES} places in the queue",
            f"capacity {self.capacity_hz:.1f} requests/s; "
            f"offered {self.factor:g} times that, {self.factor * self.capacity_hz:.0f}/s, "
            f"for {self.overload.took_s:.0f} s",
            f"{'':22}{'served/s':>10}{'refused/s':>11}{'TTFT p50':>10}{'p99':>8}{'e2e p50':>9}{'p99':>8}  ms",
        ]
        lines += [_row(name, seen) for name, seen in zip(_ROUNDS, self._all(), strict=True)]
        refused, told, late = (self.overload.refused_s, self.overload.retry_after_s, self.overload.late_s)
        lines += [
            f"429 after ms: p50 {_ms(refused, 50):.1f}, p99 {_ms(refused, 99):.1f}, "
            f"longest {_ms(refused, 100):.1f}",
            f"Retry-After: from {min(told, default=0)} to {max(told, default=0)} s; "
            f"the queue needs {_ratio(NUM_PLACES, self.capacity_hz):.2f} s to empty",
            f"time to first token, p99: {self.ttft_ratio:.2f} times that without the crowd",
            f"served: {self.served_ratio:.2f} of those without the crowd",
            f"requests sent late by ms: p50 {_ms(late, 50):.1f}, p99 {_ms(late, 99):.1f}",
            f"cores busy: client {self.cores.client:.2f}, API process {self.cores.api:.2f}, "
            f"engine process {self.cores.engine:.2f}",
            f"a refusal takes {self.refusal_s * 1e6:.0f} us of the API process; all of them "
            f"{self.refusing_share:.1%} of one core",
            f"the API process has grown by {self.grown_bytes / 2**20:.1f} MiB",
        ]
        return "\n".join([*lines, *(f"FAULT: {fault}" for fault in self.faults())])

    def _all(self) -> tuple[Seen, Seen, Seen]:
        return self.alone, self.full_queue, self.overload


def _row(name: str, seen: Seen) -> str:
    return (
        f"{name:22}{_rate(seen):10.1f}{_refusals_hz(seen):11.1f}"
        f"{_ms(seen.ttft_s, 50):10.0f}{_ms(seen.ttft_s, 99):8.0f}{_ms(seen.e2e_s, 50):9.0f}"
        f"{_ms(seen.e2e_s, 99):8.0f}"
    )


def _rate(seen: Seen) -> float:
    return len(seen.e2e_s) / seen.took_s


def _ratio(part: float, whole: float) -> float:
    """The ratio, or 0 where nothing can be compared: nobody was served, which is a fault of its own."""
    return part / whole if whole else 0.0


def _refusals_hz(seen: Seen) -> float:
    return len(seen.refused_s) / seen.took_s


def _p(seconds: Sequence[float], percent: float) -> float:
    return percentile(sorted(seconds), percent) if seconds else 0.0


def _ms(seconds: Sequence[float], percent: float) -> float:
    return _p(seconds, percent) * 1e3


async def measure(
    server: OwnServer, crowd: Crowd | PlainCrowd, *, factor: float, seconds: float, turns: int
) -> Rounds:
    """All three rounds, after a short one that warms everything up."""
    await crowd.closed_loop(NUM_SEATS, min(seconds, 2.0))
    before = held_by(server.pid).memory_bytes
    pids = server.pid, server.engine_pid or 0
    before_s = _spent_s(crowd, pids)
    alone = await crowd.closed_loop(NUM_SEATS, seconds)
    cores_alone = _cores(_since_s(crowd, pids, before_s), alone)
    rate_hz = factor * (_rate(alone) or 1.0)  # where nobody was served, some offer is the last to look at
    full_queue, overload, spent_s = Seen(), Seen(), [0.0] * (1 + len(pids))
    for _ in range(turns):
        gc.collect()
        gc.freeze()  # a long collection in the client would look like a slow server
        full_queue.add(await crowd.closed_loop(NUM_SEATS + NUM_PLACES, seconds / turns))
        before_s = _spent_s(crowd, pids)
        overload.add(await crowd.open_loop(rate_hz, seconds / turns))
        spent_s = [sum(each) for each in zip(spent_s, _since_s(crowd, pids, before_s), strict=True)]
    return Rounds(
        alone=alone,
        full_queue=full_queue,
        overload=overload,
        factor=factor,
        grown_bytes=held_by(server.pid).memory_bytes - before,
        cores_alone=cores_alone,
        cores=_cores(spent_s, overload),
    )


def _spent_s(crowd: Crowd | PlainCrowd, pids: Sequence[int]) -> list[float]:
    """Processor time of the client, and of each process."""
    client_s = crowd.spent_s if isinstance(crowd, PlainCrowd) else processor_s(os.getpid())
    return [client_s, *map(processor_s, pids)]


def _since_s(crowd: Crowd | PlainCrowd, pids: Sequence[int], before_s: Sequence[float]) -> list[float]:
    return [now_s - then_s for now_s, then_s in zip(_spent_s(crowd, pids), before_s, strict=True)]


def _cores(spent_s: Sequence[float], seen: Seen) -> Cores:
    """Divide the processor time of client, API process and engine process by the time of the round."""
    client, api, engine = (each_s / seen.took_s for each_s in spent_s)
    return Cores(client=client, api=api, engine=engine)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if anything was not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.overload", allow_abbrev=False)
    parser.add_argument("--factor", type=float, default=10.0, metavar="TIMES", help="default %(default)g")
    parser.add_argument("--seconds", type=float, default=100.0, metavar="S", help="of each round")
    parser.add_argument(
        "--turns",
        type=int,
        default=20,
        metavar="N",
        help="of the second and third round; default %(default)d",
    )
    parser.add_argument("--output-len", type=int, default=128, metavar="TOKENS", help="of each reply")
    parser.add_argument("--client", choices=("own", "plain"), default="own", help="default %(default)s")
    parser.add_argument("--args", default="", metavar="WORDS", help="added to `tokenyard serve`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as well")
    options = parser.parse_args(list(argv))
    if options.turns < 1:
        parser.error("--turns: at least 1")
    serve = ("--max-num-seqs", str(NUM_SEATS), "--max-queued-requests", str(NUM_PLACES), "--num-threads", "1")
    with own_server((*serve, *options.args.split())) as server:
        crowd: Crowd | PlainCrowd = Crowd(server.target, output_len=options.output_len, seed=0)
        if options.client == "plain":
            crowd = PlainCrowd(server.target, output_len=options.output_len)
        rounds = asyncio.run(
            measure(server, crowd, factor=options.factor, seconds=options.seconds, turns=options.turns)
        )
    print(rounds.table())
    if options.json:
        options.json.write_bytes(orjson.dumps(rounds, option=orjson.OPT_INDENT_2))
    return 1 if rounds.faults() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
