"""A worker whose model is divided: rank 0 in this process, the others in processes of their own.

Owns: the processes, for all models of a test module.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.core.loop import Launched
from engine.core.rank_group import RankAdapters
from engine.core.stage_steps import StageSteps
from engine.nodes.rank_plans import RankStep, ResultsIn, encode_plan
from scheduler.messages import ModelRunnerOutput, SchedulerOutput
from tests.worker.ranks.follower import open_place, send
from worker.ranks.rank_places import make_places
from worker.worker import Worker
from worker.worker_config import ModelFacts, WorkerConfig

ROOT = Path(__file__).resolve().parents[3]


class _Collected(NamedTuple):
    result: Callable[[], ModelRunnerOutput]


class DividedWorker:
    """Worker that can be loaded again and again. Results are collected in order."""

    def __init__(self, num_shards: int, *, num_stages: int = 1, store: Path | None = None) -> None:
        self.num_shards, self.num_stages = num_shards, num_stages
        self._directory = tempfile.TemporaryDirectory()
        directory = Path(self._directory.name)
        self._results = ResultsIn(directory)
        places = make_places(num_stages, num_shards)
        words = [str(directory), *([] if store is None else [str(store)])]
        self._followers = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.worker.ranks.follower"),
                    *(msgspec.json.encode(place).decode(), *words),
                ],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                pass_fds=place.descriptors,
            )
            for place in places[1:]
        ]
        self._ranks = open_place(places[0], store)
        self._worker: Worker | None = None
        self._sampled: list[list[int]] = []

    def load(self, config: WorkerConfig) -> ModelFacts:
        if self._worker is not None:
            self._send(b"")
        self._send(msgspec.json.encode(config))
        self._worker = None
        worker = Worker(config, ranks=self._ranks)
        facts = worker.load(lambda _progress: None)
        self._worker = worker
        self._steps = StageSteps(worker, self._ranks.stage)
        self._sampled.clear()
        return facts

    @property
    def adapters(self) -> RankAdapters:
        """The stores of all ranks."""
        assert self._worker is not None
        assert self._worker.adapters is not None
        return RankAdapters(self._worker.adapters, lambda order: self._send(encode_plan(order)))

    def launch(self, plan: SchedulerOutput) -> Launched:
        assert self._worker is not None
        sampled, self._sampled = self._sampled, []
        self._send(encode_plan(RankStep(plan, sampled)))
        if self._ranks.stage.is_last:
            return self._worker.launch(plan)
        self._steps.launch(plan)
        return _Collected(self._collect)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return self.launch(plan).result()

    def close(self) -> None:
        for follower in self._followers:
            assert follower.stdin is not None
            follower.stdin.close()
            follower.kill()
            follower.wait()
        self._ranks.stage.close()
        self._results.close()
        self._directory.cleanup()

    def _collect(self) -> ModelRunnerOutput:
        result = self._results.receive()
        self._sampled.append(result.token_ids)
        self._steps.learn(result.token_ids)
        return result.output

    def _send(self, message: bytes) -> None:
        for follower in self._followers:
            assert follower.stdin is not None
            send(follower.stdin, message)
