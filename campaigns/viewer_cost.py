"""Cost of a viewer: processor time of the two processes with and without an open yard.

    python -m campaigns.viewer_cost [--rounds N] [--requests N] [--output-len N]

Starts `tokenyard serve` with the built-in model once and sends it the same closed loop of 64 clients again
and again, in turn without a viewer and with one that reads `GET /admin/events`; then the same at rest.

Owns: the measurement.
Never: a browser: what it draws is the viewer's own time.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from statistics import median
from time import monotonic

from bench.load.client import Endpoint
from campaigns.servers.own_server import OwnServer, own_server
from campaigns.servers.processes import processor_s
from campaigns.stack_cost import send_load
from server.edge.http.http_client import open_stream

_CONCURRENCY = 64
_SILENCE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """Processor seconds of one spell, with or without a viewer."""

    num_views: int
    """Views that the viewer has read; 0 without one."""
    api_s: float
    engine_s: float
    elapsed_s: float

    def __str__(self) -> str:
        return (
            f"{self.num_views} views, API process {self.api_s:.2f} s, engine process {self.engine_s:.2f} s, "
            f"in {self.elapsed_s:6.1f} s"
        )


async def busy(server: OwnServer, *, viewers: int, num_requests: int, output_len: int) -> Spell:
    """Measure a load of `num_requests` requests. Raises ExchangeFailed."""
    engine_pid = server.engine_pid
    assert engine_pid is not None, "it has been ready"
    async with _watching(server, viewers) as views:
        before = processor_s(server.pid), processor_s(engine_pid), monotonic()
        await send_load(server.target.port, Endpoint.COMPLETIONS, num_requests, 1, output_len)
        after = processor_s(server.pid), processor_s(engine_pid), monotonic()
        api_s, engine_s, elapsed_s = (late - early for late, early in zip(after, before, strict=True))
        return Spell(num_views=views[0], api_s=api_s, engine_s=engine_s, elapsed_s=elapsed_s)


async def at_rest(server: OwnServer, *, viewers: int, seconds: float) -> Spell:
    """Measure a server without requests. Raises ExchangeFailed."""
    engine_pid = server.engine_pid
    assert engine_pid is not None, "it has been ready"
    async with _watching(server, viewers) as views:
        before = processor_s(server.pid), processor_s(engine_pid)
        await asyncio.sleep(seconds)
        after = processor_s(server.pid), processor_s(engine_pid)
        return Spell(
            num_views=views[0],
            api_s=after[0] - before[0],
            engine_s=after[1] - before[1],
            elapsed_s=seconds,
        )


@contextlib.asynccontextmanager
async def _watching(server: OwnServer, viewers: int) -> AsyncGenerator[list[int], None]:
    """Read the views meanwhile; the list has the number of those that came."""
    count = [0]

    async def watch() -> None:
        async with open_stream(server.target, "GET", "/admin/events", silence_s=_SILENCE_S) as reply:
            async for _ in reply.events():
                count[0] += 1

    tasks = [asyncio.create_task(watch()) for _ in range(viewers)]
    try:
        yield count
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.viewer_cost", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, choices=range(1, 101), default=5, metavar="N")
    parser.add_argument("--requests", type=int, choices=range(64, 100_001), default=512, metavar="N")
    parser.add_argument("--output-len", type=int, choices=range(1, 641), default=200, metavar="N")
    parser.add_argument("--rest", type=float, default=20.0, metavar="SECONDS")
    options = parser.parse_args(list(argv))
    with own_server(["--num-threads", "1", "--page", "on"]) as server:
        asyncio.run(busy(server, viewers=0, num_requests=_CONCURRENCY, output_len=options.output_len))
        found: dict[int, list[Spell]] = {0: [], 1: []}
        for number in range(options.rounds):
            for viewers in (0, 1) if number % 2 == 0 else (1, 0):
                spell = asyncio.run(
                    busy(
                        server,
                        viewers=viewers,
                        num_requests=options.requests,
                        output_len=options.output_len,
                    )
                )
                print(f"round {number + 1}, {viewers} viewers: {spell}", file=sys.stderr)
                found[viewers].append(spell)
        for viewers, spells in found.items():
            api_s, engine_s = median(each.api_s for each in spells), median(each.engine_s for each in spells)
            print(f"load, {viewers} viewers: API process {api_s:.2f} s, engine process {engine_s:.2f} s")
        for viewers in (0, 1):
            spell = asyncio.run(at_rest(server, viewers=viewers, seconds=options.rest))
            print(f"rest, {viewers} viewers: {spell}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
