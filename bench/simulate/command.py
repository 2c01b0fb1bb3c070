"""`tokenyard simulate`: options in, runs in virtual time, their report out.

Owns: the command line and its exit status, and the real clock, which it reads to say how fast it was.
Never: a default that hides from the report: what was assumed is printed above the numbers.

Codes: 0 done, 1 the scheduler got stuck, 2 a mistake on the command line or in a file.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from bench.simulate.arrivals import (
    ArrivalsError,
    LengthDistribution,
    SyntheticWorkload,
    Workload,
    read_requests,
    write_requests,
)
from bench.simulate.cells import STUCK_STATUS, simulate_cells, to_json
from bench.simulate.fitted_step_time import FitError, LinearStepTime, fit
from bench.simulate.measured_run import Error, MeasuredRun, calibrated, read_measured_run
from bench.simulate.plots import draw_queue, draw_ttft
from bench.simulate.replica import Stepping, Stuck
from bench.simulate.report import RunReport, render, report_of
from bench.simulate.router import RouterKind
from bench.simulate.run import RunResult, simulate, simulate_cell
from bench.simulate.setup import (
    NO_OVERHEAD,
    Overhead,
    Setup,
    SetupError,
    count,
    draft_rates,
    length,
    number,
    priority_mix,
    settable_fields,
    setting,
    tenant_mix,
    variant,
    with_drafts,
)
from bench.simulate.tally import Slo
from bench.trace.reading import TraceError, read_trace
from scheduler.config import SchedulerConfig

# The sizes of a model of 8 billion parameters in bfloat16 on one H100, by arithmetic from its data sheet:
# 16 GB of weights and 128 KiB of KV a token at 3.35 TB/s, 16 GFLOP a token at half of 990 TFLOP/s.
_STEP_TIME = {"base_ms": 5.0, "token_us": 33.0, "decode_us": 5.0, "context_ns": 40.0}
_CONFIG = {
    "num_blocks": 24_000,
    "block_size": 16,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "max_model_len": 8192,
}
_FLAG_OF_FIELD = {"policy": "--scheduling-policy"}
_SYNTHETIC: dict[str, Any] = {
    "num_requests": 10_000,
    "request_rate": 10.0,
    "burstiness": 1.0,
    "prompt_len": LengthDistribution.parse("lognormal:256:1:4096"),
    "output_len": LengthDistribution.parse("lognormal:128:0.7:2048"),
    "priority_mix": ((0, 1.0),),
    "tenant_mix": (("", 1.0),),
    "prefix_groups": 0,
    "prefix_len": 256,
}
_SHOW_EVERY = 1000

_EPILOG = """\
Variants of --compare are words joined by +: a policy, or NAME=VALUE for any setting of the scheduler
(aging is short for priority_aging_s), load, replicas, cells, router, stepping, draft_rates or draft_pass_ms;
base is what the other options say.
  tokenyard simulate --priority-mix 0:1,10:4 --request-rate 30 --compare fcfs,priority,priority+aging=2
  tokenyard simulate --draft-rates 0.8:0.7:0.6 --compare base,draft_pass_ms=1,draft_admission=all
  tokenyard simulate --requests yesterday.jsonl --fit steps.jsonl --compare base,load=1.5,num_blocks=48000
