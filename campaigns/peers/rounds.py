"""Order of the measurements: one server after another, in rounds that alternate their order.

Owns: the order, the seeds (the same prompts for everybody, new ones in every round), what became of whom.
Never: statistics (results.py) or processes (running.py).

A machine is not the same in the morning and at noon: what all peers meet in each round, in turns first and
last, cannot be an advantage of one of them.
"""

import asyncio
import subprocess
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.load.client import Endpoint, LoadRun, RequestStyle
from bench.load.report import summarize
from bench.load.request_record import RequestRecord
from bench.load.workload import WordCost
from campaigns.peers.catalogue import OURS, PEERS, Peer, Site, python_of
from campaigns.peers.results import Failure, Measurement, Saturation, Start
from campaigns.peers.workloads import SATURATION, Workload
from campaigns.servers.free_ports import free_port
from campaigns.servers.running import Launch, PeerFailed, last_line, running
from server.edge.http.http_client import Target

_VERSION_OF = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
_WARM_UP_SEED = 10_000_000
_SATURATION_SEED = 999_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Servers that are compared, and the patience with them."""

    peers: Sequence[str]
    environments: Mapping[str, Path]
    """Folders of environments by peer, where they are not under .peers."""
    extra_words: Mapping[str, tuple[str, ...]]
    """Arguments that are added to the command line of a peer."""
    model: Path
    gguf: Path | None
    workloads: Sequence[Workload]
    cost: WordCost
    per_client: int
    num_rounds: int
    num_threads: int
    ready_within_s: float
    max_run_s: float
    logs: Path


Event = Start | Saturation | Measurement | Failure


def compare(comparison: Comparison) -> Iterator[Event]:
    """Measure all of it; yields each thing as it becomes known. One peer's failure never ends the rest."""
    able = []
    for name in comparison.peers:
        obstacle = _obstacle(PEERS[name], comparison)
        if obstacle:
            yield Failure(peer=name, round=0, what=obstacle)
        else:
            able.append(PEERS[name])
    saturation = yield from _find_saturation(comparison)
    for number in range(1, comparison.num_rounds + 1):
        for peer in able if number % 2 else reversed(able):
            yield from _measure(peer, number, comparison, saturation)


def _find_saturation(comparison: Comparison) -> Generator[Event, None, float | None]:
    """Measure ours before the first round, if a workload needs it. None: those workloads are left out."""
    if all(workload.share is None for workload in comparison.workloads):
        return None
    obstacle = _obstacle(PEERS[OURS], comparison)
    alone = replace(comparison, workloads=[SATURATION])
    events = (
        [Failure(peer=OURS, round=0, what=obstacle)] if obstacle else _measure(PEERS[OURS], 0, alone, None)
    )
    for event in events:
        if isinstance(event, Measurement):
            summary = summarize(event.records, num_planned=len(event.records))
            if not summary.num_failed and summary.requests_per_s:
                yield Saturation(requests_per_s=summary.requests_per_s)
                return summary.requests_per_s
            said = next(iter(summary.example_messages.values()), "no request was sent")
            yield Failure(peer=OURS, round=0, what=f"no saturation, so no shares of it: {said}")
        elif isinstance(event, Failure):
            yield replace(event, what=f"no saturation, so no shares of it: {event.what}")
    return None


def package_version(peer: Peer, comparison: Comparison) -> str:
    """Empty where it is not known: a checkout that was never installed has none."""
    python = python_of(peer.name, comparison.environments)
    if python is None:
        return ""
    asked = subprocess.run(
        [python, "-c", _VERSION_OF, peer.package], capture_output=True, text=True, check=False, timeout=60
    )
    return asked.stdout.strip()


def _obstacle(peer: Peer, comparison: Comparison) -> str:
    """Reason why `peer` cannot take part; empty if it can."""
    if peer.launch is None:
        return f"not comparable: {peer.not_comparable}"
    if python_of(peer.name, comparison.environments) is None:
        return f"not installed: give --env {peer.name}=FOLDER, or run campaigns/peers/install {peer.name}"
    if peer.needs_gguf and comparison.gguf is None:
        return "not comparable: needs GGUF; campaigns/checkpoints/write_gguf.py makes it, give --gguf FILE"
    return ""


def _measure(peer: Peer, number: int, comparison: Comparison, saturation: float | None) -> Iterator[Event]:
    launch, port = _launch(peer, comparison)
    log = comparison.logs / f"{peer.name}-{number}.log"
    try:
        with running(
            launch, port=port, ready_path=peer.ready_path, log=log, ready_within_s=comparison.ready_within_s
        ) as server:
            yield Start(peer=peer.name, round=number, ready_s=server.ready_s)
            for place, workload in enumerate(comparison.workloads):
                if workload.share is not None and saturation is None:
                    continue
                seed = 1000 * number + place if number else _SATURATION_SEED
                style = _style(peer, launch, seed, comparison)
                records = asyncio.run(_run(port, style, workload, comparison, saturation))
                yield Measurement(
                    peer=peer.name, round=number, workload=workload, records=records, last_log=last_line(log)
                )
    except PeerFailed as failure:
        yield Failure(peer=peer.name, round=number, what=str(failure))


def _launch(peer: Peer, comparison: Comparison) -> tuple[Launch, int]:
    python = python_of(peer.name, comparison.environments)
    assert python is not None
    assert peer.launch is not None
    site = Site(
        python=python,
        model=comparison.model,
        gguf=comparison.gguf,
        port=free_port(),
        num_threads=comparison.num_threads,
    )
    launch = peer.launch(site)
    words = launch.command + comparison.extra_words.get(peer.name, ())
    return replace(launch, command=words), site.port


def _style(peer: Peer, launch: Launch, seed: int, comparison: Comparison) -> RequestStyle:
    return RequestStyle(
        endpoint=Endpoint.COMPLETIONS,
        model=launch.served_name,
        temperature=0.0,
        ignores_eos=peer.ignores_eos,
        sends_priority=False,
        usage=peer.usage,
        seed=seed,
        timeout_s=comparison.max_run_s,
        end=peer.end,
    )


async def _run(
    port: int, style: RequestStyle, workload: Workload, comparison: Comparison, saturation: float | None
) -> list[RequestRecord]:
    target = Target.parse(f"http://127.0.0.1:{port}")
    first = workload.warm_up(comparison.cost, seed=_WARM_UP_SEED + style.seed)
    requests = workload.requests(
        comparison.cost, per_client=comparison.per_client, seed=style.seed, saturation=saturation
    )
    concurrency, max_run_s = workload.concurrency, comparison.max_run_s
    await LoadRun(target, style, _nothing).run_closed(
        first, concurrency=concurrency, max_duration_s=max_run_s
    )
    run = LoadRun(target, style, _nothing)
    if workload.share is not None:
        return await run.run_open(requests, max_duration_s=max_run_s)
    return await run.run_closed(requests, concurrency=concurrency, max_duration_s=max_run_s)


def _nothing(record: RequestRecord) -> None:
    """Progress is told by runs, not by requests."""
