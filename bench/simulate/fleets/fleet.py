"""Replicas that come and go: start, leave, fail, and are replaced.

Owns: which replicas there are, and the requests that wait for one or lose theirs.
Never: how many there shall be (autoscaler.py), or which replica takes a request (router.py).
"""

from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from typing import Protocol

from bench.simulate.fleets.autoscaler import POLL_S, Autoscaler, FleetRule
from bench.simulate.replica import Replica, Stuck
from bench.simulate.requests.arrivals import RequestUnderWay

_MOST_LOSSES = 100
"""Replicas that a request may lose: more, and it would never end."""


class RunOfReplicas(Protocol):
    """A run, as far as replicas of it may change."""

    replicas: list[Replica]

    def new_replica(self, seed: int) -> Replica:
        """Make a replica with an empty cache."""

    def note(self, place: int) -> None:
        """Note that a replica has come, goes, or waits for more or less."""

    def route(self, waiting: RequestUnderWay, now_s: float) -> None:
        """Give a request to a replica that is there."""

    def place(self, place: int, waiting: RequestUnderWay, now_s: float) -> None:
        """Give a request to this replica."""


class Fleet:
    """Replicas of a run that come and go. One that is shut takes no more requests, and leaves once idle."""

    def __init__(self, rule: FleetRule, run: RunOfReplicas, seed: int) -> None:
        self._rule = rule
        self._run = run
        self._autoscaler = Autoscaler(rule)
        self._random = Random(seed)
        self._seeds = count(seed + rule.most)
        self._began_s: dict[int, float] = {}
        """Time since which there is a replica at a place, its start included."""
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._under_way: dict[int, RequestUnderWay] = {}
        self._parked: list[RequestUnderWay] = []
        """Requests that came while no replica was there."""
        self._opened: set[int] = set()
        """Places whose replica has begun to serve."""
        self._num_lost: Counter[int] = Counter()
        self.gone: list[Replica] = []
        self.replica_s = 0.0
        self.max_replicas = 0
        for place in range(rule.most):
            self._shut(place)
            if place < rule.least:
                self._begin(place, 0.0)
                self._open(place, 0.0)
        self._at(POLL_S, self._poll)

    def is_due(self, until_s: float) -> bool:
        """Whether something happens before then; at the very end only while requests are under way."""
        return self._due[0][0] < until_s and (until_s < inf or bool(self._under_way))

    def turn(self) -> float:
        """Do what is due next; return the time of it."""
        now_s, _, act = heappop(self._due)
        act(now_s)
        return now_s

    def arrive(self, waiting: RequestUnderWay, now_s: float) -> None:
        self._under_way[waiting.number] = waiting
        if any(self._run.replicas[place].is_open for place in self._began_s):
            self._run.route(waiting, now_s)
        else:
            self._parked.append(waiting)

    def look(self, place: int, now_s: float) -> None:
        """Take note of requests that have ended; a replica that was shut, and has none left, is gone."""
        replica = self._run.replicas[place]
        self._note_ended(replica)
        if place in self._opened and not replica.is_open and replica.event_s is None:
            self._end(place, now_s)

    def close(self, now_s: float) -> None:
        """Count the time of the replicas that are left."""
        self.replica_s += sum(now_s - began_s for began_s in self._began_s.values())

    def _note_ended(self, replica: Replica) -> None:
        for number in replica.ended or ():
            del self._under_way[number]
        replica.ended = []

    def _shut(self, place: int) -> None:
        self._run.replicas[place].is_open = False
        self._run.note(place)

    def _at(self, at_s: float, act: Callable[[float], None]) -> None:
        heappush(self._due, (at_s, next(self._numbers), act))

    def _begin(self, place: int, now_s: float) -> None:
        self._began_s[place] = now_s
        self.max_replicas = max(self.max_replicas, len(self._began_s))

    def _open(self, place: int, now_s: float) -> None:
        replica = self._run.replicas[place]
        replica.is_open = True
        self._opened.add(place)
        self._run.note(place)
        life_s = self._rule.life_s(self._random)
        if life_s < inf:
            self._at(now_s + life_s, lambda at_s: self._fail(place, replica, at_s))
        parked, self._parked = self._parked, []
        for waiting in parked:
            self._run.route(waiting, now_s)

    def _end(self, place: int, now_s: float) -> None:
        self.replica_s += now_s - self._began_s.pop(place)
        self._opened.discard(place)
        self.gone.append(self._run.replicas[place])
        self._run.replicas[place] = self._run.new_replica(next(self._seeds))
        self._shut(place)

    def _start(self, place: int, now_s: float) -> None:
        self._begin(place, now_s)
        self._at(now_s + self._rule.start_s, lambda at_s: self._open(place, at_s))

    def _fail(self, place: int, replica: Replica, now_s: float) -> None:
        if self._run.replicas[place] is not replica:  # it has left meanwhile
            return
        self._note_ended(replica)
        lost, stays = replica.fail(now_s), self._stays(place)
        self._end(place, now_s)
        if stays:
            self._start(place, now_s)
        self._num_lost.update(lost)
        for number in lost:
            if self._num_lost[number] > _MOST_LOSSES:
                raise Stuck(f"a request lost {_MOST_LOSSES} replicas: it takes longer than these live")
            self.arrive(self._under_way[number], now_s)

    def _poll(self, now_s: float) -> None:
        self._at(now_s + POLL_S, self._poll)
        replicas = [self._run.replicas[place] for place in self._began_s]
        staying = [place for place in self._began_s if self._stays(place)]
        number = self._autoscaler.number(
            now_s,
            len(staying),
            num_waiting=len(self._parked) + sum(replica.num_waiting for replica in replicas),
            kv_use=sum(replica.kv_use for replica in replicas),
        )
        free = [place for place in range(self._rule.most) if place not in self._began_s]
        for place in free[: max(number - len(staying), 0)]:
            self._start(place, now_s)
        opened = [place for place in staying if self._run.replicas[place].is_open]
        opened.sort(key=lambda place: -self._began_s[place])
        for place in opened[: min(len(staying) - number, len(opened) - 1)] if number < len(staying) else ():
            self._shut(place)
            self.look(place, now_s)

    def _stays(self, place: int) -> bool:
        """Whether the replica is open or starts."""
        replica = self._run.replicas[place]
        return replica.is_open or place not in self._opened
