"""The longest pause of a neighbour's stream beside the dearest requests that are let in, and where it lay.

    python -m campaigns.pauses [--beside grammars|bodies|crowds|replies] [--only WORDS] [--seconds 8]
        [--args WORDS]

The stream alone first, then beside each kind of request: clients who ask again whatever becomes of it. The
pauses of the stream that is alone are the machine's own. On a machine that does other work they are long
already, and all rows with them: the table prints them first. Below it, the longest pauses of each row come
again, with what each process did meanwhile, and then the table once more as docs/security.md has it, to be
pasted there. In `served` the reader's own waiting for a core is left out.
Exit status 1 if any row breaks what is promised (verdict.py), 2 on a machine too busy to tell.

Owns: the rounds and their table. Never: what others send (crowds.py), or judges.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import orjson

from bench.load.report import percentile
from bench.trace.reading import read_trace
from campaigns.pauses.crowds import BODIES, CROWDED_BODIES, GRAMMARS, REPLIES, Crowd
from campaigns.pauses.neighbour import Readings
from campaigns.pauses.places import place_of
from campaigns.pauses.verdict import ALONE, Row, faults_of, why_not_judged
from campaigns.servers.own_server import SERVED_NAME, OwnServer, own_server
from server.edge.http.http_client import ExchangeFailed, Timeouts, exchange

_TIMEOUT_S = 60.0
_COME_AGAIN_S = 0.05
_NUM_PLACED = 3
"""Pauses of a round of which it is said where they lay."""
_NAME_CHARS = 40
_NOT_JUDGED = 2
PAGE_HEAD = """\
| Load | Tokens/s | p99, ms | Longest, ms | Longest of the server, ms |
|---|---|---|---|---|"""
"""Head of the table of docs/security.md."""
_KINDS = {"grammars": GRAMMARS, "bodies": BODIES, "crowds": CROWDED_BODIES, "replies": REPLIES}


async def measure(server: OwnServer, crowd: Crowd | None, seconds: float) -> Row:
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
    return Row(readings, ends)


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
        wire = wire.replace(b"Type: application/json", b"Type: multipart/form-data; boundary=b", 1)
    with contextlib.suppress(ExchangeFailed):
        return str((await exchange(server.target, wire, timeouts=Timeouts(whole_s=_TIMEOUT_S))).status)
    return "0"


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.pauses", allow_abbrev=False)
    parser.add_argument("--beside", choices=_KINDS, help="only these; default all")
    parser.add_argument("--only", metavar="WORDS", help="only rows with these words in their name")
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S", help="of each round")
    parser.add_argument("--args", default="", metavar="WORDS", help="added to `tokenyard serve`")
    options = parser.parse_args(list(argv))
    kinds = [_KINDS[options.beside]] if options.beside else _KINDS.values()
    rounds: dict[str, Crowd | None] = {ALONE: None}
    for kind in kinds:
        rounds |= {name: crowd for name, crowd in kind.items() if (options.only or "") in name}
    print(f"{'':{_NAME_CHARS}}{'tokens/s':>9}{'p99':>8}{'longest':>9}{'served':>9}  ms; replies by status")
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "steps"
        words = ("--state-folder", folder, "--trace-steps", str(trace), *options.args.split())
        with own_server(words) as server:
            for name, crowd in rounds.items():
                rows[name] = asyncio.run(measure(server, crowd, options.seconds))
                _print_row(name, rows[name], options.seconds)
        steps = list(read_trace(trace))
    for name, row in rows.items():
        print(f"\n{name}")
        for pause in row.longest(_NUM_PLACED):
            print(f"  {place_of(pause, steps)}")
    print(f"\n{page_table(rows, options.seconds)}")
    return _print_verdict(rows)


def page_table(rows: Mapping[str, Row], seconds: float) -> str:
    """The table in Markdown, as docs/security.md has it, of rounds that took so many seconds each."""
    lines = [PAGE_HEAD]
    for name, row in rows.items():
        cells = "none" if name == ALONE else name, *(f"{each:.0f}" for each in _figures(row, seconds))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _figures(row: Row, seconds: float) -> tuple[float, float, float, float]:
    """Return tokens a second and, in ms, the p99 of pauses, the longest, and the longest of the server."""
    lasted_s = [pause.lasted_s for pause in reversed(row.longest())] or [0.0]
    times_s = percentile(lasted_s, 99), lasted_s[-1], row.of_server_s
    p99_ms, most_ms, served_ms = (time_s * 1e3 for time_s in times_s)
    return row.readings.num_events / seconds, p99_ms, most_ms, served_ms


def _print_row(name: str, row: Row, seconds: float) -> None:
    """Print one row of the table."""
    rate, p99_ms, most_ms, served_ms = _figures(row, seconds)
    figures = f"{rate:9.0f}{p99_ms:8.0f}{most_ms:9.0f}{served_ms:9.0f}"
    print(f"{name:{_NAME_CHARS}}{figures}  {dict(row.ends)}", flush=True)


def _print_verdict(rows: Mapping[str, Row]) -> int:
    if why_not := why_not_judged(rows):
        print(f"\nnot judged: {why_not}")
        return _NOT_JUDGED
    faults = faults_of(rows)
    print("\n" + ("\n".join(f"FAULT: {fault}" for fault in faults) or "no promise broken"))
    return 1 if faults else 0
