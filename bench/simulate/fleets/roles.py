"""Prefill and decode apart: some replicas compute prompts, the others generate the rest of the replies.

Owns: the transfers between them, and which decode replica takes a request.
Never: which prefill replica takes it (router.py), or in which step a copy is read: the scheduler plans that.

A prefill replica samples the first token, which the client then has. Keys and values of the prompt travel
behind it: a replica sends, and receives, those of one request after the other. They land in host memory of
the replica that holds the fewest tokens, as the copy of a preempted sequence does; where that memory is full,
the prompt is computed again.
"""

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from bench.simulate.fleets.fleet import RunOfReplicas
from bench.simulate.requests.arrivals import RequestUnderWay
from scheduler.config import HostTier, PreemptionMode, SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Way of keys and values from one replica to another."""

    base_s: float = 0.001
    """Delay of each request, during which the link is free for others."""
    bytes_per_s: float = 12.5e9
    """Rate at which a replica sends, and at which one receives."""
    bytes_per_token: int = 128 * 1024

    def seconds(self, num_tokens: int) -> float:
        """Time for which the keys and values of this number of tokens take the link."""
        return num_tokens * self.bytes_per_token / self.bytes_per_s


DEFAULT_TRANSFER = Transfer()


class Roles(NamedTuple):
    """Number of replicas of each role."""

    num_prefill: int
    num_decode: int


def decode_config(config: SchedulerConfig) -> SchedulerConfig:
    """Configuration of a decode replica: without a swap space, it gets one that only transfers use."""
    if config.num_host_blocks:
        return config
    mode = PreemptionMode.RECOMPUTE
    return replace(config, num_host_blocks=config.num_blocks, host_tier=HostTier.OFF, preemption_mode=mode)


class _Landing(NamedTuple):
    """Keys and values under way."""

    at_s: float
    number: int
    place: int
    waiting: RequestUnderWay


class SplitRoles:
    """Requests of a run whose first replicas compute prompts and whose others generate."""

    def __init__(self, roles: Roles, transfer: Transfer, run: RunOfReplicas) -> None:
        self._num_prefill = roles.num_prefill
        self._transfer = transfer
        self._run = run
        self._under_way: dict[int, RequestUnderWay] = {}
        self._free_s = [0.0] * len(run.replicas)
        """Time from which the link of each replica is free."""
        self._held_tokens = [0] * len(run.replicas)
        """Tokens of the prompts that each decode replica has, or will have."""
        self._landings: list[_Landing] = []
        self._numbers = count()
        for place, replica in enumerate(run.replicas):
            replica.ended = []
            if place < roles.num_prefill:
                replica.prefilled = []
            else:
                replica.is_open = False  # to requests without a first token
                run.note(place)

    def is_due(self, until_s: float) -> bool:
        """Whether a transfer ends by then: what begins at that moment sees it, as it sees arrivals."""
        return bool(self._landings) and self._landings[0].at_s <= until_s

    def turn(self) -> float:
        """Let the next transfer end; return the time of it."""
        at_s, _, place, waiting = heappop(self._landings)
        self._run.place(place, waiting, at_s)
        return at_s

    def arrive(self, waiting: RequestUnderWay, now_s: float) -> None:
        self._under_way[waiting.number] = waiting
        self._run.route(waiting, now_s)

    def look(self, place: int, now_s: float) -> None:
        """Take note of the requests that have ended on a replica, and send those on that have begun there."""
        replica = self._run.replicas[place]
        for number in replica.ended or ():
            self._held_tokens[place] -= self._under_way.pop(number).request.prompt_len
        replica.ended = []
        if replica.prefilled:
            for number in replica.prefilled:
                self._send(place, self._under_way[number]._replace(begun_s=now_s), now_s)
            replica.prefilled = []

    def _send(self, source: int, waiting: RequestUnderWay, now_s: float) -> None:
        places = range(self._num_prefill, len(self._held_tokens))
        target = min(places, key=self._held_tokens.__getitem__)
        self._held_tokens[target] += waiting.request.prompt_len
        start_s = max(now_s, self._free_s[source], self._free_s[target])
        end_s = start_s + self._transfer.seconds(waiting.request.prompt_len)
        self._free_s[source] = self._free_s[target] = end_s
        at_s = end_s + self._transfer.base_s
        heappush(self._landings, _Landing(at_s, next(self._numbers), target, waiting))