A request file holds JSON lines with arrival_s, prompt_len (or prompt) and max_tokens (or output_len), and
where wanted priority, tenant, prefix_group and prefix_len.
"""


class _Usage(Exception):
    """A mistake on the command line that argparse cannot see."""


def main(argv: Sequence[str]) -> int:
    """Run `tokenyard simulate` with the words behind it. Returns the exit status."""
    try:
        options = build_parser().parse_args(list(argv))
    except SystemExit as parsed:  # argparse has said all there is to say
        return int(parsed.code or 0)
    try:
        return _run(options, argv) if options.cell is None else _run_cell(options)
    except (_Usage, ArrivalsError, FitError, SetupError, Stuck, TraceError) as error:
        print(f"tokenyard simulate: {error}", file=sys.stderr)
        return STUCK_STATUS if isinstance(error, Stuck) else 2
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace, words: Sequence[str]) -> int:
    step_time, step_time_text = _step_time(options)
    measured = read_measured_run(options.measured) if options.measured else None
    base, errors = _base(options, step_time, measured)
    setups = _variants(options, base)
    workload = _workload(options, measured)
    _check_writable(options)
    if options.save_requests:
        write_requests(options.save_requests, workload)
    slo = _slo(options)
    print(f"Requests   {_describe(options, workload)}")
    print(f"Step time  {step_time_text}")
    if base.overhead != NO_OVERHEAD:
        print(f"Overhead   {base.overhead}")
    for error in errors:
        print(f"Fit        {error}")
    print(f"SLO        {slo}\n" if slo.binds else "")
    started_s = time.perf_counter()
    results = [_simulate(workload, setup, slo, words) for setup in setups]
    wall_s = time.perf_counter() - started_s
    reports = [report_of(result) for result in results]
    print(render(reports, slo))
    num_requests = sum(tally.num_arrived for result in results for tally in result.classes)
    print(f"\nSimulated {num_requests} requests in {wall_s:.1f} s, {num_requests / wall_s:.0f} a second")
    _write(options, results, reports)
    return 0


def _run_cell(options: argparse.Namespace) -> int:
    """Simulate one cell of one variant, and write what was counted."""
    measured = read_measured_run(options.measured) if options.measured else None
    (setup,) = _variants(options, _base(options, _step_time(options)[0], measured)[0])
    result = simulate_cell(_workload(options, measured), setup, _slo(options), options.cell)
    sys.stdout.buffer.write(to_json(result))
    return 0


def _slo(options: argparse.Namespace) -> Slo:
    return Slo(ttft_s=options.slo_ttft_ms / 1e3, itl_s=options.slo_itl_ms / 1e3)


def _step_time(options: argparse.Namespace) -> tuple[LinearStepTime, str]:
    given = {name: getattr(options, f"step_{name}") for name in _STEP_TIME}
    if options.fit:
        if any(value is not None for value in given.values()):
            raise _Usage("--fit finds the step times, so none of the --step options can be given with it")
        found = fit(read_trace(options.fit))
        return found.model, str(found)
    values = {name: _STEP_TIME[name] if value is None else value for name, value in given.items()}
    model = LinearStepTime(
        base_s=values["base_ms"] / 1e3,
        per_token_s=values["token_us"] / 1e6,
        per_decode_s=values["decode_us"] / 1e6,
        per_context_token_s=values["context_ns"] / 1e9,
    )
    if model.seconds(1, 1, 1) <= 0:
        raise _Usage("a step must take some time: at least one of the --step options must be above 0")
    return model, str(model)


def _base(
    options: argparse.Namespace, step_time: LinearStepTime, measured: MeasuredRun | None
) -> tuple[Setup, list[Error]]:
    """Return the setup that the options describe, and how far off a measured run it is."""
    given = {name: getattr(options, name) for name in settable_fields() if getattr(options, name) is not None}
    try:
        config = SchedulerConfig(**(_CONFIG | given))
    except ValueError as error:
        raise SetupError(str(error)) from None
    alone = Setup(name="base", config=config, step_time=step_time)
    errors: list[Error] = []
    given_overhead = (options.request_ms, options.request_token_us)
    if measured is not None:
        if any(value is not None for value in given_overhead):
            raise _Usage("--measured finds the overhead, so it cannot be given with it")
        alone, errors = calibrated(alone, measured, _measured_again(options, measured))
    elif options.measured_again:
        raise _Usage("--measured-again is compared with --measured, which is not given")
    else:
        base_ms, token_us = (value or 0.0 for value in given_overhead)
        alone = replace(alone, overhead=Overhead(base_s=base_ms / 1e3, per_prompt_token_s=token_us / 1e6))
    base = replace(
        alone,
        num_replicas=options.replicas,
        router=options.router,
        load=options.load,
        cells=options.cells,
        stepping=options.stepping,
    )
    if options.draft_rates:
        base = with_drafts(base, options.draft_rates, options.draft_pass_ms / 1e3)
        base = replace(base, config=replace(base.config, **given))
    elif options.draft_pass_ms:
        raise _Usage("--draft-pass-ms is the time of drafts, and --draft-rates are not given")
    return base, errors


def _measured_again(options: argparse.Namespace, measured: MeasuredRun) -> MeasuredRun | None:
    if not options.measured_again:
        return None
    again = read_measured_run(options.measured_again)
    if not measured.is_repeated_by(again):
        raise _Usage(f"{options.measured_again} is not a run of the same load as {options.measured}")
    return again


def _variants(options: argparse.Namespace, base: Setup) -> list[Setup]:
    return [variant(base, text) for text in (options.compare or "base").split(",")]


def _workload(options: argparse.Namespace, measured: MeasuredRun | None) -> Workload:
    given = {name: getattr(options, name) for name in _SYNTHETIC}
    if options.requests:
        if wrong := [name for name, value in given.items() if value is not None]:
            raise _Usage(f"--{wrong[0].replace('_', '-')} is for drawn requests, --requests reads a file")
        return read_requests(options.requests)
    if measured is not None and all(value is None for value in given.values()):
        return measured.requests
    values = {name: _SYNTHETIC[name] if value is None else value for name, value in given.items()}
    return SyntheticWorkload(
        num_requests=values["num_requests"],
        rate_per_s=values["request_rate"],
        burstiness=values["burstiness"],
        prompt_lens=values["prompt_len"],
        output_lens=values["output_len"],
        priority_mix=values["priority_mix"],
        tenant_mix=values["tenant_mix"],
        num_prefix_groups=values["prefix_groups"],
        prefix_len=values["prefix_len"],
        seed=options.seed,
    )


def _describe(options: argparse.Namespace, workload: Workload) -> str:
    if isinstance(workload, SyntheticWorkload):
        prefix = f", {workload.num_prefix_groups} prefixes of {workload.prefix_len}"
        return (
            f"{workload.num_requests} at {workload.rate_per_s:g}/s (burstiness {workload.burstiness:g}), "
            f"prompt {workload.prompt_lens.text}, output {workload.output_lens.text}"
            f"{prefix if workload.num_prefix_groups else ''}, seed {workload.seed}"
        )
    return f"from {options.requests or options.measured}"


def _simulate(workload: Workload, setup: Setup, slo: Slo, words: Sequence[str]) -> RunResult:
    if setup.cells > 1:
        return simulate_cells(words, setup.name, setup.cells)
    with _progress(setup.name) as show:
        return simulate(workload, setup, slo, show)


@contextmanager
def _progress(name: str) -> Iterator[Any]:
    """Show how many requests have arrived, on a terminal; elsewhere nothing, since a run is short."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return

    def show(num_arrived: int) -> None:
        if num_arrived % _SHOW_EVERY == 0:
            print(f"\r{name}: {num_arrived} requests", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _check_writable(options: argparse.Namespace) -> None:
    """Check before the run that the file can be written."""
    try:
        if options.plots:
            options.plots.mkdir(parents=True, exist_ok=True)
        if options.json:
            options.json.touch()
    except OSError as error:
        raise _Usage(f"cannot write {error.filename}: {error.strerror}") from None


def _write(options: argparse.Namespace, results: Sequence[RunResult], reports: Sequence[RunReport]) -> None:
    if options.plots:
        (options.plots / "ttft.svg").write_text(str(draw_ttft(results, slo_s=options.slo_ttft_ms / 1e3)))
        (options.plots / "queue.svg").write_text(str(draw_queue(results)))
    if options.json:
        document = {
            "parameters": {name: _plain(value) for name, value in vars(options).items() if value is not None},
            "runs": [report.to_json() for report in reports],
        }
        options.json.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))


