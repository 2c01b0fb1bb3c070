"""The longest pause of a neighbour's stream beside requests with the dearest grammars that are let in.

    python -m campaigns.grammar_pauses [--seconds 10] [--args WORDS]

Streams alone first, then beside each kind of grammar: several clients who ask for many choices, and ask again
whatever becomes of it. The pauses of the stream that is alone are the machine's own. On a machine that does
other work they are long already, and all rows with them: the table prints them first.

Owns: the rounds and their table. Never: judges; the promise is about a quiet machine.
"""

import argparse
import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import orjson

from bench.load.load_report import percentile
from campaigns.servers.own_server import SERVED_NAME, OwnServer, own_server
from server.http.http_client import ExchangeFailed, Timeouts, exchange

_NUM_CLIENTS, _NUM_CHOICES = 4, 32
_TIMEOUT_S = 60.0
_KINDS: dict[str, dict[str, Any]] = {
    "alone": {},
    "an ambiguous rule": {"grammar": 'start: s\ns: "a" | s s | s s s'},
    "a worse one": {"grammar": "start: s\ns: /[a-z ]/ | s s | s s s | s s s s"},
    "counted repetitions": {"regex": "(.*a.{20}){5}"},
    "a schema of 300 properties": {
        "json": {"type": "object", "properties": {f"name{i}": {"type": "string"} for i in range(300)}}
    },
}


async def measure(
    server: OwnServer, constraint: dict[str, Any], seconds: float
) -> tuple[list[float], Counter[str]]:
    """Seconds between the events of the stream, and what became of the others."""
    ends: Counter[str] = Counter()
    pauses_s: list[float] = []
    until = asyncio.Event()

    async def ask_again() -> None:
        fields = {"prompt": "x", "n": _NUM_CHOICES, "max_tokens": 200, "structured_outputs": constraint}
        while not until.is_set():
            ends[str((await _post(server, fields))[0])] += 1
            await asyncio.sleep(0.05)

    others = [asyncio.create_task(ask_again()) for _ in range(_NUM_CLIENTS if constraint else 0)]
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while loop.time() - began_s < seconds:
        pauses_s += (await _post(server, {"prompt": "y", "max_tokens": 400, "stream": True}))[1]
    until.set()
    await asyncio.gather(*others)
    return pauses_s, ends


async def _post(server: OwnServer, fields: dict[str, Any]) -> tuple[int, list[float]]:
    last_s, pauses_s = 0.0, []

    def on_event(_: bytes, now_s: float) -> None:
        nonlocal last_s
        if last_s:
            pauses_s.append(now_s - last_s)
        last_s = now_s

    body = orjson.dumps({"model": SERVED_NAME, "ignore_eos": "structured_outputs" not in fields, **fields})
    wire = server.target.request("POST", "/v1/completions", body)
    with contextlib.suppress(ExchangeFailed):
        reply = await exchange(server.target, wire, timeouts=Timeouts(whole_s=_TIMEOUT_S), on_event=on_event)
        return reply.status, pauses_s
    return 0, pauses_s


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.grammar_pauses", allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="of each round")
    parser.add_argument("--args", default="", metavar="WORDS", help="added to `tokenyard serve`")
    options = parser.parse_args(list(argv))
    print(f"{'':28}{'tokens/s':>9}{'p99':>8}{'longest':>9}  ms; replies to the others by status")
    with own_server(options.args.split()) as server:
        for name, constraint in _KINDS.items():
            pauses_s, ends = asyncio.run(measure(server, constraint, options.seconds))
            ordered = sorted(pauses_s) or [0.0]
            rate = len(ordered) / options.seconds
            p99, longest = percentile(ordered, 99) * 1e3, ordered[-1] * 1e3
            print(f"{name:28}{rate:9.0f}{p99:8.0f}{longest:9.0f}  {dict(ends)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
