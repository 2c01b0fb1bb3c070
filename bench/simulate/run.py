"""The order of events: requests arrive, steps end, steps begin.

Owns: virtual time. It jumps from event to event; nothing here knows the real one.

At one moment arrivals come first, so that a step which begins then sees them all; replicas follow in
their order. The same requests and the same setup give the same result, to the last bit.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from bench.simulate.fleets.fleet import Fleet
from bench.simulate.fleets.roles import SplitRoles, decode_config
from bench.simulate.one_line import OneLine
from bench.simulate.replica import Pace, Replica, Stepping, Tallies
from bench.simulate.requests.arrivals import PromptMaker, RequestUnderWay, SimRequest
from bench.simulate.router import LeastBusy, RouterKind, router_of
from bench.simulate.setup import Setup
from bench.simulate.tally import ClassTally, QueueLine, Slo
from scheduler.config import PrefixCaching, SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run, or one cell of it, counted."""

    name: str
    duration_s: float
    """Virtual time, from 0 to the end of the last step."""
    classes: tuple[ClassTally, ...]
    """Most urgent first, then by tenant."""
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
    num_blocks: int
    """KV blocks of a replica."""
    busy_s: tuple[float, ...]
    """Time in steps, by replica."""
    kv_block_s: tuple[float, ...]
    """Blocks in use, summed over the time in steps, by replica."""
    max_used_blocks: int
    """Most at once, on one replica."""
    queue: tuple[tuple[float, int], ...]
    """Time in seconds, and how many requests wait on all replicas together."""
    replica_s: float
    """Time of all replicas together, their starts included."""
    max_replicas: int
    """Most at once."""

    @property
    def num_replicas(self) -> int:
        return len(self.busy_s)

    @property
    def busy_share(self) -> float:
        """Share of the replicas' time in steps."""
        return sum(self.busy_s) / self.replica_s if self.replica_s else 0.0

    @property
    def mean_kv_use(self) -> float:
        """Share of the blocks in use while a step runs."""
        busy_s = sum(self.busy_s)
        return sum(self.kv_block_s) / (busy_s * self.num_blocks) if busy_s else 0.0

    @property
    def max_kv_use(self) -> float:
        return self.max_used_blocks / self.num_blocks

    @property
    def busiest_to_mean(self) -> float:
        """KV blocks in use, summed over time: of the replica with most, to the mean."""
        loads = self.kv_block_s
        return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0


class TooManyMissesError(Exception):
    """More requests missed the SLO than may; the run was given up."""


