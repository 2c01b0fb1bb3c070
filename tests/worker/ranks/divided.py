"""A worker whose model is divided: rank 0 in this process, the others in processes of their own.

Owns: the processes, which are started once for all models and ways to divide them: that costs seconds each.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.core.between_steps import RankAdapters
from engine.core.interfaces import BegunStep
from engine.core.worker_steps import LedStep, StageSteps
from engine.nodes.rank_plans import RankStep, ResultsIn, encode_plan
from scheduler.cache_groups import CacheGroup
from scheduler.messages import ModelRunnerOutput, SchedulerOutput
from tests.worker.ranks.follower import GLOO, Order, open_ranks_of, send
from worker.ranks.places import RankPlace, make_places
from worker.ranks.ranks import Ranks
from worker.worker import Worker
from worker.worker_config import ModelFacts, WorkerConfig

ROOT = Path(__file__).resolve().parents[3]
TWO_SHARDS, TWO_STAGES, GRID = "two shards", "two stages", "a grid"
SIZES = {TWO_SHARDS: (1, 2), TWO_STAGES: (2, 1), GRID: (2, 2), GLOO: (1, 2)}
"""Stages, and shards of each, by the name of a division."""


class RankProcesses:
    """The other ranks of all divisions; each process is started when it is first needed."""

    def __init__(self, *command: str) -> None:
        """Let the other ranks run a module, with arguments of its own before theirs."""
        self._command = command or ("tests.worker.ranks.follower",)
        self._directory = tempfile.TemporaryDirectory()
        self.folder = Path(self._directory.name)
        self._places = {name: make_places(*size) for name, size in SIZES.items()}
        self._followers: list[subprocess.Popen[bytes]] = []
        self._ranks: dict[str, Ranks] = {}
        self._results: dict[str, ResultsIn] = {}
        self._user: DividedWorker | None = None

    def begin(self, user: "DividedWorker", config: WorkerConfig) -> None:
        """Let the other ranks of a division load, for one worker at a time."""
        self.end()
        places = self._places[user.division]
        for number in range(len(self._followers) + 1, len(places)):
            self._followers.append(self._start(number))
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
        for follower in self._followers[: len(self._places[user.division]) - 1]:
            assert follower.stdin is not None
            send(follower.stdin, message)

    def close(self) -> None:
        for follower in self._followers:
            assert follower.stdin is not None
            follower.stdin.close()
            follower.kill()
            follower.wait()
        for ranks in self._ranks.values():
            ranks.stage.close()
        for results in self._results.values():
            results.close()
        self._directory.cleanup()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        own: dict[str, RankPlace] = {
            name: places[number] for name, places in self._places.items() if number < len(places)
        }
        return subprocess.Popen(
            [
                *(sys.executable, "-m", *self._command),
                *(msgspec.json.encode(own).decode(), str(self.folder)),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            pass_fds=[each for place in own.values() for each in place.descriptors],
        )


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
