"""`tokenyard bench`: options in, a load run, its report out.

Owns: the command line of the load client and its exit status.
Never: the load itself (client.py) or its statistics (report.py).
"""

import argparse
import asyncio
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from bench.load.client import Endpoint, LoadRun, RequestStyle, UsageMode, first_model, measure_words
from bench.load.goodput import Limit, parse_limits
from bench.load.progress import progress
from bench.load.rate_sweep import RunOfSweep, SweepPoint, parse_sweep, render_sweep, run_sweep
from bench.load.report import render, summarize
from bench.load.request_record import RequestRecord
from bench.load.workload import (
    ONE_TOKEN_A_WORD,
    Arrivals,
    Pace,
    PlannedRequest,
    Shape,
    WordCost,
    WorkloadError,
    plan,
    read_prompts,
    synthetic_prompts,
)
from bench.words import WordParser
from server.edge.http.http_client import API_KEY_VARIABLE, ExchangeFailed, Target, key_from_environment

_DEFAULT_NUM_PROMPTS = 64
_DEFAULT_CONCURRENCY = 8
_DEFAULT_SATURATION_CONCURRENCY = 32
_DEFAULT_BURST_SIZE = 8
_FIRST_SWEEP_SEED = 1_000_000_000
"""Seed of the prompts of sweeps, away from those that people give."""
_MAX_PROMPTS = 1_000_000

_EPILOG = f"""\
Exit status: 0 if every request completed, 1 if some did not, 2 if the run could not start.
The same --seed sends the same prompts: give another one to keep a second run clear of the prefix cache
that the first has filled. The API key is read from {API_KEY_VARIABLE} where --api-key is not given.
"""


def main(argv: Sequence[str]) -> int:
    """Run `tokenyard bench` with the words behind it. Returns the exit status."""
    try:
        options = build_parser().parse_args(list(argv))
    except SystemExit as parsed:  # argparse has said all there is to say
        return int(parsed.code or 0)
    # Commas or spaces between limits: each word may hold several.
    options.goodput = [limit for limits in options.goodput for limit in limits]
    try:
        return asyncio.run(_serve(options))
    except (ExchangeFailed, WorkloadError) as error:
        kind = f"{error.kind}: " if isinstance(error, ExchangeFailed) else ""
        print(f"tokenyard bench: {kind}{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the run; from then on LoadRun takes it and reports what it has
        return 130


async def _serve(options: argparse.Namespace) -> int:
    _check_pace(options)
    if options.json:
        _check_writable(options.json)
    target: Target = options.base_url
    if key := options.api_key or key_from_environment():
        target = replace(target, api_key=key)
    style = await _style(options, target)
    load = _Load(options=options, target=target, style=style, cost=await _word_cost(options, target, style))
    if options.sweep:
        return await _serve_sweep(load)
    requests = load.plan(_pace(options, options.request_rate), options.seed)
    records, _ = await load.run(requests, is_open=options.request_rate is not None)
    summary = summarize(records, num_planned=len(requests), limits=options.goodput)
    print(render(summary))
    _write_json(load, len(requests), {"summary": summary.to_json(), "requests": list(records)})
    return 0 if summary.num_completed == len(requests) else 1


async def _serve_sweep(load: "_Load") -> int:
    options = load.options

    async def send(requests_per_s: float | None, place: int) -> RunOfSweep:
        seed = _FIRST_SWEEP_SEED + options.seed * (len(options.sweep) + 1) + place
        requests = load.plan(_pace(options, requests_per_s), seed)
        run, pace = "saturation", f"{_concurrency(options)} clients"
        if requests_per_s is not None:
            run, pace = f"run {place} of {len(options.sweep)}", f"{requests_per_s:.3g} a second"
        print(f"{run}: {len(requests)} requests, {pace}", file=sys.stderr)
        records, is_interrupted = await load.run(requests, is_open=requests_per_s is not None)
        summary = summarize(records, num_planned=len(requests), limits=options.goodput)
        return RunOfSweep(records=records, summary=summary, is_interrupted=is_interrupted)

    rows = await run_sweep(options.sweep, send)
    print(render_sweep(rows))
    summaries = [row.run.summary for row in rows]
    _write_json(load, summaries[0].num_planned, {"runs": [row.to_json() for row in rows]})
    is_whole = not rows[-1].run.is_interrupted
    return 0 if is_whole and all(each.num_completed == each.num_planned for each in summaries) else 1


def _write_json(load: "_Load", num_prompts: int, results: dict[str, Any]) -> None:
    path: Path | None = load.options.json
    if path is None:
        return
    document = {
        "parameters": {
            **_parameters(load.options),
            "model": load.style.model,
            "num_prompts": num_prompts,
        },
        "client": {"python": platform.python_version(), "ended_unix_s": round(time.time(), 3)},
        **results,
    }
    path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))


