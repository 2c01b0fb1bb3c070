"""The nodes that Ray finds for an engine, as the engine process sees them: placed, then lost or not.

Owns: the process that speaks with Ray (placement.py) and the wait for it; how many nodes are asked for,
and how many processors and GPUs on each.
Never: imports Ray; or chooses a machine.
"""

import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.nodes.first_node import REPORT_S
from engine.options.engine_config import EngineConfig
from engine.options.engine_split import ClusterConfig
from engine.processes import child_process
from engine.processes.child_environment import child_environment
from engine.processes.child_process import CONFIG_FILE
from engine.processes.process_end import EXIT_WORKER_BROKEN, leave
from worker.machine import usable_cores
from worker.worker_config import LoadProgress
from worker.worker_errors import StartupError

log = logging.getLogger(__name__)

_ANSWERS_WITHIN_S = 120.0
"""Time for Ray's own start in the process, added to the time for processors."""
_MAX_TURN_S = 10
"""Time to ask for one number of nodes, where others are possible too."""
_PLACED_FILE = "placed.msgpack"


class Resources(NamedTuple):
    """Resources of one node that Ray counts."""

    num_processors: int
    num_gpus: int = 0

    def hold(self, part: "Resources") -> bool:
        """Whether a part fits into these."""
        return self.num_processors >= part.num_processors and self.num_gpus >= part.num_gpus


class NodeShare(NamedTuple):
    """The part of one node."""

    num_threads: int
    """Threads of each rank."""
    taken: Resources


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    num_nodes: int
    host: str
    """Address of this machine for the others."""
    gpus: tuple[str, ...] = ()
    """The GPUs of this machine's part, by their names in CUDA_VISIBLE_DEVICES."""


def share_of(config: EngineConfig, num_nodes: int) -> NodeShare:
    """Divide the ranks among nodes, each with a GPU and a processor for it, or with processors alone.

    Without --num-threads each node of these is as large as this machine.
    """
    num_ranks = config.worker.num_stages * config.worker.num_ranks // num_nodes
    if config.worker.device.startswith("cuda"):
        num_gpus = num_ranks if config.worker.device == "cuda" else 1
        return NodeShare(1, Resources(num_ranks, num_gpus))
    num_threads = config.worker.num_threads or max(1, usable_cores() // num_ranks)
    return NodeShare(num_threads, Resources(num_threads * num_ranks))


def possible_nodes(config: EngineConfig, here: Resources, others: list[Resources]) -> list[int]:
    """List the numbers of nodes that are large enough, whether free or not, the least first.

    Without any it is the largest number, for machines to come. Sums of one stage go over several nodes only
    where their number is asked for: that is much slower.
    """
    assert config.ray is not None
    num_stages = config.worker.num_stages
    possible = [count for count in range(1, num_stages + 1) if num_stages % count == 0]
    if config.ray.num_nodes is not None:
        possible = [config.ray.num_nodes]

    def are_enough(count: int) -> bool:
        least = share_of(config, count).taken
        return here.hold(least) and sum(each.hold(least) for each in others) >= count - 1

    return [count for count in possible if are_enough(count)] or possible[-1:]


def turns(possible: list[int], timeout_s: float, clock: Callable[[], float]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of nodes to ask for, until the time is over, each with the time to wait for it.

    Ray waits for whole seconds only, and not at all for a part of one. Each number has its turn if there
    are as many seconds.
    """
    until_s = clock() + timeout_s
    turn_s = timeout_s
    if len(possible) > 1:
        turn_s = max(1, min(_MAX_TURN_S, int(timeout_s / len(possible))))
    for num_nodes in cycle(possible):
        yield num_nodes, max(1, ceil(min(turn_s, until_s - clock())))
        if clock() >= until_s:
            return


def divided(config: EngineConfig, placed: Placed) -> EngineConfig:
    """Return the configuration of an engine on the nodes that were placed."""
    assert config.ray is not None
    share = share_of(config, placed.num_nodes)
    worker = replace(config.worker, num_nodes=placed.num_nodes, num_threads=share.num_threads)
    cluster = ClusterConfig(
        num_nodes=placed.num_nodes, node=0, host=placed.host, port=config.ray.port, key=config.ray.key
    )
    return replace(config, ray=None, cluster=cluster if placed.num_nodes > 1 else None, worker=worker)


def say_placed(directory: Path, placed: Placed) -> None:
    """Leave the outcome for the engine process."""
    unfinished = directory / f"{_PLACED_FILE}.new"
    unfinished.write_bytes(msgspec.msgpack.encode(placed))
    unfinished.rename(directory / _PLACED_FILE)


class RayNodes:
    """The process that holds the nodes. Its end is theirs, and theirs is its end."""

    def __init__(self, directory: Path) -> None:
        """Start it, in the main thread: a child ends with the thread that starts it."""
        self._process = subprocess.Popen(
            [
                *child_process.INTERPRETER,
                *("-m", "engine.ray_cluster.placement"),
                *(str(directory), str(os.getpid()), str(log.getEffectiveLevel())),
            ],
            stdin=subprocess.DEVNULL,
            # Ray lets its processes import from the folder that it is called in.
            cwd="/",
            env=child_environment() | {"RAY_USAGE_STATS_ENABLED": "0"},
        )
        self._directory = directory

    @property
    def pid(self) -> int:
        return self._process.pid

    def place(self, config: EngineConfig, report: Callable[[LoadProgress], None]) -> EngineConfig:
        """Wait until Ray has found all nodes; return the configuration for them. Raises StartupError."""
        assert config.ray is not None
        started_s = time.monotonic()
        placed = self._directory / _PLACED_FILE
        while not placed.exists():
            self.check()
            elapsed_s = time.monotonic() - started_s
            if elapsed_s > config.ray.timeout_s + _ANSWERS_WITHIN_S:
                raise StartupError(
                    f"Ray at {os.environ.get('RAY_ADDRESS', 'this machine')} has not answered "
                    f"within {elapsed_s:.0f} s",
                    fix="start it with `ray start`, or see `ray status` and Ray's own logs",
                )
            report(LoadProgress(stage="waiting for Ray", done_bytes=0, total_bytes=0, elapsed_s=elapsed_s))
            time.sleep(REPORT_S)
        found = msgspec.msgpack.decode(placed.read_bytes(), type=Placed)
        if found.gpus:  # of this process and all ranks here, before any of them opens one
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(found.gpus)
        config = divided(config, found)
        (self._directory / CONFIG_FILE).write_bytes(
            msgspec.msgpack.encode(config)
        )  # for all other ranks here
        return config

    def check(self) -> None:
        """End this process too if that one has ended. It has reported why."""
        exit_code = self._process.poll()
        if exit_code is not None:
            leave(exit_code if exit_code > 0 else EXIT_WORKER_BROKEN)

    def wait(self, wait_s: float | None = None) -> int:
        """Wait for its end; return the exit code. Raises subprocess.TimeoutExpired."""
        return self._process.wait(wait_s)

    def kill(self) -> None:
        """End it; Ray then frees what it had placed."""
        self._process.kill()
