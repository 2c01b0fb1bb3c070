"""A rank beside the test's own: `python -m tests.worker.ranks.follower PLACES FOLDER`.

Owns: one worker after another, with the steps of each, from standard input. An empty message ends a worker.
Importing torch takes seconds, and is done once for all models. PLACES are by the name of a division.
"""

# The real process imports torch in the same way; any other takes two seconds longer, at each start.
# ruff: noqa: E402
from worker.devices.lazy_imports import import_torch

import_torch("cpu")

import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from engine.core.between_steps import change_adapters
from engine.core.worker_steps import ReportedSteps, StageSteps
from engine.nodes.rank_plans import AdapterOrder, ResultsOut, StageResult, decode_order
from tests.worker.ranks.gloo_ranks import GlooRanks
from worker.ranks import opening
from worker.ranks.places import RankPlace
from worker.ranks.ranks import Ranks
from worker.worker import Worker
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

GLOO = "two by gloo"
_LENGTH_BYTES = 4


class Order(NamedTuple):
    """A model to load."""

    division: str
    config: WorkerConfig


def send(pipe: BinaryIO, message: bytes) -> None:
    pipe.write(len(message).to_bytes(_LENGTH_BYTES, "big") + message)
    pipe.flush()


def _messages() -> Iterator[bytes]:
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as pipe:  # what has come shows in a poll
        while length := pipe.read(_LENGTH_BYTES):
            message = b""
            while len(message) < int.from_bytes(length, "big"):
                message += pipe.read(int.from_bytes(length, "big") - len(message))
            yield message


def _has_message() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def open_ranks_of(order: Order, place: RankPlace, folder: Path) -> Ranks:
    if order.division != GLOO:
        return opening.open_ranks_of(order.config, place, folder)
    return GlooRanks(folder / "store", rank=place.shard, size=place.num_shards)


def follow(places: dict[str, RankPlace], folder: Path) -> None:
    opened: dict[str, Ranks] = {}
    outlets: dict[str, ResultsOut] = {}
    messages = _messages()
    for message in messages:
        division, config = order = msgspec.json.decode(message, type=Order)
        if division not in opened:
            opened[division] = open_ranks_of(order, places[division], folder)
            if places[division].is_reporting:
                outlets[division] = ResultsOut(folder / division)
        worker = Worker(config, ranks=opened[division])
        try:
            facts = worker.load(lambda _progress: None)
        except StartupError:
            continue  # rank 0 refuses too
        if division in outlets:
            report(worker, outlets[division], messages, runs_ahead=facts.runs_ahead)
        else:
            carry_out(worker, opened[division], messages)
        worker.close()
        opened[division].stage.sampled.clear()


def report(worker: Worker, results: ResultsOut, messages: Iterator[bytes], *, runs_ahead: bool) -> None:
    """Carry out what comes until the worker ends, and report it."""
    steps = ReportedSteps(
        worker, lambda output, token_ids: results.send(StageResult(output, token_ids)), runs_ahead=runs_ahead
    )
    while message := next(messages, b""):
        step = decode_order(message)
        if isinstance(step, AdapterOrder):
            change_adapters(worker.adapters, step)
        else:
            steps.launch(step.plan)
        steps.report(_has_message)


def carry_out(worker: Worker, ranks: Ranks, messages: Iterator[bytes]) -> None:
    """Carry out what comes until the worker ends."""
    steps = StageSteps(worker, ranks.stage)
    while message := next(messages, b""):
        step = decode_order(message)
        if isinstance(step, AdapterOrder):
            change_adapters(worker.adapters, step)
        else:
            for token_ids in step.sampled:
                steps.learn(token_ids)
            steps.launch(step.plan)


if __name__ == "__main__":
    follow(msgspec.json.decode(sys.argv[1], type=dict[str, RankPlace]), Path(sys.argv[2]))
