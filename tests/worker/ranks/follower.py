"""A rank beside the test's own: `python -m tests.worker.ranks.follower PAGE RANK SIZE`.

Owns: one worker after another, with the plans of each, from standard input. An empty message ends a worker.
Importing torch takes seconds, and is done once for all models of a module.
"""

import sys
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from engine.core.rank_plans import decode_plan
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


def follow(page: int, rank: int, size: int) -> None:
    ranks = SharedRanks(page, rank=rank, size=size)
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
    follow(*map(int, sys.argv[1:]))
