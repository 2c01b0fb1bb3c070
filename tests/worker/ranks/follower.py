"""The ranks beside the test's own: `python -m tests.worker.ranks.follower` is forked for each.

Owns: groups of ranks, asked for over a socket that is standard input; in each rank one worker after another,
with the steps of each, from a pipe that is standard input there. An empty message ends a worker.
Importing torch takes seconds, and is done once for all groups.
"""

# The real process imports torch in the same way; any other takes two seconds longer, at each start.
# ruff: noqa: E402
from worker.devices.lazy_imports import import_torch

import_torch("cpu")

import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from engine.core.between_steps import change_adapters
from engine.core.worker_steps import ReportedSteps, StageSteps
from engine.nodes.rank_plans import AdapterOrder, ResultsOut, StageResult, decode_order
from tests.worker.ranks.gloo_ranks import GlooRanks
from worker.ranks import opening
from worker.ranks.places import PipeEnd, RankPlace
from worker.ranks.ranks import Ranks
from worker.worker import Worker
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

GLOO = "two by gloo"
_LENGTH_BYTES = 4
_MAX_GROUP_BYTES, _MAX_DESCRIPTORS = 1 << 16, 200


class Order(NamedTuple):
    """A model to load."""

    division: str
    config: WorkerConfig


class ForkedRanks(msgspec.Struct):
    """Ranks that begin together. Places and pipes are by file descriptors of the process that asks."""

    words: tuple[str, ...]
    """Arguments of the module."""
    places: list[dict[str, RankPlace]]
    """Places of each rank, by the name of a division."""
    pipes: list[int]
    """Descriptor that each rank reads."""
    folder: str

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that the ranks must have, in one order."""
        of_places = {each for own in self.places for place in own.values() for each in place.descriptors}
        return [*self.pipes, *sorted(of_places)]


def send(pipe: FileIO, message: bytes) -> None:
    pipe.write(len(message).to_bytes(_LENGTH_BYTES, "big") + message)


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


def become_rank() -> tuple[ForkedRanks, dict[str, RankPlace]]:
    """Wait for groups, and return in each of their ranks, with the places of that one."""
    channel = socket.socket(fileno=sys.stdin.fileno())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # that ranks have ended is not asked
    while True:
        message, received, *_ = socket.recv_fds(channel, _MAX_GROUP_BYTES, _MAX_DESCRIPTORS)
        if not message:
            sys.exit()
        group = msgspec.json.decode(message, type=ForkedRanks)
        number_of = dict(zip(group.descriptors, received, strict=True))
        for pipe, places in zip(group.pipes, group.places, strict=True):
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.dup2(number_of[pipe], channel.detach())
                return group, {name: _renumbered(place, number_of) for name, place in places.items()}
        for each in received:
            os.close(each)


def _renumbered(place: RankPlace, number_of: dict[int, int]) -> RankPlace:
    """A place by this process's descriptors."""

    def end_of(end: PipeEnd | None) -> PipeEnd | None:
        return end and PipeEnd(number_of[end.page], number_of[end.socket])

    world = None if place.world is None else number_of[place.world]
    inlet, outlet = end_of(place.inlet), end_of(place.outlet)
    return replace(place, page=number_of[place.page], world=world, inlet=inlet, outlet=outlet)


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
    group, places = become_rank()
    follow(places, Path(group.folder))
    os._exit(0)
