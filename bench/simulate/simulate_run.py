"""The order of events: requests arrive, steps end, steps begin.

Owns: virtual time. It jumps from event to event; nothing here knows the real one.

At one moment arrivals come first, so that a step which begins then sees them all; replicas follow in
their order. The same requests and the same setup give the same result, to the last bit.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from bench.simulate.arrivals import PromptMaker, SimRequest
from bench.simulate.one_line import OneLine, Waiting
from bench.simulate.replica import Replica, Tallies
from bench.simulate.router import LeastBusy, RouterKind, router_of
from bench.simulate.setup import Setup
from bench.simulate.tally import ClassTally, QueueLine, Slo
from scheduler.messages import SequenceId


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run, counted."""

    name: str
    duration_s: float
    """Virtual time, from 0 to the end of the last step."""
    classes: tuple[ClassTally, ...]
    """Most urgent first, then by tenant."""
    num_replicas: int
    num_steps: int
    num_tokens: int
    """Computed, recomputed ones included."""
    num_recomputed_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_draft_tokens: int
    """Drafts that were verified."""
    num_accepted_tokens: int
    preemptions: dict[str, int]
    """Preemptions by cause and mode."""
    busy_share: float
    """Share of the duration in steps; mean of the replicas."""
    mean_kv_use: float
    """Share of the blocks in use while a step runs."""
    max_kv_use: float
    busiest_to_mean: float
    """KV blocks in use, summed over time: of the replica with most, to the mean."""
    queue: tuple[tuple[float, int], ...]
    """Time in seconds, and how many requests wait on all replicas together."""


class _Run:
    def __init__(self, setup: Setup, slo: Slo) -> None:
        self._setup = setup
        self.tallies = Tallies()
        self.replicas = [
            Replica(setup.config, setup.step_time, self.tallies, slo, setup.drafts)
            for _ in range(setup.num_replicas)
        ]
        self.queue = QueueLine()
        self.now_s = 0.0
        self._num_waiting = 0  # on all replicas; a sum over a thousand of them would cost more than a step
        self._least_busy = LeastBusy(self.replicas)
        self._one_line: OneLine | None = None
        if setup.router is RouterKind.ONE_LINE:
            self._one_line = OneLine(setup.config, self.replicas)
        else:
            self._router = router_of(setup.router, self.replicas, self._least_busy)
        self._prompts = PromptMaker()
        self._events: list[tuple[float, int]] = []  # moment, number of the replica

    def arrive(self, request: SimRequest, number: int) -> None:
        now_s = request.arrival_s / self._setup.load
        request = request._replace(arrival_s=now_s)
        token_ids = self._prompts.token_ids(request, number)
        if self._one_line is None:
            self._place(self._router(request), Waiting(request, token_ids, number), now_s)
        else:
            self._one_line.arrive(Waiting(request, token_ids, number))
            self._place_from_line(now_s)

    def _place(self, place: int, waiting: Waiting, now_s: float) -> None:
        replica = self.replicas[place]
        num_before = replica.num_waiting
        replica.add(waiting.request, waiting.token_ids, SequenceId(waiting.number), now_s)
        self._num_waiting += replica.num_waiting - num_before
        self._least_busy.note(place)
        if not replica.is_awake:
            replica.is_awake = True
            heappush(self._events, (now_s, place))

    def _place_from_line(self, now_s: float) -> None:
        """Place all requests of the line that can begin soon."""
        if self._one_line is not None:
            for place, waiting in self._one_line.bind():
                self._place(place, waiting, now_s)

    def advance(self, until_s: float) -> None:
        """Handle all events before `until_s`."""
        events = self._events
        while events and events[0][0] < until_s:
            now_s, number = heappop(events)
            replica = self.replicas[number]
            num_before = replica.num_waiting
            replica.end_step(now_s)
            self.now_s = now_s
            if self._one_line is not None:
                self._one_line.look(number)
                self._num_waiting += replica.num_waiting - num_before
                self._place_from_line(now_s)
                num_before = replica.num_waiting
            next_s = replica.begin_step(now_s)
            if next_s is None:
                replica.is_awake = False
            else:
                heappush(events, (next_s, number))
            self._num_waiting += replica.num_waiting - num_before
            self._least_busy.note(number)
            in_line = 0 if self._one_line is None else self._one_line.num_waiting
            self.queue.add(now_s, self._num_waiting + in_line)


def simulate(
    workload: Iterable[SimRequest],
    setup: Setup,
    slo: Slo = Slo(ttft_s=inf, itl_s=inf),  # noqa: B008  (it is frozen)
    on_arrival: Callable[[int], None] = lambda _: None,
) -> RunResult:
    """Serve all requests, in virtual time. Raises Stuck if the scheduler has a fault.

    `on_arrival` is told how many have arrived, after each.
    """
    run = _Run(setup, slo)
    for number, request in enumerate(workload):
        run.advance(request.arrival_s / setup.load)
        run.arrive(request, number)
        on_arrival(number + 1)
    run.advance(inf)
    return _result(run, setup)


def _result(run: _Run, setup: Setup) -> RunResult:
    replicas = run.replicas
    stats = [replica.scheduler.stats() for replica in replicas]
    busy_s = sum(replica.busy_s for replica in replicas)
    num_blocks = setup.config.num_blocks
    causes = sorted({cause for replica in replicas for cause in replica.preemptions})
    return RunResult(
        name=setup.name,
        duration_s=run.now_s,
        classes=tuple(sorted(run.tallies.all, key=lambda tally: (tally.priority, tally.tenant))),
        num_replicas=len(replicas),
        num_steps=sum(each.num_steps for each in stats),
        num_tokens=sum(replica.num_tokens for replica in replicas),
        num_recomputed_tokens=sum(each.num_recomputed_tokens for each in stats),
        num_prefix_queries=sum(each.num_prefix_queries for each in stats),
        num_prefix_hits=sum(each.num_prefix_hits for each in stats),
        num_draft_tokens=sum(each.num_draft_tokens for each in stats),
        num_accepted_tokens=sum(each.num_accepted_tokens for each in stats),
        preemptions={cause: sum(replica.preemptions[cause] for replica in replicas) for cause in causes},
        busy_share=busy_s / (run.now_s * len(replicas)) if run.now_s else 0.0,
        mean_kv_use=sum(replica.kv_block_s for replica in replicas) / (busy_s * num_blocks)
        if busy_s
        else 0.0,
        max_kv_use=max(replica.max_used_blocks for replica in replicas) / num_blocks,
        busiest_to_mean=_busiest_to_mean([replica.kv_block_s for replica in replicas]),
        queue=tuple(run.queue.points),
    )


def _busiest_to_mean(loads: list[float]) -> float:
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0
