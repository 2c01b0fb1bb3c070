"""A worker whose model is divided: rank 0 in this process, the others in processes of their own.

Owns: the processes, for all models of a test module.
"""

import subprocess
import sys
from pathlib import Path

import msgspec

from engine.core.rank_plans import encode_plan
from scheduler.messages import ModelRunnerOutput, SchedulerOutput
from tests.worker.ranks.follower import open_ranks, send
from worker.ranks.shared_page import make_page
from worker.worker import Worker
from worker.worker_config import ModelFacts, WorkerConfig

ROOT = Path(__file__).resolve().parents[3]


class DividedWorker:
    """As a Worker that can be loaded again and again."""

    def __init__(self, size: int, store: Path | None = None) -> None:
        page = make_page()
        place = [] if store is None else [str(store)]
        self._followers = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.worker.ranks.follower", *map(str, (rank, size, page)), *place],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                pass_fds=(page,),
            )
            for rank in range(1, size)
        ]
        self._ranks = open_ranks(0, size, page, store)
        self._worker: Worker | None = None

    def load(self, config: WorkerConfig) -> ModelFacts:
        if self._worker is not None:
            self._send(b"")
        self._send(msgspec.json.encode(config))
        self._worker = None
        worker = Worker(config, ranks=self._ranks)
        facts = worker.load(lambda _progress: None)
        self._worker = worker
        return facts

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        assert self._worker is not None
        self._send(encode_plan(plan))
        return self._worker.execute(plan)

    def close(self) -> None:
        for follower in self._followers:
            assert follower.stdin is not None
            follower.stdin.close()
            follower.kill()
            follower.wait()

    def _send(self, message: bytes) -> None:
        for follower in self._followers:
            assert follower.stdin is not None
            send(follower.stdin, message)
