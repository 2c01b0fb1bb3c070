"""Options in, one line for each number of streams and rate out.

    python -m campaigns.api_throughput [--streams 64,256,1024] [--rates 5000,10000,20000,40000] [--seconds 6]
                                   [--endpoint chat] [--trees FOLDER,FOLDER]

Serves the built-in tokenizer with a stand-in for the engine process, opens so many streams, and has every one
of them get one token at an even pace, so that all together come to the rate. What the API process cannot send
at once it merges: then a chunk has more than one token, and the delay shows whether it keeps up.

Owns: the order of runs, and the processes of each.
Never: what is counted (reader.py) and what follows from it (result.py).
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.load.client import Endpoint
from campaigns.api_throughput.reader import Readings
from campaigns.api_throughput.result import HEADER, Result, Steps, summarize
from campaigns.servers.free_ports import free_port
from campaigns.servers.running import ROOT, Launch, PeerFailed, running
from campaigns.stack_cost import source_trees

HERE = Path(__file__).resolve().parent
_MODEL = "tiny"
_TOKEN_TEXT, _TOKEN_ID = " the", 272  # of the built-in tokenizer
_READY_WITHIN_S, _SLACK_S = 60.0, 120.0
_PROMPTS: dict[Endpoint, dict[str, Any]] = {
    Endpoint.COMPLETIONS: {"prompt": "Go."},
    Endpoint.CHAT: {"messages": [{"role": "user", "content": "Go."}]},
}
_PATHS = {Endpoint.COMPLETIONS: "/v1/completions", Endpoint.CHAT: "/v1/chat/completions"}


def measure(
    tree: Path,
    endpoint: Endpoint,
    *,
    num_streams: int,
    rate: float,
    seconds: float,
    words: Sequence[str] = (),
) -> Result:
    """One run with the sources in `tree`. Raises PeerFailed."""
    num_tokens = max(2, round(rate * seconds / num_streams))
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        steps_file, bodies = Path(folder) / "steps.json", Path(folder) / "bodies"
        interpreter = _interpreter(Path(folder), num_streams, num_streams / rate, steps_file)
        bodies.write_bytes(b"\n".join([_body(endpoint, num_tokens)] * num_streams))
        command = (
            *(sys.executable, str(HERE / "launcher.py"), str(interpreter), "serve", "--port", str(port)),
            *("--served-model-name", _MODEL, "--max-queued-requests", str(2 * num_streams), *words),
        )
        launch = Launch(command=command, variables={"PYTHONPATH": str(tree)}, folder=tree, served_name=_MODEL)
        log = Path(folder) / "server.log"
        with running(
            launch, port=port, ready_path="/v1/models", log=log, ready_within_s=_READY_WITHIN_S
        ) as server:
            reader = (sys.executable, "-m", "campaigns.api_throughput.reader", str(port), str(server.pid))
            done = subprocess.run(
                (*reader, _PATHS[endpoint], str(bodies)),
                cwd=ROOT,
                capture_output=True,
                timeout=seconds * 10 + _SLACK_S,
                check=False,
            )
        if done.returncode:
            raise PeerFailed(f"was not read to the end: {done.stderr.decode().splitlines()[-1]}")
        readings = msgspec.json.decode(done.stdout, type=Readings)
        steps = msgspec.json.decode(steps_file.read_bytes(), type=Steps)
        return summarize(readings, steps, len(_TOKEN_TEXT))


def _interpreter(folder: Path, num_streams: int, interval_s: float, steps_file: Path) -> Path:
    """A script that the server takes for its interpreter: it starts the stand-in as the engine process."""
    words = (sys.executable, HERE / "stand_in.py", num_streams, interval_s, steps_file)
    script = folder / "interpreter"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *engine.core.process*) exec {shlex.join(map(str, words))} "$@" ;; esac\n'
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    script.chmod(0o700)
    return script


def _body(endpoint: Endpoint, num_tokens: int) -> bytes:
    body = {
        "model": _MODEL,
        "stream": True,
        "allowed_token_ids": [_TOKEN_ID],
        "max_tokens": num_tokens,
        **_PROMPTS[endpoint],
    }
    return json.dumps(body).encode()


def _runs(options: argparse.Namespace) -> Iterator[tuple[Path, int, float]]:
    for num_streams in options.streams:
        for rate in options.rates:
            for tree in options.trees:
                yield tree, num_streams, rate


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if a server failed."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.api_throughput", allow_abbrev=False)
    parser.add_argument("--streams", type=_numbers, default=[64, 256, 1024], metavar="N,...")
    parser.add_argument(
        "--rates", type=_numbers, default=[5000, 10_000, 20_000, 40_000], metavar="TOKENS_PER_S,..."
    )
    parser.add_argument("--seconds", type=float, default=6.0, metavar="S", help="of generating, for each run")
    parser.add_argument("--endpoint", type=Endpoint, choices=list(Endpoint), default=Endpoint.COMPLETIONS)
    parser.add_argument("--args", default="", metavar="WORDS", help="added to `tokenyard serve`")
    parser.add_argument(
        "--trees", type=source_trees, default=[ROOT], metavar="FOLDER,...", help="default: this one"
    )
    options = parser.parse_args(list(argv))
    print(HEADER)
    try:
        for tree, num_streams, rate in _runs(options):
            result = measure(
                tree,
                options.endpoint,
                num_streams=num_streams,
                rate=rate,
                seconds=options.seconds,
                words=options.args.split(),
            )
            print(result, tree if len(options.trees) > 1 else "", flush=True)
    except PeerFailed as failure:
        print(f"campaigns.api_throughput: the server {failure}", file=sys.stderr)
        return 1
    return 0


def _numbers(text: str) -> list[int]:
    numbers = [int(number) for number in text.split(",")]
    if not all(0 < number <= 1_000_000 for number in numbers):
        raise argparse.ArgumentTypeError("expected whole numbers from 1 to 1000000")
    return numbers
