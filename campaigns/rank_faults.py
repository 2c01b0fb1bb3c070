"""Ranks of a divided model that are killed or stopped at random moments, and what they use while idle.

    python -m campaigns.rank_faults [--rounds 20] [--first 0] [--by tensor] [--idle-seconds 30] [--args WORDS]

Starts `tokenyard serve` on the built-in model, divided between two ranks. In each round streams begin, and
a random rank, or the engine process, gets SIGKILL at a random moment, or every fifth round SIGSTOP. Then
all streams must have ended, in time, no process and no shared memory of the dead group may be left, and the
next group must answer. Before that, the processor time of idle ranks is measured.

Owns: the rounds and their judgement.
Never: a rank that it did not start.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from campaigns.servers.own_server import SERVED_NAME, OwnServer, own_server
from campaigns.servers.processes import processor_s, ranks_of
from server.edge.http.http_client import ExchangeFailed, Timeouts, exchange

HEARTBEAT_S = 3.0
NUM_STREAMS, LONG = 4, 1900
DEATHS_OF_A_SERVER = 3
"""After one more within five minutes it gives up."""
_TIMEOUTS = Timeouts(whole_s=120.0)
_STOP_EVERY = 5
_KILLED_WITHIN_S, _STOPPED_WITHIN_S = 1.0, HEARTBEAT_S + 2.0
READY_WITHIN_S = 120.0
_MOST_IDLE_CORE = 0.01
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One rank's end."""

    how: signal.Signals
    rank: int
    ended_s: float
    """From the signal to the end of the last stream."""
    ready_s: float
    """From the signal to the first answer of the next group."""
    faults: tuple[str, ...]


async def ask(server: OwnServer, num_tokens: int) -> bool:
    """Return whether all tokens came."""
    body = {"model": SERVED_NAME, "prompt": "Once", "max_tokens": num_tokens, "ignore_eos": True}
    wire = server.target.request("POST", "/v1/completions", orjson.dumps(body))
    try:
        return (await exchange(server.target, wire, timeouts=_TIMEOUTS)).status == 200
    except ExchangeFailed:
        return False


async def strike(server: OwnServer, how: signal.Signals, dice: random.Random) -> Round:
    """Begin streams, end a rank, and judge what follows."""
    pids = ranks_of(server.engine_pid)
    shared = set(os.listdir(_SHARED_MEMORY))
    streams = [asyncio.create_task(ask(server, LONG)) for _ in range(NUM_STREAMS)]
    await asyncio.sleep(dice.uniform(0.05, 0.8))
    rank = dice.randrange(len(pids))
    struck_s = time.monotonic()
    os.kill(pids[rank], how)
    answers = await asyncio.gather(*streams)
    ended_s = time.monotonic() - struck_s
    faults = ["a stream ended as if nothing had happened"] * sum(answers)
    within_s = _KILLED_WITHIN_S if how is signal.SIGKILL else _STOPPED_WITHIN_S
    if ended_s > within_s:
        faults.append(f"the streams ended after {ended_s:.2f} s")
    while not await ask(server, 4):
        if time.monotonic() - struck_s > READY_WITHIN_S:
            raise SystemExit(f"no answer {READY_WITHIN_S:g} s after rank {rank} got {how.name}")
        await asyncio.sleep(0.1)
    ready_s = time.monotonic() - struck_s
    faults += [f"process {pid} is left" for pid in pids if Path(f"/proc/{pid}").exists()]
    left = set(os.listdir(_SHARED_MEMORY)) - shared
    faults += [f"{name} is left in shared memory" for name in left if "tokenyard" in name]
    return Round(how=how, rank=rank, ended_s=ended_s, ready_s=ready_s, faults=tuple(faults))


async def rounds(server: OwnServer, numbers: range) -> list[Round]:
    """Strike once for each number."""
    done = []
    for number in numbers:
        dice = random.Random(number)
        is_stop = number % _STOP_EVERY == _STOP_EVERY - 1
        done.append(await strike(server, signal.SIGSTOP if is_stop else signal.SIGKILL, dice))
        last = done[-1]
        print(
            f"{number + 1:3} rank {last.rank} {last.how.name}: streams ended after {last.ended_s:.2f} s, "
            f"an answer after {last.ready_s:.1f} s",
            *(f"FAULT: {fault}" for fault in last.faults),
            flush=True,
        )
    return done


async def idle_cores(server: OwnServer, seconds: float) -> list[float]:
    """Measure the share of a core that each rank uses without requests."""
    await ask(server, 4)
    pids = ranks_of(server.engine_pid)
    before_s = [processor_s(pid) for pid in pids]
    await asyncio.sleep(seconds)
    return [(processor_s(pid) - each) / seconds for pid, each in zip(pids, before_s, strict=True)]


def main(argv: Sequence[str]) -> int:
    """Return 1 if anything was not as promised."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.rank_faults", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="default %(default)s")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first round")
    parser.add_argument("--by", choices=("tensor", "pipeline"), default="tensor", help="default %(default)s")
    parser.add_argument("--idle-seconds", type=float, default=30.0, metavar="S", help="default %(default)g")
    parser.add_argument("--args", default="", metavar="WORDS", help="added to `tokenyard serve`")
    options = parser.parse_args(list(argv))
    division = (f"--{options.by}-parallel-size", "2")
    ranks = (*division, "--num-threads", "1", "--heartbeat-timeout", f"{HEARTBEAT_S:g}")
    words, num_faults = (*ranks, *options.args.split()), 0
    end = options.first + options.rounds
    for first in range(options.first, end, DEATHS_OF_A_SERVER):
        with own_server(words) as server:
            if first == 0:
                cores = asyncio.run(idle_cores(server, options.idle_seconds))
                print("idle ranks:", ", ".join(f"{core:.2%} of a core" for core in cores))
                num_faults += sum(core > _MOST_IDLE_CORE for core in cores)
            numbers = range(first, min(first + DEATHS_OF_A_SERVER, end))
            num_faults += sum(bool(each.faults) for each in asyncio.run(rounds(server, numbers)))
    print(f"{num_faults} rounds or idle ranks are not as promised")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