def _check_pace(options: argparse.Namespace) -> None:
    """Refuse options that would have no effect together. Raises WorkloadError."""
    if options.sweep and options.request_rate is not None:
        raise WorkloadError("--sweep sets the rates itself: leave --request-rate out")
    if options.sweep and options.concurrency and not any(point.is_share for point in options.sweep):
        raise WorkloadError(
            "--concurrency with --sweep is for finding the saturation, and no rate is a share of it"
        )
    if options.arrivals and options.request_rate is None and not options.sweep:
        raise WorkloadError("--arrivals needs --request-rate or --sweep")
    if options.burst_size and options.arrivals is not Arrivals.BURST:
        raise WorkloadError("--burst-size needs --arrivals burst")
    metrics = [limit.metric for limit in options.goodput]
    if len(set(metrics)) < len(metrics):
        raise WorkloadError("--goodput has two limits of one metric")


def _pace(options: argparse.Namespace, requests_per_s: float | None) -> Pace | None:
    if requests_per_s is None:
        return None
    return Pace(
        requests_per_s=requests_per_s,
        arrivals=options.arrivals or Arrivals.POISSON,
        burst_size=options.burst_size or _DEFAULT_BURST_SIZE,
    )


def _check_writable(path: Path) -> None:
    """Check before the run that the file can be written. Raises WorkloadError."""
    try:
        path.touch()
    except OSError as error:
        raise WorkloadError(f"cannot write {path}: {error.strerror}") from None


async def _style(options: argparse.Namespace, target: Target) -> RequestStyle:
    return RequestStyle(
        endpoint=options.endpoint,
        model=options.model or await first_model(target, timeout_s=options.timeout),
        temperature=options.temperature,
        ignores_eos=options.ignore_eos,
        sends_priority=bool(options.priority_mix),
        usage=options.usage,
        seed=options.seed,
        timeout_s=options.timeout,
    )


async def _word_cost(options: argparse.Namespace, target: Target, style: RequestStyle) -> WordCost:
    if options.shared_prefix_len > options.input_len:
        raise WorkloadError("--shared-prefix-len is a part of --input-len and cannot be longer")
    return ONE_TOKEN_A_WORD if options.prompt_file else await measure_words(target, style)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """A server and the load that it is sent, once or at several rates."""

    options: argparse.Namespace
    target: Target
    style: RequestStyle
    cost: WordCost

    def plan(self, pace: Pace | None, seed: int) -> Sequence[PlannedRequest]:
        options = self.options
        if options.prompt_file:
            prompts = read_prompts(
                options.prompt_file, num_prompts=options.num_prompts, output_len=options.output_len
            )
        else:
            shape = Shape(
                num_prompts=options.num_prompts or _DEFAULT_NUM_PROMPTS,
                input_len=options.input_len,
                output_len=options.output_len,
                shared_prefix_len=options.shared_prefix_len,
            )
            prompts = synthetic_prompts(shape, self.cost, seed)
        return plan(prompts, pace=pace, priority_mix=options.priority_mix, seed=seed)

    async def run(
        self, requests: Sequence[PlannedRequest], *, is_open: bool
    ) -> tuple[Sequence[RequestRecord], bool]:
        """Return the records, and whether Ctrl-C ended the run."""
        max_duration_s = self.options.max_duration
        with progress(len(requests)) as show:
            run = LoadRun(self.target, self.style, show)
            if is_open:
                records = await run.run_open(requests, max_duration_s=max_duration_s)
            else:
                records = await run.run_closed(
                    requests, concurrency=_concurrency(self.options), max_duration_s=max_duration_s
                )
        return records, run.is_interrupted


def _concurrency(options: argparse.Namespace) -> int:
    # Not argparse's own default: it would not know a default from a choice that excludes --request-rate.
    return options.concurrency or (_DEFAULT_SATURATION_CONCURRENCY if options.sweep else _DEFAULT_CONCURRENCY)


