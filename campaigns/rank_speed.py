"""One process of two threads against two ranks, and two stages, of one thread each.

    python -m campaigns.rank_speed [--rounds 5] [--batches 1,8,32] [--threads 2]

Serves a model of random weights with the size of a 135M model, whose eight heads divide by two, in all three
ways at once, and lets one after the other answer as many streams as a batch has. A server that is not asked
sleeps, so the three hardly disturb each other. Of the two ranks it also says which parts of their steps the
first of them has spent on copying and adding sums, and on waiting for the other, as /metrics has them.

Owns: the rounds, and the table of tokens a second: medians of the rounds beside which other programs used a
tenth of a core at most, as far as there are any.
Never: judges; machines differ, and two ranks need two cores that nothing else uses.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import orjson

from campaigns.checkpoints.make_shapes import SHAPES, write_shape
from campaigns.servers.own_server import SERVED_NAME, Metrics, OwnServer, own_server
from campaigns.servers.processes import machine_s, processor_s, ranks_of
from server.edge.http.http_client import Timeouts, exchange

SHAPE = replace(SHAPES["smollm2-135m"], num_attention_heads=8, num_key_value_heads=4)
_NUM_TOKENS = 40
_SERVE = ("--max-model-len", "512", "--kv-cache-memory", "1GiB", "--max-num-seqs", "64")
_TIMEOUTS = Timeouts(whole_s=600.0)
_RANKS = "two ranks"
_BEAT_S = 1.1
"""Time after which the metrics of an engine without requests are of now."""
_MOST_OTHERS = 0.1


class _Round(NamedTuple):
    tokens_per_s: float
    others: float
    """Cores that other programs used."""


async def _tokens_per_s(server: OwnServer, num_streams: int) -> float:
    body = {"model": SERVED_NAME, "prompt": "Once", "max_tokens": _NUM_TOKENS, "ignore_eos": True}
    wire = server.target.request("POST", "/v1/completions", orjson.dumps(body))
    started_s = time.perf_counter()
    replies = await asyncio.gather(
        *(exchange(server.target, wire, timeouts=_TIMEOUTS) for _ in range(num_streams))
    )
    took_s = time.perf_counter() - started_s
    if any(reply.status != 200 for reply in replies):
        raise SystemExit(f"a request was refused: {replies[0].body!r}")
    return num_streams * _NUM_TOKENS / took_s


def _round(server: OwnServer, num_streams: int) -> _Round:
    pids = (os.getpid(), server.pid, *ranks_of(server.engine_pid))
    before_s = machine_s() - sum(map(processor_s, pids))
    tokens_per_s = asyncio.run(_tokens_per_s(server, num_streams))
    others_s = machine_s() - sum(map(processor_s, pids)) - before_s
    return _Round(tokens_per_s, others_s * tokens_per_s / (num_streams * _NUM_TOKENS))


async def _metrics(server: OwnServer) -> Metrics:
    await asyncio.sleep(_BEAT_S)
    return await server.metrics()


def _spent_s(metrics: Metrics, part: str) -> float:
    """Sum up the seconds of a part of the steps, or of the first rank within them."""
    return sum(
        seconds for name, seconds in metrics.items() if "_time_seconds" in name and f'part="{part}"' in name
    )


def main(argv: Sequence[str]) -> int:
    """Measure and print; return 0."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.rank_speed", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default %(default)s")
    parser.add_argument("--batches", default="1,8,32", metavar="SIZES", help="default %(default)s")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of the undivided model")
    options = parser.parse_args(list(argv))
    batches = [int(word) for word in options.batches.split(",")]
    each = ("--num-threads", str(options.threads // 2))
    ways = {
        "one process": ("--num-threads", str(options.threads)),
        _RANKS: ("--tensor-parallel-size", "2", *each),
        "two stages": ("--pipeline-parallel-size", "2", *each),
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        checkpoint = Path(folder) / "divisible-135m"
        write_shape(SHAPE, checkpoint)
        servers = {
            name: stack.enter_context(own_server((str(checkpoint), *_SERVE, *words)))
            for name, words in ways.items()
        }
        print(f"{'batch':>6}" + "".join(f"{name:>14}" for name in ways) + "   tokens/s (ratio to the first)")
        for batch in batches:
            _print_row(batch, servers, options.rounds)
    return 0


def _print_row(batch: int, servers: dict[str, OwnServer], num_rounds: int) -> None:
    found: dict[str, list[_Round]] = {name: [] for name in servers}
    before: Metrics = {}
    for number in range(num_rounds + 1):
        for name, server in servers.items():
            each = _round(server, batch)
            if number:
                found[name].append(each)
        if not number:  # the first round warms up
            before = asyncio.run(_metrics(servers[_RANKS]))
    after = asyncio.run(_metrics(servers[_RANKS]))
    quiet = [[each for each in rounds if each.others < _MOST_OTHERS] for rounds in found.values()]
    medians = [
        statistics.median(each.tokens_per_s for each in chosen or rounds)
        for chosen, rounds in zip(quiet, found.values(), strict=True)
    ]
    spent_s = {
        part: _spent_s(after, part) - _spent_s(before, part) for part in ("exchange", "wait", "execute")
    }
    print(
        f"{batch:6}" + "".join(f"{rate:8.1f} {rate / medians[0]:5.2f}" for rate in medians),
        f"  exchanges {spent_s['exchange'] / spent_s['execute']:.1%} of the ranks' steps,",
        f"waiting {spent_s['wait'] / spent_s['execute']:.1%};",
        f"rounds undisturbed: {', '.join(str(len(chosen)) for chosen in quiet)} of {num_rounds}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
