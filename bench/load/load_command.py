"""`tokenyard bench`: options in, a load run, its report out.

Owns: the command line of the load client and its exit status.
Never: the load itself (load_client.py) or its statistics (report.py).
"""

import argparse
import asyncio
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from bench.load.load_client import Endpoint, LoadRun, RequestStyle, UsageMode, first_model, measure_words
from bench.load.load_progress import progress
from bench.load.load_report import render, summarize
from bench.load.request_record import RequestRecord
from bench.load.workload import PlannedRequest, Shape, WorkloadError, plan, read_prompts, synthetic_prompts
from server.http.http_client import API_KEY_VARIABLE, ExchangeFailed, Target, key_from_environment

_DEFAULT_NUM_PROMPTS = 64
_DEFAULT_CONCURRENCY = 8
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
    try:
        return asyncio.run(_serve(options))
    except (ExchangeFailed, WorkloadError) as error:
        kind = f"{error.kind}: " if isinstance(error, ExchangeFailed) else ""
        print(f"tokenyard bench: {kind}{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the run; from then on LoadRun takes it and reports what it has
        return 130


async def _serve(options: argparse.Namespace) -> int:
    if options.json:
        _check_writable(options.json)
    target: Target = options.base_url
    if key := options.api_key or key_from_environment():
        target = replace(target, api_key=key)
    style = await _style(options, target)
    requests = await _plan(options, target, style)
    records = await _run(options, target, style, requests)
    summary = summarize(records, num_planned=len(requests))
    print(render(summary))
    if options.json:
        document = {
            "parameters": {**_parameters(options), "model": style.model, "num_prompts": len(requests)},
            "client": {"python": platform.python_version(), "ended_unix_s": round(time.time(), 3)},
            "summary": summary.to_json(),
            "requests": list(records),
        }
        options.json.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    return 0 if summary.num_completed == len(requests) else 1


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


async def _plan(options: argparse.Namespace, target: Target, style: RequestStyle) -> Sequence[PlannedRequest]:
    if options.shared_prefix_len > options.input_len:
        raise WorkloadError("--shared-prefix-len is a part of --input-len and cannot be longer")
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
        prompts = synthetic_prompts(shape, await measure_words(target, style), options.seed)
    return plan(
        prompts, request_rate=options.request_rate, priority_mix=options.priority_mix, seed=options.seed
    )


async def _run(
    options: argparse.Namespace, target: Target, style: RequestStyle, requests: Sequence[PlannedRequest]
) -> Sequence[RequestRecord]:
    with progress(len(requests)) as show:
        run = LoadRun(target, style, show)
        if options.request_rate is not None:
            return await run.run_open(requests, max_duration_s=options.max_duration)
        return await run.run_closed(
            requests, concurrency=_concurrency(options), max_duration_s=options.max_duration
        )


def _concurrency(options: argparse.Namespace) -> int:
    # Not argparse's own default: it would not know a default from a choice that excludes --request-rate.
    return options.concurrency or _DEFAULT_CONCURRENCY


def _parameters(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options as they were used, for the record, without the key."""
    target: Target = options.base_url
    given = {name: value for name, value in vars(options).items() if name not in ("api_key", "command")}
    for name in ("prompt_file", "json"):
        given[name] = str(given[name]) if given[name] else None
    if options.request_rate is None:
        given["concurrency"] = _concurrency(options)
    return {**given, "base_url": target.url}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
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
        help="Poisson arrivals per second, however many are under way: an open loop",
    )
    group.add_argument(
        "--timeout", type=_number(1e-3), default=600.0, help="seconds for a request (default %(default)s)"
    )
    group.add_argument(
        "--max-duration",
        type=_number(1e-3),
        default=3600.0,
        help="seconds until the run is cut off (default %(default)s)",
    )


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
