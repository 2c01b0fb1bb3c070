"""Order of the measurements: one server after another, in rounds that alternate their order.

Owns: the order, the seeds (the same prompts for everybody, new ones in every round), what became of whom.
Never: statistics (results.py) or processes (running.py).

A machine is not the same in the morning and at noon: what all peers meet in each round, in turns first and
last, cannot be an advantage of one of them.
"""

import asyncio
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.load.load_client import Endpoint, LoadRun, RequestStyle
from bench.load.request_record import RequestRecord
from bench.load.workload import WordCost
from campaigns.peers.catalogue import PEERS, Peer, Site, python_of
from campaigns.peers.results import Failure, Measurement, Start
from campaigns.peers.workloads import Workload
from campaigns.servers.running import Launch, PeerFailed, free_port, last_line, running
from server.http.http_client import Target

_VERSION_OF = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
_WARM_UP_SEED = 10_000_000


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


Event = Start | Measurement | Failure


def compare(comparison: Comparison) -> Iterator[Event]:
    """Measure all of it; yields each thing as it becomes known. One peer's failure never ends the rest."""
    able = []
    for name in comparison.peers:
        obstacle = _obstacle(PEERS[name], comparison)
        if obstacle:
            yield Failure(peer=name, round=0, what=obstacle)
        else:
            able.append(PEERS[name])
    for number in range(1, comparison.num_rounds + 1):
        for peer in able if number % 2 else reversed(able):
            yield from _measure(peer, number, comparison)


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


def _measure(peer: Peer, number: int, comparison: Comparison) -> Iterator[Event]:
    launch, port = _launch(peer, comparison)
    log = comparison.logs / f"{peer.name}-{number}.log"
    try:
        with running(
            launch, port=port, ready_path=peer.ready_path, log=log, ready_within_s=comparison.ready_within_s
        ) as server:
            yield Start(peer=peer.name, round=number, ready_s=server.ready_s)
            for place, workload in enumerate(comparison.workloads):
                seed = 1000 * number + place
                records = asyncio.run(_run(peer, launch, port, workload, seed, comparison))
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


async def _run(
    peer: Peer, launch: Launch, port: int, workload: Workload, seed: int, comparison: Comparison
) -> list[RequestRecord]:
    target = Target.parse(f"http://127.0.0.1:{port}")
    style = RequestStyle(
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
    first = workload.warm_up(comparison.cost, seed=_WARM_UP_SEED + seed)
    requests = workload.requests(comparison.cost, per_client=comparison.per_client, seed=seed)
    for planned in (first, requests):
        records = await LoadRun(target, style, _nothing).run_closed(
            planned, concurrency=workload.concurrency, max_duration_s=comparison.max_run_s
        )
    return records


def _nothing(record: RequestRecord) -> None:
    """Progress is told by runs, not by requests."""
