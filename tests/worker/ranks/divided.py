"""A worker whose model is divided: rank 0 in this process, the others in processes of their own.

Owns: the processes, which serve one model after another, and that of which they are forked.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.core.between_steps import RankAdapters
from engine.core.interfaces import BegunStep
from engine.core.worker_steps import LedStep, StageSteps
from engine.nodes.rank_plans import RankStep, ResultsIn, encode_plan
from scheduler.cache_groups import CacheGroup
from scheduler.messages import ModelRunnerOutput, SchedulerOutput
from tests.worker.ranks.follower import GLOO, ForkedRanks, Order, open_ranks_of, send
from worker.ranks.places import make_places
from worker.ranks.ranks import Ranks
from worker.worker import Worker
from worker.worker_config import ModelFacts, WorkerConfig

ROOT = Path(__file__).resolve().parents[3]
TWO_SHARDS, TWO_STAGES, GRID = "two shards", "two stages", "a grid"
SIZES = {TWO_SHARDS: (1, 2), TWO_STAGES: (2, 1), GRID: (2, 2), GLOO: (1, 2)}
"""Stages, and shards of each, by the name of a division."""


class ForkServer:
    """A process that runs a module, and has imported what ranks need. It ends with this process."""

    def __init__(self, module: str) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module], cwd=ROOT, stdin=theirs, start_new_session=True
            )
        atexit.register(self._end)

    def fork(self, group: ForkedRanks) -> None:
        """Start the ranks of a group, whose descriptors are those of this process."""
        socket.send_fds(self._channel, [msgspec.json.encode(group)], group.descriptors)

    def _end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # with all that were forked
        self._process.wait()


_fork_server = cache(ForkServer)


class RankProcesses:
    """The other ranks of all divisions; their processes are started when one is needed."""

    def __init__(self, module: str = "tests.worker.ranks.follower", *words: str) -> None:
        """Let the other ranks run a module, with words of its own."""
        self._module, self._words = module, words
        self._directory = tempfile.TemporaryDirectory()
        self.folder = Path(self._directory.name)
        self._places = {name: make_places(*size) for name, size in SIZES.items()}
        self._pipes: list[FileIO] = []
        self._ranks: dict[str, Ranks] = {}
        self._results: dict[str, ResultsIn] = {}
        self._user: DividedWorker | None = None

    def begin(self, user: "DividedWorker", config: WorkerConfig) -> None:
        """Let the other ranks of a division load, for one worker at a time."""
        self.end()
        if not self._pipes:
            self._start()
        if user.division not in self._results:
            (self.folder / user.division).mkdir()
            self._results[user.division] = ResultsIn(self.folder / user.division)
        self._user = user
        self.send(user, msgspec.json.encode(Order(user.division, config)))

    def end(self) -> None:
        if self._user is not None:
            self.send(self._user, b"")
            self._user = None

    def refused(self) -> None:
        """Note that all ranks wait for another model."""
        self._user = None

    def ranks_of(self, order: Order) -> Ranks:
        division = order.division
        if division not in self._ranks:
            self._ranks[division] = open_ranks_of(order, self._places[division][0], self.folder)
        return self._ranks[division]

    def results_of(self, division: str) -> ResultsIn:
        return self._results[division]

    def send(self, user: "DividedWorker", message: bytes) -> None:
        assert user is self._user, "another model was loaded since"
        for pipe in self._pipes[: len(self._places[user.division]) - 1]:
            send(pipe, message)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # which ends the process
        for ranks in self._ranks.values():
            ranks.stage.close()
        for results in self._results.values():
            results.close()
        self._directory.cleanup()

    def _start(self) -> None:
        own = [
            {name: places[number] for name, places in self._places.items() if number < len(places)}
            for number in range(1, max(map(len, self._places.values())))
        ]
        pipes = [os.pipe() for _ in own]
        group = ForkedRanks(self._words, own, [end for end, _ in pipes], str(self.folder))
        _fork_server(self._module).fork(group)
        for end, other in pipes:
            os.close(end)
            self._pipes.append(FileIO(other, "w"))


class _Collected(NamedTuple):
    result: Callable[[], ModelRunnerOutput]


class DividedWorker:
    """Worker that can be loaded again and again. Results are collected in order."""

    def __init__(self, processes: RankProcesses, division: str) -> None:
        self.division = division
        self.num_stages, self.num_shards = SIZES[division]
        self._processes = processes
        self.groups: tuple[CacheGroup, ...] = ()
        self._worker: Worker | None = None
        self._sampled: list[list[int]] = []

    def load(self, config: WorkerConfig) -> ModelFacts:
        self._processes.begin(self, config)
        self._ranks = self._processes.ranks_of(Order(self.division, config))
        self._worker = None
        worker = Worker(config, ranks=self._ranks)
        try:
            facts = worker.load(lambda _progress: None)
        except BaseException:
            self._processes.refused()
            raise
        self._worker = worker
        self._steps = StageSteps(worker, self._ranks.stage)
        self.groups = facts.groups
        self._sampled.clear()
        return facts

    @property
    def adapters(self) -> RankAdapters:
        """The stores of all ranks."""
        assert self._worker is not None
        assert self._worker.adapters is not None
        return RankAdapters(self._worker.adapters, lambda order: self._send(encode_plan(order)))

    def launch(self, plan: SchedulerOutput) -> BegunStep:
        assert self._worker is not None
        sampled, self._sampled = self._sampled, []
        self._send(encode_plan(RankStep(plan, sampled)))
        if self._ranks.stage.is_last:
            return LedStep(self._worker.launch(plan), lambda token_ids: self._sampled.append(token_ids))
        self._steps.launch(plan)
        return _Collected(self._collect)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return self.launch(plan).result()

    def _collect(self) -> ModelRunnerOutput:
        result = self._processes.results_of(self.division).receive()
        self._sampled.append(result.token_ids)
        self._steps.learn(result.token_ids)
        return result.output

    def _send(self, message: bytes) -> None:
        self._processes.send(self, message)
