"""Cost of the scheduler by itself: planning and taking in results, without a model.

    python -m campaigns.empty_step

Prints a table and judges nothing: machines differ. Times are processor time, without garbage collection.
Steps are pure decodes of prompts of 128 tokens with the prefix cache on; under pressure, blocks run short,
and some sequences are preempted and admitted again. The ratio is against 11.5 us, what the scheduler of a
well-known engine (its release 0.33) took for a sequence and step on one core of an AMD EPYC.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice

from scheduler.config import Fairness, SchedulerConfig, SchedulingPolicy
from scheduler.messages import (
    FinishReason,
    ModelRunnerOutput,
    Page,
    SamplingParams,
    SequenceId,
    SequenceReport,
    ServiceTerms,
)
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence

_PROMPT_TOKENS = 128
_NUM_STEPS = 300
_THEIRS_US = 11.5
_PAGE = 1000
_PART = 256


def main() -> int:
    gc.disable()
    print(f"{'':34}{'schedule':>12}{'update':>12}{'a sequence':>13}{'ratio':>9}")
    for num_running in (1, 64, 256, 1024):
        _print_steps(f"{num_running} running", _scheduler(num_running), num_running)
    _print_steps("256 running, priority + fairness", _scheduler(256, fair=Fairness.TENANT), 256)
    crowded = _scheduler(256)
    for number in range(100_000):
        crowded.add_request(_sequence(1_000_000 + number, num_tokens=4), now_s=0.0)
    _print_steps("256 running, 100,000 waiting", crowded, 256)
    _print_call("add, with 100,000 waiting", lambda i: _add(crowded, 3_000_000 + i))
    _print_call("abort of a waiting one", lambda i: _abort(crowded, 1_000_000 + 7 * i))
    _print_call("abort of a running one", lambda i: _abort(crowded, i))
    tenth_page = crowded.reports(Page(9 * _PAGE, _PAGE), now_s=1.0)
    _print_call("a part of the tenth page", lambda _: _part(tenth_page), times=10 * _PAGE // _PART)
    _print_call("aborts of 50,000 in a row", lambda i: _abort(crowded, 1_002_000 + i), times=50_000)
    _print_pressure()
    return 0


def _scheduler(num_running: int, *, fair: Fairness = Fairness.NONE, blocks_each: int = 64) -> Scheduler:
    """Number of sequences that decode; by default each has room for all the steps."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_running * blocks_each + 64,
            block_size=16,
            max_num_seqs=num_running,
            max_num_batched_tokens=8192,
            max_model_len=4096,
            policy=SchedulingPolicy.FCFS if fair is Fairness.NONE else SchedulingPolicy.PRIORITY,
            fairness=fair,
        )
    )
    for number in range(num_running):
        scheduler.add_request(_sequence(number, num_tokens=_PROMPT_TOKENS), now_s=0.0)
    while any(seq.num_uncomputed_tokens != 1 for seq in scheduler.running_sequences()) or (
        scheduler.get_request_counts().waiting
    ):
        _step(scheduler)
    return scheduler


def _sequence(number: int, *, num_tokens: int) -> Sequence:
    prompt = tuple((number * 7 + place) % 1000 for place in range(num_tokens))
    params = SamplingParams(max_tokens=4000, stop_token_ids=(2,))
    return Sequence(SequenceId(number), prompt, params, ServiceTerms(tenant=f"tenant {number % 16}"))


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
    schedule_s, update_s = (statistics.median(part) for part in zip(*times, strict=True))
    each_us = (schedule_s + update_s) / num_running * 1e6
    ratio = _THEIRS_US / each_us
    print(f"{name:34}{schedule_s * 1e3:9.3f} ms{update_s * 1e3:9.3f} ms{each_us:10.2f} us{ratio:8.1f}x")


def _print_pressure() -> None:
    """Print what steps take in which many sequences grow and blocks are short."""
    scheduler = _scheduler(1024, blocks_each=10)
    times = [_step(scheduler)[0] for _ in range(_NUM_STEPS)]
    num_preempted = sum(count.num for count in scheduler.stats().preemptions)
    name = f"1024 running, {num_preempted} preempted"
    print(f"{name:34}{statistics.median(times) * 1e3:9.3f} ms{max(times) * 1e3:9.3f} ms at worst")


def _print_call(name: str, call: Callable[[int], object], *, times: int = 200) -> None:
    spent = []
    for number in range(times):
        started_s = time.thread_time()
        call(number)
        spent.append(time.thread_time() - started_s)
    print(f"{name:34}{statistics.median(spent) * 1e6:9.1f} us{max(spent) * 1e6:9.0f} us at worst")


def _add(scheduler: Scheduler, number: int) -> None:
    scheduler.add_request(_sequence(number, num_tokens=4), now_s=1.0)


def _part(reports: Iterator[SequenceReport | None]) -> list[SequenceReport | None]:
    """Look at as many sequences as a turn of the engine's loop does."""
    return list(islice(reports, _PART))


def _abort(scheduler: Scheduler, number: int) -> None:
    scheduler.finish_requests([SequenceId(number)], FinishReason.ABORTED)


if __name__ == "__main__":
    raise SystemExit(main())
