"""A rank beside the test's own: `python -m tests.worker.ranks.follower RANK SIZE PAGE [STORE]`.

Owns: one worker after another, with the plans of each, from standard input. An empty message ends a worker.
Importing torch takes seconds, and is done once for all models of a module. With STORE, the ranks are gloo's.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from engine.core.rank_plans import decode_plan
from tests.worker.ranks.gloo_ranks import GlooRanks
from worker.ranks.ranks import Ranks
from worker.ranks.shared_ranks import SharedRanks
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


def open_ranks(rank: int, size: int, page: int, store: Path | None) -> Ranks:
    if store is None:
        return SharedRanks(page, rank=rank, size=size)
    return GlooRanks(store, rank=rank, size=size)


def follow(rank: int, size: int, page: int, store: Path | None) -> None:
    ranks = open_ranks(rank, size, page, store)
    messages = _messages(sys.stdin.buffer)
    for config in messages:
        worker = Worker(msgspec.json.decode(config, type=WorkerConfig), ranks=ranks)
        try:
            worker.load(lambda _progress: None)
        except StartupError:
            continue  # rank 0 refuses too
        while message := next(messages, b""):
            worker.launch(decode_plan(message))
        worker.close()


if __name__ == "__main__":
    follow(*map(int, sys.argv[1:4]), store=Path(sys.argv[4]) if sys.argv[4:] else None)