class _Run:
    def __init__(self, setup: Setup, slo: Slo, cell: int) -> None:
        self._setup = setup
        self._slo = slo
        num_replicas = setup.num_replicas_of(cell) if setup.fleet is None else setup.fleet.most
        first_seed = setup.draw * setup.num_replicas + sum(map(setup.num_replicas_of, range(cell)))
        # One line before the replicas looks at each step of theirs.
        self._stepping = Stepping.EACH if setup.router is RouterKind.ONE_LINE else setup.stepping
        self.tallies = Tallies()
        self.replicas = [self.new_replica(seed) for seed in range(first_seed, first_seed + num_replicas)]
        if setup.roles is not None:
            config = decode_config(setup.config)
            for place in range(setup.roles.num_prefill, num_replicas):
                self.replicas[place] = self._replica(config, first_seed + place)
        self.queue = QueueLine()
        self.now_s = 0.0
        # Behind the latest plan of each replica. A sum over a thousand of them would cost more than a step.
        self._num_waiting = 0
        self._num_waiting_at = [0] * num_replicas
        self._least_busy = LeastBusy(self.replicas)
        self._one_line: OneLine | None = None
        if setup.router is RouterKind.ONE_LINE:
            self._one_line = OneLine(setup.config, self.replicas)
        else:
            self._router = router_of(setup.router, self.replicas, self._least_busy)
        self._prompts = PromptMaker()
        self._has_keys = setup.config.prefix_caching is PrefixCaching.ON
        self._block_size = setup.config.block_size
        self._events: list[tuple[float, int]] = []  # moment, number of the replica
        self.fleet = None if setup.fleet is None else Fleet(setup.fleet, self, first_seed)
        self._moves: Fleet | SplitRoles | None = self.fleet
        """Events that are none of a replica."""
        if setup.roles is not None:
            self._moves = SplitRoles(setup.roles, setup.transfer, self)

    def new_replica(self, seed: int) -> Replica:
        """Make a replica with an empty cache."""
        replica = self._replica(self._setup.config, seed)
        replica.ended = None if self._setup.fleet is None else []
        return replica

    def _replica(self, config: SchedulerConfig, seed: int) -> Replica:
        setup, pace = self._setup, Pace(self._stepping, seed)
        return Replica(config, setup.step_time, self.tallies, self._slo, setup.drafts, pace)

    def note(self, place: int) -> None:
        """Note that a replica has come, goes, or waits for more or less."""
        self._least_busy.note(place)
        self._note_queue(self.now_s, place)

    def route(self, waiting: RequestUnderWay, now_s: float) -> None:
        """Give a request to a replica that is there."""
        self.place(self._router(waiting.request), waiting, now_s)

    def arrive(self, request: SimRequest, number: int, now_s: float) -> None:
        """Let a request, which was sent at its `arrival_s`, come to the replicas."""
        token_ids = self._prompts.token_ids(request, number)
        keys, tail_key = [], None
        if self._has_keys:
            keys = self._prompts.block_keys(request, self._block_size)
            tail_key = self._prompts.tail_key(request, self._block_size)
        waiting = RequestUnderWay(request, token_ids, number, keys, tail_key)
        if self._moves is not None:
            self._moves.arrive(waiting, now_s)
        elif self._one_line is None:
            self.route(waiting, now_s)
        else:
            self._one_line.arrive(waiting)
            self._place_from_line(now_s)

    def place(self, place: int, waiting: RequestUnderWay, now_s: float) -> None:
        """Give a request to a replica."""
        replica = self.replicas[place]
        before_s = replica.event_s
        replica.land(now_s)
        replica.add(waiting, now_s)
        self._least_busy.note(place)
        if replica.event_s is None:
            replica.event_s = now_s
        if replica.event_s != before_s:
            heappush(self._events, (replica.event_s, place))

    def _place_from_line(self, now_s: float) -> None:
        """Place all requests of the line that can begin soon."""
        if self._one_line is not None:
            for place, waiting in self._one_line.bind():
                self.place(place, waiting, now_s)

    def advance(self, until_s: float) -> None:
        """Handle all events before `until_s`."""
        events, moves = self._events, self._moves
        while (events and events[0][0] < until_s) or (moves is not None and moves.is_due(until_s)):
            if moves is not None and moves.is_due(min(until_s, events[0][0] if events else inf)):
                self.now_s = moves.turn()
                continue
            now_s, number = heappop(events)
            replica = self.replicas[number]
            if replica.event_s != now_s:
                continue  # the end of a leap that a request has cut short
            replica.end_step(now_s)
            self.now_s = now_s
            if self._one_line is not None:
                self._one_line.look(number)
                self._place_from_line(now_s)
            replica.event_s = replica.begin_step(now_s)
            if replica.event_s is not None:
                heappush(events, (replica.event_s, number))
            self._least_busy.note(number)
            self._note_queue(now_s, number)
            if moves is not None:
                moves.look(number, now_s)

    def _note_queue(self, now_s: float, number: int) -> None:
        num_waiting = self.replicas[number].num_waiting
        self._num_waiting += num_waiting - self._num_waiting_at[number]
        self._num_waiting_at[number] = num_waiting
        in_line = 0 if self._one_line is None else self._one_line.num_waiting
        self.queue.add(now_s, self._num_waiting + in_line)


def simulate(
    workload: Iterable[SimRequest],
    setup: Setup,
    slo: Slo = Slo(ttft_s=inf, itl_s=inf),  # noqa: B008  (it is frozen)
    on_arrival: Callable[[int], None] = lambda _: None,
    *,
    max_misses: int | None = None,
) -> RunResult:
    """Serve all requests, in virtual time. Raises Stuck if the scheduler has a fault.

    `on_arrival` is called with the number of arrivals, after each. Raises TooManyMissesError as soon as more
    than `max_misses` requests of a cell missed the SLO.
    """
    results = [
        simulate_cell(workload, setup, slo, cell, on_arrival, max_misses=max_misses)
        for cell in range(setup.cells)
    ]
    return results[0] if len(results) == 1 else merged(results)


def simulate_cell(
    workload: Iterable[SimRequest],
    setup: Setup,
    slo: Slo,
    cell: int,
    on_arrival: Callable[[int], None] = lambda _: None,
    *,
    max_misses: int | None = None,
) -> RunResult:
    """Serve the requests of one cell. Raises Stuck and TooManyMissesError.

    Cells have a router and a part of the replicas each, and take turns with the requests; so they know
    nothing of each other.
    """
    run = _Run(setup, slo, cell)

    def refuse_misses() -> None:
        if max_misses is not None and run.tallies.num_missed > max_misses:
            raise TooManyMissesError

    def note(num_arrived: int) -> None:
        on_arrival(num_arrived)
        refuse_misses()

    with _without_collector():
        _serve(run, workload, setup, cell, note)
        refuse_misses()
    return _result(run, setup)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the collector of cycles from looking through all replicas again and again: requests make none."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _serve(
    run: _Run, workload: Iterable[SimRequest], setup: Setup, cell: int, on_arrival: Callable[[int], None]
) -> None:
    on_the_way: list[tuple[float, int, SimRequest]] = []
    for number, request in enumerate(workload):
        if number % setup.cells == cell:
            sent = request
            if setup.load != 1:
                sent = request._replace(arrival_s=request.arrival_s / setup.load)
            come_s = sent.arrival_s + setup.overhead.seconds(sent.prompt_len)
            heappush(on_the_way, (come_s, number, sent))
            _let_arrive(run, on_the_way, until_s=sent.arrival_s)
            on_arrival(number + 1)
    _let_arrive(run, on_the_way, until_s=inf)
    run.advance(inf)


