"""One process of two threads against two ranks, and two stages, of one thread each.

    python -m campaigns.rank_speed [--rounds 5] [--batches 1,8,32] [--threads 2]

Serves a model of random weights with the size of a 135M model, whose eight heads divide by two, in all three
ways at once, and lets one after the other answer as many streams as a batch has. A server that is not asked
sleeps, so the three hardly disturb each other. The exchange of sums is timed by itself, by two processes.

Owns: the rounds, and the table of tokens a second.
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

import orjson
import torch

from campaigns.checkpoints.make_shapes import SHAPES, write_shape
from campaigns.servers.own_server import SERVED_NAME, OwnServer, own_server
from server.http.http_client import Timeouts, exchange
from worker.cpu.kernel_build import build_library, find_library
from worker.ranks.shared_page import make_page
from worker.ranks.shared_ranks import SharedRanks

SHAPE = replace(SHAPES["smollm2-135m"], num_attention_heads=8, num_key_value_heads=4)
_NUM_TOKENS = 64
_SERVE = ("--max-model-len", "512", "--kv-cache-memory", "1GiB", "--max-num-seqs", "64")
_TIMEOUTS = Timeouts(whole_s=600.0)
_NUM_EXCHANGES = 2000


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


def _exchange_s(num_rows: int) -> float:
    """Return the median time of a sum over two processes, of the rows of one layer."""
    library, page, times = find_library() or build_library(), make_page(), []
    child = os.fork()
    ranks = SharedRanks(page, rank=1 if child == 0 else 0, size=2)
    ranks.join(library)
    sums = torch.ones(num_rows * SHAPE.hidden_size)
    for _ in range(_NUM_EXCHANGES):
        started_s = time.perf_counter()
        ranks.reduce(sums)
        times.append(time.perf_counter() - started_s)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return statistics.median(times)


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
        "two ranks": ("--tensor-parallel-size", "2", *each),
        "two stages": ("--pipeline-parallel-size", "2", *each),
    }
    exchange_s = {batch: _exchange_s(batch) for batch in batches}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        checkpoint = Path(folder) / "divisible-135m"
        write_shape(SHAPE, checkpoint)
        servers = {
            name: stack.enter_context(own_server((str(checkpoint), *_SERVE, *words)))
            for name, words in ways.items()
        }
        print(f"{'batch':>6}" + "".join(f"{name:>14}" for name in ways) + "   tokens/s (ratio to the first)")
        for batch in batches:
            _print_row(batch, servers, options.rounds, exchange_s[batch])
    return 0


def _print_row(batch: int, servers: dict[str, OwnServer], num_rounds: int, exchange_s: float) -> None:
    found: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(num_rounds + 1):
        for name, server in servers.items():
            rate = asyncio.run(_tokens_per_s(server, batch))
            if number:  # the first round warms up
                found[name].append(rate)
    medians = [statistics.median(rates) for rates in found.values()]
    step_s = batch / medians[1]
    share = 2 * SHAPE.num_hidden_layers * exchange_s / step_s
    print(
        f"{batch:6}" + "".join(f"{rate:8.1f} {rate / medians[0]:5.2f}" for rate in medians),
        f"  a sum takes {exchange_s * 1e6:.1f} us, all of a step {share:.1%} of it",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
