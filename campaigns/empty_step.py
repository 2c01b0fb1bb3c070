"""Cost of the scheduler by itself: planning and taking in results, without a model.

    python -m campaigns.empty_step

Prints a table and judges nothing: machines differ. Times are processor time, without garbage collection.
Steps are pure decodes of prompts of 128 tokens with the prefix cache on, of four priorities in turn. The
ratio is against 11.5 us, what the scheduler of a well-known engine (its release 0.33) took for a sequence
and step on one core of an AMD EPYC. Then come worst cases: plans of steps in which blocks run short, so that
sequences are preempted and admitted again, and calls beside long queues.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from math import inf
from typing import NamedTuple

from scheduler.config import Fairness, PreemptionMode, SchedulerConfig, SchedulingPolicy
from scheduler.messages import (
    FinishReason,
    ModelRunnerOutput,
    ReportPage,
    SamplingParams,
    SequenceId,
    SequenceReport,
    ServiceTerms,
    TimeLimits,
)
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence

_PROMPT_TOKENS = 128
_NUM_STEPS = 300
_THEIRS_US = 11.5
_PAGE = 1000
_PART = 256
_NUM_PRESSED = 1024
_NUM_PRESSED_STEPS = 60
_BLOCKS_UNDER_PRESSURE = 10  # for each sequence: 12 in the end
_NUM_QUEUED = 40_000
_NUM_LEFT = 1_000
_AGING_S = 30.0  # as the server's by itself
_NO_LIMITS = TimeLimits()


class Worst(NamedTuple):
    """Seconds that each call took, and how many sequences were preempted meanwhile."""

    spent_s: list[float]
    num_preempted: int = 0


def main() -> int:
    gc.disable()
    print(f"{'':34}{'schedule':>12}{'update':>12}{'a sequence':>13}{'ratio':>9}")
    for num_running in (1, 64, 256, 1024):
        _print_steps(f"{num_running} running", _decoding(_config(num_running)), num_running)
    _print_steps("256 running, priority + fairness", _decoding(_config(256, fair=Fairness.TENANT)), 256)
    crowded = _decoding(_config(256))
    for number in range(100_000):
        crowded.add_request(_sequence(1_000_000 + number, num_tokens=4), now_s=0.0)
    _print_steps("256 running, 100,000 waiting", crowded, 256)
    _print_call("add, with 100,000 waiting", lambda i: _add(crowded, 3_000_000 + i))
    _print_call("abort of a waiting one", lambda i: _abort(crowded, 1_000_000 + 7 * i))
    _print_call("abort of a running one", lambda i: _abort(crowded, i))
    tenth_page = crowded.reports(ReportPage(9 * _PAGE, _PAGE), now_s=1.0)
    _print_call("a part of the tenth page", lambda _: _part(tenth_page), times=10 * _PAGE // _PART)
    for name, measure in WORST_CASES.items():
        _print_worst(name, measure())
    return 0


def _config(num_running: int, *, fair: Fairness = Fairness.NONE) -> SchedulerConfig:
    """Each of so many sequences has room for all the steps."""
    return SchedulerConfig(
        num_blocks=num_running * 64 + 64,
        block_size=16,
        max_num_seqs=num_running,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        policy=SchedulingPolicy.FCFS if fair is Fairness.NONE else SchedulingPolicy.PRIORITY,
        fairness=fair,
    )


def _decoding(config: SchedulerConfig) -> Scheduler:
    """A scheduler with as many sequences that decode as may run."""
    scheduler, num_running = Scheduler(config), config.max_num_seqs
    for number in range(num_running):
        # In service no two sequences need a block in the same step but by chance.
        num_tokens = _PROMPT_TOKENS + number * 7 % 16
        scheduler.add_request(_sequence(number, num_tokens=num_tokens), now_s=0.0)
    while any(seq.num_uncomputed_tokens != 1 for seq in scheduler.running_sequences()) or (
        scheduler.get_request_counts().waiting
    ):
        _step(scheduler)
    return scheduler


def _sequence(number: int, *, num_tokens: int, limits: TimeLimits = _NO_LIMITS) -> Sequence:
    prompt = tuple((number * 7 + place) % 1000 for place in range(num_tokens))
    params = SamplingParams(max_tokens=4000, stop_token_ids=(2,))
    terms = ServiceTerms(priority=number % 4, tenant=f"tenant {number % 16}", time_limits=limits)
    return Sequence(SequenceId(number), prompt, params, terms)


def _step(scheduler: Scheduler) -> tuple[float, float]:
    """Seconds of schedule and of update_from_output."""
    started_s = time.thread_time()
    plan = scheduler.schedule(now_s=1.0)
    planned_s = time.thread_time()
    tokens = {share.sequence_id: (5,) for share in plan.scheduled if share.samples}
    result = ModelRunnerOutput(token_ids=tokens, logprobs={}, failures={})
    computed_s = time.thread_time()
    scheduler.update_from_output(plan, result)
    return planned_s - started_s, time.thread_time() - computed_s


def _print_steps(name: str, scheduler: Scheduler, num_running: int) -> None:
    times = [_step(scheduler) for _ in range(_NUM_STEPS)]
    schedule_s, update_s = (statistics.mean(part) for part in zip(*times, strict=True))
    each_us = (schedule_s + update_s) / num_running * 1e6
    ratio = _THEIRS_US / each_us
    print(f"{name:34}{schedule_s * 1e3:9.3f} ms{update_s * 1e3:9.3f} ms{each_us:10.2f} us{ratio:8.1f}x")


def under_pressure(num_running: int, policy: SchedulingPolicy, mode: PreemptionMode) -> Worst:
    """Plan steps in which many sequences grow and blocks are short."""
    num_blocks = num_running * _BLOCKS_UNDER_PRESSURE + num_running // 16
    config = replace(
        _config(num_running),
        policy=policy,
        priority_aging_s=_AGING_S if policy is SchedulingPolicy.PRIORITY else inf,
        preemption_mode=mode,
        num_blocks=num_blocks,
        num_host_blocks=num_blocks if mode is PreemptionMode.SWAP else 0,
    )
    scheduler = _decoding(config)
    spent_s = [_step(scheduler)[0] for _ in range(_NUM_PRESSED_STEPS)]
    return Worst(spent_s, sum(scheduler.stats().num_preemptions.values()))


def displacing(num_running: int) -> Worst:
    """Plan steps in each of which a more urgent one comes, and all places are taken."""
    config = replace(_config(num_running), policy=SchedulingPolicy.PRIORITY, priority_aging_s=_AGING_S)
    scheduler = _decoding(config)
    spent_s = []
    for number in range(_NUM_PRESSED_STEPS):
        prompt = tuple(range(number, number + _PROMPT_TOKENS))
        urgent = Sequence(
            SequenceId(num_running + number),
            prompt,
            SamplingParams(max_tokens=4000),
            ServiceTerms(priority=-1),
        )
        scheduler.add_request(urgent, now_s=1.0)
        spent_s.append(_step(scheduler)[0])
    return Worst(spent_s, sum(scheduler.stats().num_preemptions.values()))


def mass_abort(num_queued: int, num_left: int) -> Worst:
    """Abort all but the last of a waiting queue, one after the other, as clients do that leave together."""
    scheduler = _queued(num_queued)[0]
    return Worst(_timed(lambda number: _abort(scheduler, number), num_queued - num_left))


def queue_with_limits(num_queued: int) -> Worst:
    """Add to a waiting queue requests that have time limits."""
    return Worst(_queued(num_queued, TimeLimits(total_s=600.0))[1])


def _queued(num_queued: int, limits: TimeLimits = _NO_LIMITS) -> tuple[Scheduler, list[float]]:
    """Return a scheduler with so many that wait, and what adding each took."""
    config = replace(_config(16), policy=SchedulingPolicy.PRIORITY, priority_aging_s=_AGING_S)
    scheduler = Scheduler(config)
    return scheduler, _timed(lambda number: _add(scheduler, number, limits), num_queued)


WORST_CASES: dict[str, Callable[[], Worst]] = {
    "a plan, 1,024 running, blocks short: fcfs": lambda: under_pressure(
        _NUM_PRESSED, SchedulingPolicy.FCFS, PreemptionMode.RECOMPUTE
    ),
    "the same with `priority`": lambda: under_pressure(
        _NUM_PRESSED, SchedulingPolicy.PRIORITY, PreemptionMode.RECOMPUTE
    ),
    "the same with `--preemption-mode swap`": lambda: under_pressure(
        _NUM_PRESSED, SchedulingPolicy.PRIORITY, PreemptionMode.SWAP
    ),
    "the same with `priority`, no block short, an urgent one with each step": lambda: displacing(
        _NUM_PRESSED
    ),
    "an abort while 39,000 of 40,000 waiting ones leave": lambda: mass_abort(_NUM_QUEUED, _NUM_LEFT),
    "an admission to the queue of 40,000 with time limits": lambda: queue_with_limits(_NUM_QUEUED),
}
"""Worst cases by the names of their rows in docs/benchmarks/scheduler.md."""


def _print_worst(name: str, worst: Worst) -> None:
    spent_ms = [seconds * 1e3 for seconds in worst.spent_s]
    preempted = f", {worst.num_preempted} preempted" if worst.num_preempted else ""
    print(f"{name:74}{statistics.median(spent_ms):9.3f} ms{max(spent_ms):9.3f} ms at worst{preempted}")


def _print_call(name: str, call: Callable[[int], object], *, times: int = 200) -> None:
    spent = _timed(call, times)
    print(f"{name:34}{statistics.median(spent) * 1e6:9.1f} us{max(spent) * 1e6:9.0f} us at worst")


def _timed(call: Callable[[int], object], times: int) -> list[float]:
    spent_s = []
    for number in range(times):
        started_s = time.thread_time()
        call(number)
        spent_s.append(time.thread_time() - started_s)
    return spent_s


def _add(scheduler: Scheduler, number: int, limits: TimeLimits = _NO_LIMITS) -> None:
    scheduler.add_request(_sequence(number, num_tokens=4, limits=limits), now_s=1.0)


def _part(reports: Iterator[SequenceReport | None]) -> list[SequenceReport | None]:
    """Look at as many sequences as a turn of the engine's loop does."""
    return list(islice(reports, _PART))


def _abort(scheduler: Scheduler, number: int) -> None:
    scheduler.finish_requests([SequenceId(number)], FinishReason.ABORTED)


if __name__ == "__main__":
    raise SystemExit(main())
