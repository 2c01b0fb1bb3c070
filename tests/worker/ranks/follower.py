"""A rank beside the test's own: `python -m tests.worker.ranks.follower PLACE DIRECTORY [STORE]`.

Owns: one worker after another, with the steps of each, from standard input. An empty message ends a worker.
Importing torch takes seconds, and is done once for all models of a module. With STORE, the ranks are gloo's.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from engine.core.rank_process import change_adapters, read_place
from engine.core.stage_steps import StageSteps, compute_last
from engine.nodes.rank_plans import AdapterOrder, ResultsOut, StageResult, decode_order
from tests.worker.ranks.gloo_ranks import GlooRanks
from worker.ranks.rank_places import RankPlace
from worker.ranks.ranks import Ranks
from worker.ranks.shared_ranks import open_ranks
from worker.worker import Worker
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

_LENGTH_BYTES = 4


def send(pipe: BinaryIO, message: bytes) -> None:
    pipe.write(len(message).to_bytes(_LENGTH_BYTES, "big") + message)
    pipe.flush()


def _messages(pipe: BinaryIO) -> Iterator[bytes]:
    while length := pipe.read(_LENGTH_BYTES):
        yield pipe.read(int.from_bytes(length, "big"))


def open_place(place: RankPlace, store: Path | None) -> Ranks:
    if store is None:
        return open_ranks(place)
    return GlooRanks(store, rank=place.shard, size=place.num_shards)


def follow(place: RankPlace, directory: Path, store: Path | None) -> None:
    ranks = open_place(place, store)
    results = ResultsOut(directory) if place.is_reporting else None
    messages = _messages(sys.stdin.buffer)
    for config in messages:
        worker = Worker(msgspec.json.decode(config, type=WorkerConfig), ranks=ranks)
        try:
            worker.load(lambda _progress: None)
        except StartupError:
            continue  # rank 0 refuses too
        steps = StageSteps(worker, ranks.stage)
        while message := next(messages, b""):
            step = decode_order(message)
            if isinstance(step, AdapterOrder):
                change_adapters(worker, step)
                continue
            if ranks.stage.is_last:
                result = StageResult(*compute_last(worker, ranks.stage, step.plan))
                if results is not None and ranks.stage.count > 1:
                    results.send(result)
            else:
                for token_ids in step.sampled:
                    steps.learn(token_ids)
                steps.launch(step.plan)
        worker.close()
        ranks.stage.sampled.clear()


if __name__ == "__main__":
    follow(read_place(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3:] else None)
