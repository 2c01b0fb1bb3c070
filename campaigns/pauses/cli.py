"""The longest pause of a neighbour's stream beside the dearest requests that are let in, and where it lay.

    python -m campaigns.pauses [--beside grammars|bodies] [--only WORDS] [--seconds 8] [--args WORDS]

The stream alone first, then beside each kind of request: clients who ask again whatever becomes of it. The
pauses of the stream that is alone are the machine's own. On a machine that does other work they are long
already, and all rows with them: the table prints them first. Below it, the longest pauses of each row come
again, with what each process did meanwhile. In `served` the reader's own waiting for a core is left out.

Owns: the rounds and their table. Never: judges; the promise is about a quiet machine.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import orjson

from bench.load.load_report import percentile
from bench.trace.trace_reading import read_trace
from campaigns.pauses.crowds import BODIES, GRAMMARS, Crowd
from campaigns.pauses.neighbour import Pause, Readings
from campaigns.pauses.places import place_of
from campaigns.servers.own_server import SERVED_NAME, OwnServer, own_server
from server.http.http_client import ExchangeFailed, Timeouts, exchange

_TIMEOUT_S = 60.0
_COME_AGAIN_S = 0.05
_NUM_PLACED = 3
"""Pauses of a round of which it is said where they lay."""


async def measure(server: OwnServer, crowd: Crowd | None, seconds: float) -> tuple[Readings, Counter[str]]:
    """Readings of the neighbour, and what became of the others."""
    ends: Counter[str] = Counter()
    is_over = asyncio.Event()

    async def ask_again(crowd: Crowd, body: bytes) -> None:
        while not is_over.is_set():
            ends[await _ask(server, crowd.path, body)] += 1
            await asyncio.sleep(_COME_AGAIN_S)

    others = []
    if crowd is not None:
        body = crowd.body()
        others = [asyncio.create_task(ask_again(crowd, body)) for _ in range(crowd.num_clients)]
    readings = await _neighbour(server, seconds)
    is_over.set()
    await asyncio.gather(*others)
    return readings, ends


async def _neighbour(server: OwnServer, seconds: float) -> Readings:
    words = map(str, (server.target.port, server.pid, server.engine_pid, seconds))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "campaigns.pauses.neighbour", *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    # With its usage each token is an event; one that ends within a character would have none of its own.
    usage = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"prompt": "y", "max_tokens": 400, "stream": True, "stream_options": usage, "ignore_eos": True}
    said, _ = await process.communicate(orjson.dumps({"model": SERVED_NAME, **fields}))
    if process.returncode:
        raise SystemExit("the neighbour has failed")
    return msgspec.json.decode(said, type=Readings)


async def _ask(server: OwnServer, path: str, body: bytes) -> str:
    """Return the status; 0 where there was none."""
    wire = server.target.request("POST", path, body)
    if path == "/v1/files":
        wire = wire.replace(b"application/json", b"multipart/form-data; boundary=b", 1)
    with contextlib.suppress(ExchangeFailed):
        return str((await exchange(server.target, wire, timeouts=Timeouts(whole_s=_TIMEOUT_S))).status)
    return "0"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.pauses", allow_abbrev=False)
    parser.add_argument("--beside", choices=("grammars", "bodies"), help="only these; default both")
    parser.add_argument("--only", metavar="WORDS", help="only rows with these words in their name")
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S", help="of each round")
    parser.add_argument("--args", default="", metavar="WORDS", help="added to `tokenyard serve`")
    options = parser.parse_args(list(argv))
    kinds = {"grammars": GRAMMARS, "bodies": BODIES}
    chosen = kinds[options.beside] if options.beside else {**GRAMMARS, **BODIES}
    rounds: dict[str, Crowd | None] = {"alone": None, **chosen}
    if options.only is not None:
        rounds = {name: crowd for name, crowd in rounds.items() if options.only in name}
    print(f"{'':28}{'tokens/s':>9}{'p99':>8}{'longest':>9}{'served':>9}  ms; replies to the others by status")
    longest: dict[str, list[Pause]] = {}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "steps"
        with own_server(
            ["--state-folder", folder, "--trace-steps", str(trace), *options.args.split()]
        ) as server:
            for name, crowd in rounds.items():
                readings, ends = asyncio.run(measure(server, crowd, options.seconds))
                longest[name] = _print_row(name, readings, options.seconds, ends)
        steps = list(read_trace(trace))
    for name, pauses in longest.items():
        print(f"\n{name}")
        for pause in pauses:
            print(f"  {place_of(pause, steps)}")
    return 0


def _print_row(name: str, readings: Readings, seconds: float, ends: Counter[str]) -> list[Pause]:
    """Print one row of the table, and return its longest pauses."""
    ordered = sorted(readings.pauses, key=lambda pause: pause.lasted_s)
    lasted_s = [pause.lasted_s for pause in ordered] or [0.0]
    rate = readings.num_events / seconds
    p99, most = percentile(lasted_s, 99) * 1e3, max(lasted_s) * 1e3
    of_server = max((pause.of_server_s for pause in readings.pauses), default=0.0) * 1e3
    print(f"{name:28}{rate:9.0f}{p99:8.0f}{most:9.0f}{of_server:9.0f}  {dict(ends)}", flush=True)
    return ordered[: -_NUM_PLACED - 1 : -1]