def _parameters(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options as they were used, for the record, without the key."""
    target: Target = options.base_url
    given = {name: value for name, value in vars(options).items() if name not in ("api_key", "command")}
    for name in ("prompt_file", "json"):
        given[name] = str(given[name]) if given[name] else None
    given["sweep"] = [str(point) for point in options.sweep]
    given["goodput"] = [str(limit) for limit in options.goodput]
    is_closed = options.request_rate is None and not options.sweep
    if is_closed or any(point.is_share for point in options.sweep):
        given["concurrency"] = _concurrency(options)
    return {**given, "base_url": target.url}


def build_parser() -> argparse.ArgumentParser:
    parser = WordParser(
        prog="tokenyard bench", description="Send load to an OpenAI-compatible server and measure it."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="load a running server over HTTP",
        description="Stream completions from a running server; report throughput and latencies.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_target(serve.add_argument_group("server"))
    _add_workload(serve.add_argument_group("workload"))
    _add_pace(serve.add_argument_group("pace"))
    serve.add_argument(
        "--goodput",
        type=_limits,
        nargs="+",
        default=(),
        metavar="METRIC:MS",
        help="report the requests that keep all of these limits, of ttft, tpot, itl (the longest pause) and "
        "e2el, such as ttft:1000,itl:200",
    )
    serve.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything, machine readable, to FILE"
    )
    return parser


def _add_target(group: Any) -> None:
    group.add_argument(
        "--base-url", type=_target, default="http://127.0.0.1:8000", metavar="URL", help="default %(default)s"
    )
    group.add_argument("--model", default="", help="default: the first of /v1/models")
    group.add_argument("--endpoint", type=Endpoint, choices=list(Endpoint), default=Endpoint.COMPLETIONS)
    group.add_argument("--api-key", default="", metavar="KEY")
    group.add_argument(
        "--usage",
        type=UsageMode,
        choices=list(UsageMode),
        default=UsageMode.CONTINUOUS,
        help="count tokens by the usage in each chunk, or by chunks and the usage at the end, "
        "for servers that do not know continuous_usage_stats",
    )


def _add_workload(group: Any) -> None:
    group.add_argument(
        "--num-prompts", type=_whole(1, _MAX_PROMPTS), help="default 64, or the lines of --prompt-file"
    )
    group.add_argument(
        "--input-len", type=_whole(1), default=128, help="tokens of a prompt, roughly (default %(default)s)"
    )
    group.add_argument(
        "--output-len", type=_whole(1), default=64, help="max_tokens of a request (default %(default)s)"
    )
    group.add_argument(
        "--shared-prefix-len", type=_whole(0), default=0, help="of --input-len, the same in every prompt"
    )
    group.add_argument(
        "--prompt-file", type=Path, metavar="FILE", help='JSON lines {"prompt": "...", "max_tokens": 64}'
    )
    group.add_argument("--seed", type=_whole(0), default=0, help="of prompts, arrivals and draws")
    group.add_argument("--temperature", type=_number(0.0), default=0.0, help="default %(default)s")
    group.add_argument("--ignore-eos", action="store_true", help="generate --output-len tokens, always")
    group.add_argument(
        "--priority-mix",
        type=_mix,
        default=(),
        metavar="P:W,...",
        help="priorities with their weights, such as 0:0.9,-10:0.1",
    )


def _add_pace(group: Any) -> None:
    pace = group.add_mutually_exclusive_group()
    pace.add_argument(
        "--concurrency", type=_whole(1), help="requests under way at any time (default 8): a closed loop"
    )
    pace.add_argument(
        "--request-rate",
        type=_number(1e-6),
        metavar="PER_S",
        help="arrivals per second, however many are under way: an open loop",
    )
    group.add_argument(
        "--sweep",
        type=_points,
        default=(),
        metavar="RATE,...",
        help="one open loop after another at these rates, and one table; 80%% is of the saturation, which "
        f"a closed loop of --concurrency clients (default {_DEFAULT_SATURATION_CONCURRENCY}) finds first",
    )
    group.add_argument(
        "--arrivals",
        type=Arrivals,
        choices=list(Arrivals),
        help="pattern of the arrivals of an open loop (default poisson)",
    )
    group.add_argument(
        "--burst-size",
        type=_whole(1, _MAX_PROMPTS),
        help=f"requests that arrive at once with --arrivals burst (default {_DEFAULT_BURST_SIZE})",
    )
    group.add_argument(
        "--timeout", type=_number(1e-3), default=600.0, help="seconds for a request (default %(default)s)"
    )
    group.add_argument(
        "--max-duration",
        type=_number(1e-3),
        default=3600.0,
        help="seconds until a run is cut off, each run of a sweep by itself (default %(default)s)",
    )


def _limits(text: str) -> tuple[Limit, ...]:
    try:
        return parse_limits(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _points(text: str) -> tuple[SweepPoint, ...]:
    try:
        return parse_sweep(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _target(text: str) -> Target:
    try:
        return Target.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return parse


def _number(least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= least):
            raise argparse.ArgumentTypeError(f"expected a number of at least {least:g}, got {text!r}")
        return value

    return parse


def _mix(text: str) -> tuple[tuple[int, float], ...]:
    mix = []
    for entry in text.split(","):
        value, _, weight = entry.partition(":")
        try:
            mix.append((int(value), float(weight or 1)))
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected PRIORITY:WEIGHT, got {entry!r}") from None
    if not all(math.isfinite(weight) and weight > 0 for _, weight in mix):
        raise argparse.ArgumentTypeError("weights must be positive")
    return tuple(mix)