def _plain(value: Any) -> Any:
    if isinstance(value, LengthDistribution):
        return value.text
    return str(value) if isinstance(value, Path) else value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="tokenyard simulate [options]",
        prog="tokenyard simulate",
        description="Run the scheduler in virtual time: what happens if there is more load, more memory, "
        "another policy, another replica.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_requests(parser.add_argument_group("requests"))
    _add_step_time(parser.add_argument_group("step time", "base + token * tokens + decode * decodes + ..."))
    _add_overhead(parser.add_argument_group("overhead", "HTTP and tokenization: time outside of steps"))
    _add_setup(parser.add_argument_group("what serves them"))
    _add_drafts(parser.add_argument_group("drafts", "speculative decoding; accepted drafts come in one step"))
    _add_config(parser.add_argument_group("the scheduler, as in `tokenyard serve`"))
    _add_report(parser.add_argument_group("report"))
    return parser


def _add_requests(group: Any) -> None:
    def add(name: str, kind: Any, text: str, metavar: str | None = None) -> None:
        default = _SYNTHETIC[name]
        shown = default.text if kind is length else default
        if name.endswith("_mix"):
            shown = "all the same"
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, metavar=metavar, help=f"{text} (default {shown})")

    group.add_argument("--requests", type=Path, metavar="FILE", help="JSON lines instead of drawn requests")
    add("num_requests", count(1), "how many are drawn", "N")
    add("request_rate", number(1e-9, most=float("inf")), "arrivals a second; inf is all at once", "PER_S")
    add("burstiness", number(1e-3), "1 is Poisson, below it bursts, above it more even", "SHAPE")
    lengths = "a number, uniform:LOW:HIGH, exponential:MEAN[:MAX], lognormal:MEDIAN:SIGMA[:MAX]"
    add("prompt_len", length, f"tokens: {lengths}", "LENGTH")
    add("output_len", length, "in the same way", "LENGTH")
    add("priority_mix", priority_mix, "priorities with their weights; lower is more urgent", "P:W,...")
    add("tenant_mix", tenant_mix, "tenants with their weights", "NAME:W,...")
    add("prefix_groups", count(0), "each prompt begins like the others of one of so many groups", "N")
    add("prefix_len", count(1), "so many tokens of it", "N")
    group.add_argument("--seed", type=count(0), default=0, metavar="N", help="default %(default)s")
    group.add_argument(
        "--save-requests", type=Path, metavar="FILE", help="write them as --requests reads them"
    )


