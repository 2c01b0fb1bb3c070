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
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from bench.simulate.cells import STUCK_STATUS, simulate_cells, to_json
from bench.simulate.find import Sought, Target, Trial, UnattainableError, find, good_share
from bench.simulate.fitting.fitted_step_time import FitError, LinearStepTime, fit
from bench.simulate.fitting.machines import MACHINES
from bench.simulate.fitting.measured_run import Error, MeasuredRun, calibrated, read_measured_run
from bench.simulate.fleets.autoscaler import FleetRule
from bench.simulate.fleets.roles import DEFAULT_TRANSFER, Transfer
from bench.simulate.options import CONFIG, STEP_TIME, SYNTHETIC, build_parser
from bench.simulate.plots import draw_queue, draw_ttft
from bench.simulate.replica import Stuck
from bench.simulate.report import RunReport, render, report_of
from bench.simulate.requests.arrivals import ArrivalsError, LengthDistribution, SyntheticWorkload, Workload
from bench.simulate.requests.files import read_requests, write_requests
from bench.simulate.run import RunResult, simulate, simulate_cell
from bench.simulate.setup import (
    NO_OVERHEAD,
    Overhead,
    Setup,
    SetupError,
    settable_fields,
    variant,
    with_drafts,
    with_roles,
)
from bench.simulate.tally import Slo
from bench.trace.reading import TraceError, read_trace
from scheduler.config import SchedulerConfig

_SHOW_EVERY = 1000


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
    except (_Usage, ArrivalsError, FitError, SetupError, Stuck, TraceError, UnattainableError) as error:
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
    if options.find is not None and setups[0].fleet is not None:
        raise _Usage("--find counts replicas that are there all the time")
    if options.find is Sought.REPLICAS and setups[0].roles is not None:
        raise _Usage("--find replicas counts replicas of one kind; --find load is for --roles, too")
    if options.find is not None and (options.compare or options.cells > 1 or not slo.binds):
        raise _Usage("--find needs --slo-ttft-ms or --slo-itl-ms, one variant and one cell")
    print(f"Requests   {_describe(options, workload)}")
    print(f"Step time  {step_time_text}")
    if base.overhead != NO_OVERHEAD:
        print(f"Overhead   {base.overhead}")
    for error in errors:
        print(f"Fit        {error}")
    print(f"SLO        {slo}\n" if slo.binds else "")
    started_s = time.perf_counter()
    if options.find is None:
        results = [_simulate(workload, setup, slo, words) for setup in setups]
    else:
        results = _find(options, workload, setups[0])
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


def _find(options: argparse.Namespace, workload: Workload, base: Setup) -> list[RunResult]:
    """Search, and print each trial and the answer. Returns a run of it, and one of the step below it."""

    def note(trial: Trial) -> None:
        shares = ", ".join(f"{good_share(run):.2%}" for run in trial.runs)
        given_up = "" if trial.holds else f"{', ' if shares else ''}given up"
        print(f"Tried      {trial.setup.name}: {shares}{given_up}", flush=True)

    target = Target(_slo(options), options.attain)
    found, below = find(workload, base, target, options.find, note)
    print(f"Found      {found.setup.name}: at least {options.attain:.2%} of the requests keep to the SLO")
    if options.price is not None:
        print(f"Price      {found.setup.num_replicas * options.price:.2f} an hour")
    print()
    runs = [found.runs[0]] + ([] if below is None else [simulate(workload, below.setup, target.slo)])
    return runs


def _slo(options: argparse.Namespace) -> Slo:
    return Slo(ttft_s=options.slo_ttft_ms / 1e3, itl_s=options.slo_itl_ms / 1e3)


def _step_time(options: argparse.Namespace) -> tuple[LinearStepTime, str]:
    given = {name: getattr(options, f"step_{name}") for name in STEP_TIME}
    if (options.fit or options.machine) and any(value is not None for value in given.values()):
        raise _Usage("--fit and --machine find the step times, so no --step option can be given with them")
    if options.fit and options.machine:
        raise _Usage("--fit and --machine both find the step times; give one of them")
    if options.machine:
        machine = MACHINES[options.machine]
        return machine.step_time, str(machine)
    if options.fit:
        found = fit(read_trace(options.fit))
        return found.model, str(found)
    values = {name: STEP_TIME[name] if value is None else value for name, value in given.items()}
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
    found = {}
    if options.machine:
        block_size = max(given.get("block_size", CONFIG["block_size"]), 1)  # below 1 is refused next
        found["num_blocks"] = MACHINES[options.machine].num_cache_tokens // block_size
    try:
        config = SchedulerConfig(**(CONFIG | found | given))
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
        fleet=_fleet(options),
        transfer=_transfer(options),
    )
    if options.roles is not None:
        base = _split(base, options)
    if options.draft_rates:
        base = with_drafts(base, options.draft_rates, options.draft_pass_ms / 1e3)
        base = replace(base, config=replace(base.config, **given))
    elif options.draft_pass_ms:
        raise _Usage("--draft-pass-ms is the time of drafts, and --draft-rates are not given")
    return base, errors


def _fleet(options: argparse.Namespace) -> FleetRule | None:
    given = {name: getattr(options, name) for name in ("start_s", "mean_life_s")}
    given = {name: value for name, value in given.items() if value is not None}
    if options.autoscale is None:
        if not given:
            return None
        return FleetRule(least=options.replicas, most=options.replicas, **given)
    least, most = options.autoscale
    if options.replicas != 1:
        raise _Usage("--autoscale says how many replicas there are, so --replicas cannot be given with it")
    return FleetRule(least=least, most=most, **given)


def _split(base: Setup, options: argparse.Namespace) -> Setup:
    if options.replicas != 1:
        raise _Usage("--roles says how many replicas there are, so --replicas cannot be given with it")
    try:
        return with_roles(base, options.roles)
    except ValueError as error:
        raise _Usage(f"--roles: {error}") from None


def _transfer(options: argparse.Namespace) -> Transfer:
    num_bytes = DEFAULT_TRANSFER.bytes_per_token
    if options.machine:
        num_bytes = MACHINES[options.machine].kv_bytes_per_token
    return Transfer(
        base_s=options.transfer_ms / 1e3,
        bytes_per_s=options.transfer_gbit * 1e9 / 8,
        bytes_per_token=options.kv_token_bytes or num_bytes,
    )


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
    given = {name: getattr(options, name) for name in SYNTHETIC}
    if options.requests:
        if wrong := [name for name, value in given.items() if value is not None]:
            raise _Usage(f"--{wrong[0].replace('_', '-')} is for drawn requests, --requests reads a file")
        return read_requests(options.requests)
    if measured is not None and all(value is None for value in given.values()):
        return measured.requests
    values = {name: SYNTHETIC[name] if value is None else value for name, value in given.items()}
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
