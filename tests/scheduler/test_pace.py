"""The default pace: chunks of prompts are sized by what steps take on this machine."""

from statistics import median
from typing import NamedTuple

import pytest

from scheduler.config import SchedulerConfig
from scheduler.messages import ModelRunnerOutput
from scheduler.scheduler import Scheduler
from tests.fakes import make_sequence

BY_DEFAULT = {"target_itl_s": 0.075, "least_prefill_share": 0.5}
"""On a CPU."""
ELSEWHERE = {"target_itl_s": 0.2, "least_prefill_share": 0.5}


class Machine(NamedTuple):
    base_s: float
    token_s: float


TWO_CORES = Machine(0.09, 0.0078)
"""A model of 0.6 billion parameters."""


class Found(NamedTuple):
    gaps_s: list[float]
    first_s: list[float]
    duration_s: float


def lockstep(machine: Machine, **pace: float) -> Found:
    """Eight clients, each with its next prompt of 128 tokens once it has the 64 tokens of the last."""
    config = SchedulerConfig(
        num_blocks=4000,
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_prefill_tokens=256,
        max_model_len=1000,
        **pace,
    )
    scheduler, now_s, gaps_s, first_s = Scheduler(config), 0.0, [], []
    arrived_s: dict[int, float] = {}
    last_s: dict[int, float] = {}

    def arrive(number: int) -> None:
        prompt = [number * 131 + place for place in range(128)]
        scheduler.add_request(make_sequence(number, prompt, max_tokens=64), now_s=now_s)
        arrived_s[number] = now_s

    for number in range(8):
        arrive(number)
    while scheduler.has_unfinished_requests:
        plan = scheduler.schedule(now_s=now_s)
        took_s = machine.base_s + machine.token_s * plan.num_scheduled_tokens
        now_s += took_s
        scheduler.observe_step(plan, took_s)
        sampled = {share.sequence_id: (5,) for share in plan.scheduled if share.samples}
        result = ModelRunnerOutput(token_ids=sampled, logprobs={}, failures={})
        for output in scheduler.update_from_output(plan, result)[0]:
            number = int(output.sequence_id)
            if number in last_s:
                gaps_s.append(now_s - last_s[number])
            else:
                first_s.append(now_s - arrived_s[number])
            last_s[number] = now_s
            if output.finish_reason is not None and number + 8 < 32:
                arrive(number + 8)
    assert len(first_s) == 32
    return Found(gaps_s, first_s, now_s)


def test_no_stream_pauses_for_seconds_while_prompts_come_and_first_tokens_come_in_time() -> None:
    paced, unpaced = lockstep(TWO_CORES, **BY_DEFAULT), lockstep(TWO_CORES)
    assert max(unpaced.gaps_s) > 2.0
    assert max(paced.gaps_s) < 0.31, "sixteen tokens are the smallest chunk"
    assert median(paced.first_s) < 1.3 * median(unpaced.first_s)
    assert paced.duration_s < 1.1 * unpaced.duration_s


def test_short_pauses_cost_a_small_model_next_to_nothing() -> None:
    small = Machine(0.0145, 0.00093)
    short, long = lockstep(small, **BY_DEFAULT), lockstep(small, **ELSEWHERE)
    assert max(long.gaps_s) > 0.19
    assert max(short.gaps_s) < 0.09
    assert short.duration_s < 1.03 * long.duration_s
    assert median(short.first_s[:8]) < 1.05 * median(long.first_s[:8])


@pytest.mark.parametrize("base_s", [0.15, 1.0])
def test_a_large_model_gives_prompts_as_much_time_as_decodes(base_s: float) -> None:
    machine = Machine(base_s, 0.002)
    paced, strict = lockstep(machine, **BY_DEFAULT), lockstep(machine, target_itl_s=0.2)
    assert max(paced.gaps_s) <= 2.1 * (base_s + 8 * machine.token_s)
    assert median(paced.first_s) < median(strict.first_s)


def test_a_fast_device_computes_whole_prompts() -> None:
    machine = Machine(0.005, 0.00002)
    paced, unpaced = lockstep(machine, **ELSEWHERE), lockstep(machine)
    assert paced == unpaced