def _add_step_time(group: Any) -> None:
    group.add_argument("--fit", type=Path, metavar="TRACE", help="find them in a file of --trace-steps")
    for name, text in (
        ("base_ms", "each step"),
        ("token_us", "and for each token in it"),
        ("decode_us", "and for each sequence that decodes"),
        ("context_ns", "and for each token of context that is read"),
    ):
        flag, unit = "--step-" + name.replace("_", "-"), name.rsplit("_")[-1].upper()
        group.add_argument(
            flag, type=number(0.0), metavar=unit, help=f"{text} (default {_STEP_TIME[name]:g})"
        )


def _add_overhead(group: Any) -> None:
    add = group.add_argument
    add("--request-ms", type=number(0.0), metavar="MS", help="each request (default 0)")
    add("--request-token-us", type=number(0.0), metavar="US", help="each token of its prompt (default 0)")
    add(
        "--measured",
        type=Path,
        metavar="FILE",
        help="a run of `tokenyard bench serve --json`: find the overhead in it, print how far off the "
        "simulation of it is, and simulate its requests if no others are given; the other options must "
        "describe its server",
    )
    add(
        "--measured-again",
        type=Path,
        metavar="FILE",
        help="another run of the same load: print beside each error how far apart the two runs are",
    )


def _add_setup(group: Any) -> None:
    add = group.add_argument
    add("--load", type=number(1e-9), default=1.0, metavar="FACTOR", help="the same requests, so much faster")
    add("--replicas", type=count(1, 4096), default=1, metavar="N", help="default %(default)s")
    add(
        "--cells",
        type=count(1, 4096),
        default=1,
        metavar="N",
        help="groups of replicas with a router each, to which requests go in turn; each runs in a process of "
        "its own, so that many replicas take less time (default %(default)s)",
    )
    add("--cell", type=count(0), metavar="N", help="simulate this cell alone and print its counts as JSON")
    add(
        "--stepping",
        type=setting(Stepping),
        default=Stepping.LEAP,
        metavar="NAME",
        help="leap over steps in which nothing is decided (default), or plan each; the result is the same",
    )
    add(
        "--router",
        type=setting(RouterKind),
        default=RouterKind.LEAST_WAITING,
        metavar="NAME",
        help="which replica takes a request: least-waiting (default), round-robin, prefix-aware, "
        "one-line (as --data-parallel-size does)",
    )


def _add_drafts(group: Any) -> None:
    add = group.add_argument
    add(
        "--draft-rates",
        type=draft_rates,
        default=(),
        metavar="R:R:...",
        help="how often a draft is right at its place, if those before it are; as many drafts as rates",
    )
    add(
        "--draft-pass-ms",
        type=number(0.0),
        default=0.0,
        metavar="MS",
        help="what a draft model takes for one more draft of all sequences; by default 0: drafts are found",
    )


def _add_config(group: Any) -> None:
    defaults = {each.name: each.default for each in fields(SchedulerConfig) if each.default is not MISSING}
    for name, kind in settable_fields().items():
        group.add_argument(
            _FLAG_OF_FIELD.get(name, "--" + name.replace("_", "-")),
            dest=name,
            type=setting(kind),
            metavar=kind.__name__.upper() if kind in (int, float) else "NAME",
            help=f"{_choices(kind)}default {_CONFIG.get(name, defaults.get(name))}",
        )


def _choices(kind: type[Any]) -> str:
    return f"{' or '.join(kind)}; " if issubclass(kind, StrEnum) else ""


def _add_report(group: Any) -> None:
    add = group.add_argument
    add("--compare", default="", metavar="VARIANT,...", help="one column each, over the same requests")
    inf = float("inf")
    add("--slo-ttft-ms", type=number(0.0), default=inf, metavar="MS", help="a good request's first token")
    add(
        "--slo-itl-ms",
        type=number(0.0),
        default=inf,
        metavar="MS",
        help="and the mean gap between its tokens",
    )
    add("--json", type=Path, metavar="FILE", help="write the numbers, machine readable")
    add("--plots", type=Path, metavar="DIR", help="draw ttft.svg and queue.svg there")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
