"""A scheduler over a worker, with as many plans in flight as it allows, until nobody is left."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from scheduler.counters import SchedulerStats
from scheduler.messages import SchedulerOutput, SequenceId
from scheduler.scheduler import Scheduler
from tests.fakes import make_sequence
from tests.invariants import check_invariants
from worker.steps.protocol import LaunchedStep
from worker.worker import Worker


class Served(NamedTuple):
    tokens: dict[SequenceId, list[int]]
    stats: SchedulerStats

    @property
    def num_preemptions(self) -> int:
        return sum(self.stats.num_preemptions.values())


def serve(
    worker: Worker,
    scheduler: Scheduler,
    prompts: Sequence[list[int]],
    num_tokens: int,
    meanwhile: Callable[[], None] = lambda: None,
) -> Served:
    """Generate greedy tokens for each prompt. `meanwhile` is called before each result is taken in."""
    tokens: dict[SequenceId, list[int]] = {}
    for number, prompt in enumerate(prompts):
        scheduler.add_request(make_sequence(number, prompt, max_tokens=num_tokens), now_s=0.0)
        tokens[SequenceId(number)] = []
    in_flight: deque[tuple[SchedulerOutput, LaunchedStep]] = deque()
    while scheduler.has_unfinished_requests:
        while scheduler.can_schedule and not (plan := scheduler.schedule(now_s=0.0)).is_empty:
            in_flight.append((plan, worker.launch(plan)))
        plan, launched = in_flight.popleft()
        result = launched.result()
        assert not result.failures
        meanwhile()
        for output in scheduler.update_from_output(plan, result).get(0, []):
            tokens[output.sequence_id] += output.token_ids
        check_invariants(scheduler)
    return Served(tokens, scheduler.stats())