def _let_arrive(run: _Run, on_the_way: list[tuple[float, int, SimRequest]], *, until_s: float) -> None:
    """Let those come that come until then: a long prompt takes longer, and may be overtaken."""
    while on_the_way and on_the_way[0][0] <= until_s:
        come_s, number, request = heappop(on_the_way)
        run.advance(come_s)
        run.arrive(request, number, come_s)


def _result(run: _Run, setup: Setup) -> RunResult:
    replicas = run.replicas if run.fleet is None else [*run.fleet.gone, *run.replicas]
    stats = [replica.scheduler.stats() for replica in replicas]
    replica_s, max_replicas = run.now_s * len(replicas), len(replicas)
    if run.fleet is not None:
        run.fleet.close(run.now_s)
        replica_s, max_replicas = run.fleet.replica_s, run.fleet.max_replicas
    # A decode replica is given prompts as found.
    asked = stats if setup.roles is None else stats[: setup.roles.num_prefill]
    causes = sorted({cause for replica in replicas for cause in replica.preemptions})
    return RunResult(
        name=setup.name,
        duration_s=run.now_s,
        classes=tuple(sorted(run.tallies.all, key=lambda tally: (tally.priority, tally.tenant))),
        num_steps=sum(each.num_steps for each in stats),
        num_tokens=sum(replica.num_tokens for replica in replicas),
        num_recomputed_tokens=sum(each.num_recomputed_tokens for each in stats),
        num_prefix_queries=sum(each.num_prefix_queries for each in asked),
        num_prefix_hits=sum(each.num_prefix_hits for each in asked),
        num_draft_tokens=sum(each.num_draft_tokens for each in stats),
        num_accepted_tokens=sum(each.num_accepted_tokens for each in stats),
        preemptions={cause: sum(replica.preemptions[cause] for replica in replicas) for cause in causes},
        num_blocks=setup.config.num_blocks,
        busy_s=tuple(replica.busy_s for replica in replicas),
        kv_block_s=tuple(replica.kv_block_s for replica in replicas),
        max_used_blocks=max(replica.max_used_blocks for replica in replicas),
        queue=tuple(run.queue.points),
        replica_s=replica_s,
        max_replicas=max_replicas,
    )


def merged(cells: Sequence[RunResult]) -> RunResult:
    """All cells as one run."""
    classes: dict[tuple[int, str], ClassTally] = {}
    for tally in (tally for cell in cells for tally in cell.classes):
        known = classes.setdefault((tally.priority, tally.tenant), ClassTally(tally.priority, tally.tenant))
        known.add(tally)
    preemptions: Counter[str] = Counter()
    for cell in cells:
        preemptions.update(cell.preemptions)
    return RunResult(
        name=cells[0].name,
        duration_s=max(cell.duration_s for cell in cells),
        classes=tuple(classes[key] for key in sorted(classes)),
        num_steps=sum(cell.num_steps for cell in cells),
        num_tokens=sum(cell.num_tokens for cell in cells),
        num_recomputed_tokens=sum(cell.num_recomputed_tokens for cell in cells),
        num_prefix_queries=sum(cell.num_prefix_queries for cell in cells),
        num_prefix_hits=sum(cell.num_prefix_hits for cell in cells),
        num_draft_tokens=sum(cell.num_draft_tokens for cell in cells),
        num_accepted_tokens=sum(cell.num_accepted_tokens for cell in cells),
        preemptions=dict(sorted(preemptions.items())),
        num_blocks=cells[0].num_blocks,
        busy_s=tuple(each for cell in cells for each in cell.busy_s),
        kv_block_s=tuple(each for cell in cells for each in cell.kv_block_s),
        max_used_blocks=max(cell.max_used_blocks for cell in cells),
        queue=_sum_of([cell.queue for cell in cells]),
        replica_s=max(cell.duration_s for cell in cells) * sum(cell.max_replicas for cell in cells),
        max_replicas=sum(cell.max_replicas for cell in cells),
    )


def _sum_of(queues: Sequence[Sequence[tuple[float, int]]]) -> tuple[tuple[float, int], ...]:
    """Length of several queues together."""
    moments = sorted((at_s, place, num) for place, queue in enumerate(queues) for at_s, num in queue)
    lengths, line = [0] * len(queues), QueueLine()
    for at_s, place, num in moments:
        lengths[place] = num
        line.add(at_s, sum(lengths))
    return tuple(line.points)
