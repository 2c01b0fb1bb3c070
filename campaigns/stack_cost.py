"""Cost of serving beside the model: processor time of the two processes, for each token and each request.

    python -m campaigns.stack_cost [--trees FOLDER,FOLDER] [--rounds N] [--endpoint chat]
                                [--output-len N]

Starts `tokenyard serve` with the built-in tiny model in each tree of sources in turn, sends it a closed loop
of 64 clients, and reads what the processes used. Processor time, not the clock: on a machine that others use
too it hardly changes, and a difference between two trees is a difference between two programs.

Owns: the measurement.
Never: the servers' insides; all it knows of them is in /proc.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.load.client import Endpoint, LoadRun, RequestStyle, UsageMode, measure_words
from bench.load.report import summarize
from bench.load.request_record import RequestRecord
from bench.load.workload import Shape, plan, synthetic_prompts
from campaigns.servers.free_ports import free_port
from campaigns.servers.processes import engine_of, processor_s
from campaigns.servers.running import ROOT, Launch, PeerFailed, running
from server.edge.http.http_client import Target

_CONCURRENCY, _INPUT_LEN, _OUTPUT_LEN = 64, 32, 24
_MAX_OUTPUT_LEN = 1024
_READY_WITHIN_S, _MAX_RUN_S = 120.0, 300.0
_SERVED_NAME = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of one run."""

    api_s: float
    """Processor seconds of the API process, both kinds."""
    engine_s: float
    num_requests: int
    num_tokens: int
    tokens_per_s: float

    def __str__(self) -> str:
        return (
            f"API process {self.api_s / self.num_tokens * 1e6:6.1f} us a token, "
            f"{self.api_s / self.num_requests * 1e3:5.2f} ms a request; "
            f"engine process {self.engine_s / self.num_tokens * 1e6:6.1f} us a token; "
            f"{self.tokens_per_s:6.0f} output tokens/s"
        )


def measure(
    tree: Path,
    endpoint: Endpoint,
    *,
    num_requests: int,
    seed: int,
    words: Sequence[str],
    output_len: int = _OUTPUT_LEN,
) -> Cost:
    """Serve the sources in `tree` and load them once. Raises PeerFailed."""
    port = free_port()
    command = (
        *(sys.executable, "-m", "server", "serve", "--port", str(port), "--num-threads", "1"),
        *("--served-model-name", _SERVED_NAME, *words),
    )
    launch = Launch(command=command, variables={}, folder=tree, served_name=_SERVED_NAME)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with running(
            launch, port=port, ready_path="/v1/models", log=log, ready_within_s=_READY_WITHIN_S
        ) as server:
            engine_pid = engine_of(server.pid)
            if engine_pid is None:
                raise PeerFailed("has no engine process")
            asyncio.run(
                send_load(port, endpoint, _CONCURRENCY, seed + 1, output_len)
            )  # the first of everything
            before = processor_s(server.pid), processor_s(engine_pid)
            records = asyncio.run(send_load(port, endpoint, num_requests, seed, output_len))
            after = processor_s(server.pid), processor_s(engine_pid)
    summary = summarize(records, num_planned=num_requests)
    if summary.num_completed < num_requests:
        raise PeerFailed(
            f"{num_requests - summary.num_completed} requests failed: {summary.example_messages}"
        )
    return Cost(
        api_s=after[0] - before[0],
        engine_s=after[1] - before[1],
        num_requests=num_requests,
        num_tokens=summary.num_output_tokens,
        tokens_per_s=summary.output_tokens_per_s,
    )


async def send_load(
    port: int, endpoint: Endpoint, num_requests: int, seed: int, output_len: int
) -> list[RequestRecord]:
    target = Target.parse(f"http://127.0.0.1:{port}")
    style = RequestStyle(
        endpoint=endpoint,
        model=_SERVED_NAME,
        temperature=0.0,
        ignores_eos=True,
        sends_priority=False,
        usage=UsageMode.CONTINUOUS,
        seed=seed,
        timeout_s=_MAX_RUN_S,
    )
    shape = Shape(num_prompts=num_requests, input_len=_INPUT_LEN, output_len=output_len, shared_prefix_len=0)
    prompts = synthetic_prompts(shape, await measure_words(target, style), seed)
    requests = plan(prompts, pace=None, priority_mix=(), seed=seed)
    run = LoadRun(target, style, on_record=lambda _: None)
    return await run.run_closed(requests, concurrency=_CONCURRENCY, max_duration_s=_MAX_RUN_S)


def _rounds(options: argparse.Namespace) -> Iterator[tuple[Path, Cost]]:
    for number in range(options.rounds):
        for tree in options.trees if number % 2 == 0 else reversed(options.trees):
            cost = measure(
                tree,
                options.endpoint,
                num_requests=options.num_prompts,
                seed=100 * number,
                words=options.args.split(),
                output_len=options.output_len,
            )
            print(f"round {number + 1}, {tree}: {cost}", file=sys.stderr)
            yield tree, cost


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if a server failed."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.stack_cost", allow_abbrev=False)
    parser.add_argument(
        "--trees", type=source_trees, default=[ROOT], metavar="FOLDER,...", help="default: this one"
    )
    parser.add_argument("--rounds", type=int, choices=range(1, 101), default=3, metavar="N")
    parser.add_argument("--num-prompts", type=int, choices=range(64, 100_001), default=1024, metavar="N")
    parser.add_argument(
        "--output-len",
        type=int,
        choices=range(1, _MAX_OUTPUT_LEN + 1),
        default=_OUTPUT_LEN,
        metavar="N",
        help="tokens of each reply; with few, what a request costs counts most",
    )
    parser.add_argument("--endpoint", type=Endpoint, choices=list(Endpoint), default=Endpoint.COMPLETIONS)
    parser.add_argument("--args", default="", metavar="WORDS", help="added to `tokenyard serve`")
    options = parser.parse_args(list(argv))
    try:
        costs = list(_rounds(options))
    except PeerFailed as failure:
        print(f"campaigns.stack_cost: {failure}", file=sys.stderr)
        return 1
    for tree in options.trees:
        own = [cost for where, cost in costs if where == tree]
        api_us = median(cost.api_s / cost.num_tokens for cost in own) * 1e6
        engine_us = median(cost.engine_s / cost.num_tokens for cost in own) * 1e6
        rate = median(cost.tokens_per_s for cost in own)
        print(f"{tree}: {api_us:.1f} us API, {engine_us:.1f} us engine a token; {rate:.0f} output tokens/s")
    return 0


def source_trees(text: str) -> list[Path]:
    folders = [Path(name).resolve() for name in text.split(",")]
    for folder in folders:
        if not (folder / "server").is_dir():
            raise argparse.ArgumentTypeError(f"{folder} is no tree of Tokenyard's sources")
    return folders


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
