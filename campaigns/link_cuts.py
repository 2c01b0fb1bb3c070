"""A link between two nodes that is cut: seconds until the engine has ended, and until it serves again.

    python -m campaigns.link_cuts [--rounds 3] [--by tensor,pipeline]

Starts `tokenyard serve` on the built-in model as two nodes of this machine, which reach each other over a
relay alone: once with each layer divided between them, and once with a stage on each. In each round streams
begin, and at a random moment the relay carries nothing any more. Both ends are left to notice that, as with a
pulled cable. Once the engine process has ended it carries again, and the next one goes on with the streams.

Owns: the rounds and their judgement.
Never: closes a connection itself.
"""

import argparse
import asyncio
import random
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import orjson

from campaigns.servers.free_ports import free_port
from campaigns.servers.own_server import SERVED_NAME, OwnServer, own_server
from campaigns.servers.relay import Relay, relaying
from campaigns.servers.running import ROOT
from server.edge.http.http_client import ExchangeFailed, Timeouts, exchange

_NUM_STREAMS, _LONG = 4, 1900
_DEATHS_OF_A_SERVER = 3
"""After one more within five minutes it gives up."""
_TIMEOUTS = Timeouts(whole_s=120.0)
_READY_WITHIN_S = 120.0
_ENDED_WITHIN_S = 6.0
_HOST = "127.0.0.1"
_LEAVES_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut."""

    ended_s: float
    """From the cut to the end of the engine process."""
    healed_s: float
    """From the end of the cut to the first answer."""
    faults: tuple[str, ...]


async def _ask(server: OwnServer, num_tokens: int) -> bool:
    """Return whether all tokens came."""
    body = {"model": SERVED_NAME, "prompt": "Once", "max_tokens": num_tokens, "ignore_eos": True}
    wire = server.target.request("POST", "/v1/completions", orjson.dumps(body))
    try:
        return (await exchange(server.target, wire, timeouts=_TIMEOUTS)).status == 200
    except ExchangeFailed:
        return False


@contextmanager
def _second_node(words: Sequence[str]) -> Iterator[None]:
    node = subprocess.Popen(
        (sys.executable, "-m", "server", "serve", *words),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        node.terminate()
        try:
            node.wait(_LEAVES_WITHIN_S)
        finally:
            node.kill()  # nothing happens if it has left


@asynccontextmanager
async def two_nodes(division: Sequence[str]) -> AsyncIterator[tuple[OwnServer, Relay]]:
    """Serve from two nodes; the second reaches the first over the relay."""
    port, key = free_port(), secrets.token_hex(32)
    both = (*division, "--num-threads", "1", "--nnodes", "2", "--cluster-key", key)
    first = (*both, "--node-rank", "0", "--master-addr", _HOST, "--cluster-port", str(port))
    async with relaying((_HOST, port)) as relay:
        second = (
            *both,
            "--node-rank",
            "1",
            "--master-addr",
            relay.address,
            "--cluster-port",
            str(relay.port),
        )
        with _second_node(second):
            serving = own_server(first)
            server = await asyncio.to_thread(serving.__enter__)
            try:
                await _answer(server)
                yield server, relay
            finally:
                await asyncio.to_thread(serving.__exit__, None, None, None)


async def _answer(server: OwnServer) -> float:
    """Return the seconds until the first answer."""
    started_s = time.monotonic()
    while not await _ask(server, 4):
        if time.monotonic() - started_s > _READY_WITHIN_S:
            raise SystemExit(f"no answer within {_READY_WITHIN_S:g} s")
        await asyncio.sleep(0.1)
    return time.monotonic() - started_s


async def cut(server: OwnServer, relay: Relay, dice: random.Random) -> Cut:
    """Begin streams, cut, and judge what follows."""
    streams = [asyncio.create_task(_ask(server, _LONG)) for _ in range(_NUM_STREAMS)]
    await asyncio.sleep(dice.uniform(0.2, 0.8))
    died, cut_s = server.engine_pid, time.monotonic()
    relay.cut()
    faults = ["a stream ended before the cut"] * sum(stream.done() for stream in streams)
    while server.engine_pid == died and time.monotonic() - cut_s < _READY_WITHIN_S:
        await asyncio.sleep(0.02)
    ended_s = time.monotonic() - cut_s
    relay.mend()
    if ended_s > _ENDED_WITHIN_S:
        faults.append(f"the engine ended after {ended_s:.2f} s")
    healed_s = await _answer(server)
    faults += ["a stream did not go on"] * (await asyncio.gather(*streams)).count(False)
    return Cut(ended_s, healed_s, tuple(faults))


async def cuts(by: str, numbers: range) -> list[Cut]:
    """Cut once for each number."""
    done = []
    for first in range(numbers.start, numbers.stop, _DEATHS_OF_A_SERVER):
        async with two_nodes((f"--{by}-parallel-size", "2")) as (server, relay):
            for number in range(first, min(first + _DEATHS_OF_A_SERVER, numbers.stop)):
                done.append(await cut(server, relay, random.Random(number)))
                print(
                    f"{by} {number + 1:3}: the engine ended after {done[-1].ended_s:.2f} s, "
                    f"an answer {done[-1].healed_s:.1f} s after the mend",
                    *(f"FAULT: {fault}" for fault in done[-1].faults),
                    flush=True,
                )
    return done


def main(argv: Sequence[str]) -> int:
    """Return 1 if anything was not as promised."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.link_cuts", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default %(default)s")
    parser.add_argument("--by", default="tensor,pipeline", metavar="NAMES", help="default %(default)s")
    options = parser.parse_args(list(argv))
    done = [each for by in options.by.split(",") for each in asyncio.run(cuts(by, range(options.rounds)))]
    num_faults = sum(bool(each.faults) for each in done)
    print(f"{num_faults} of {len(done)} cuts did not end as promised")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
