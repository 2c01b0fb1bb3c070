"""Replicas that come and go: how many there shall be, how long one takes to start, when one fails.

Owns: the rule by which KEDA and Kubernetes add and remove replicas, with the figures of
deploy/kubernetes/overlays/autoscaled (but for its forecasts, which replicas here do not make), and lifetimes.
Never: a replica, or a request (run.py).
"""

import math
from collections import deque
from dataclasses import dataclass
from random import Random

POLL_S = 15.0
_WAITING_OF_ONE, _KV_USE_OF_ONE = 8.0, 0.85
_TOLERANCE = 0.1
"""Part by which a signal may be off before the number changes; Kubernetes' own default."""
_MOST_UP, _UP_PERIOD_S = 2, 60.0
_MOST_DOWN, _DOWN_PERIOD_S, _STABLE_S = 1, 120.0, 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRule:
    """Bounds of the number, and the life of a replica."""

    least: int
    most: int
    start_s: float = 60.0
    """From the decision to the first request, which finds an empty prefix cache."""
    mean_life_s: float = math.inf
    """Mean time from start to failure; then it is replaced, and its requests begin anew elsewhere."""

    def life_s(self, random: Random) -> float:
        return random.expovariate(1 / self.mean_life_s) if self.mean_life_s < math.inf else math.inf


class Autoscaler:
    """Asked at each poll for the number of replicas, those that start included."""

    def __init__(self, rule: FleetRule) -> None:
        self._rule = rule
        self._wanted: deque[tuple[float, int]] = deque()
        """Numbers that the signals asked for at the last polls."""
        self._changes: deque[tuple[float, int]] = deque()

    def number(self, now_s: float, num_now: int, *, num_waiting: int, kv_use: float) -> int:
        """Say how many there shall be; `kv_use` is the sum of all replicas' shares."""
        wanted = max(
            self._for(num_waiting / _WAITING_OF_ONE, num_now), self._for(kv_use / _KV_USE_OF_ONE, num_now)
        )
        wanted = min(max(wanted, self._rule.least), self._rule.most)
        self._wanted.append((now_s, wanted))
        while self._wanted[0][0] < now_s - _STABLE_S:
            self._wanted.popleft()
        highest = max(each for _, each in self._wanted)
        if wanted > num_now:
            num = min(wanted, num_now + _MOST_UP - self._changed(now_s, _UP_PERIOD_S, up=True))
        elif highest < num_now:
            num = max(highest, num_now - _MOST_DOWN + self._changed(now_s, _DOWN_PERIOD_S, up=False))
        else:
            num = num_now
        if num != num_now:
            self._changes.append((now_s, num - num_now))
        return num

    def _for(self, replicas: float, num_now: int) -> int:
        """Number of replicas for a signal that is worth `replicas`, in whole ones."""
        return num_now if abs(replicas - num_now) <= _TOLERANCE * num_now else math.ceil(replicas)

    def _changed(self, now_s: float, period_s: float, *, up: bool) -> int:
        """Count the replicas that were added, or removed, within a period."""
        while self._changes and self._changes[0][0] <= now_s - _DOWN_PERIOD_S:
            self._changes.popleft()
        late = [num for at_s, num in self._changes if at_s > now_s - period_s]
        return sum(abs(num) for num in late if (num > 0) is up)
