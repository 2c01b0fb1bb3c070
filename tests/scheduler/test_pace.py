"""The default pace: chunks of prompts are sized by what steps take on this machine."""

from collections import deque
from random import Random
from statistics import median
from typing import NamedTuple

import pytest

from scheduler.config import SchedulerConfig
from scheduler.messages import ModelRunnerOutput, SchedulerOutput
from scheduler.scheduler import Scheduler
from tests.fakes import make_sequence

SHARES = {"least_prefill_share": 0.5, "large_crowd_prefill_share": 0.85, "prefill_patience_s": 4.0}
IN_A_CROWD = SHARES | {"target_itl_s": 0.07}
"""Our target on a CPU for a crowd, and for few as well: what a default without 0.5 s for few would be."""
BY_DEFAULT = IN_A_CROWD | {"uncrowded_itl_s": 0.5}
"""Our targets on a CPU."""
ELSEWHERE = IN_A_CROWD | {"target_itl_s": 0.2}
HALVES = BY_DEFAULT | {"large_crowd_prefill_share": 0.5}
"""Prompts get as much time as decodes and no more, however many there are."""
THREE_FIFTHS = BY_DEFAULT | {"large_crowd_prefill_share": 0.6}


class Machine(NamedTuple):
    base_s: float
    token_s: float
    decode_s: float = 0.0
    """For a token that decodes, beside `token_s`."""
    variation: float = 0.0
    """Standard deviation of the part by which steps take longer; one in 200 takes half as long again."""
    between_s: float = 0.0
    """Before each step."""

    def step_s(self, plan: SchedulerOutput, random: Random) -> float:
        """Time of a step; it takes its random numbers in the order of steps."""
        num_decodes = sum(share.num_tokens == 1 for share in plan.scheduled)
        took_s = self.base_s + self.token_s * plan.num_scheduled_tokens + self.decode_s * num_decodes
        if self.variation:
            took_s *= 1 + abs(random.gauss(0, self.variation)) + 0.5 * (random.random() < 0.005)
        return took_s


TWO_CORES = Machine(0.09, 0.0078)
"""A model of 0.6 billion parameters."""
TWO_FASTER_CORES = Machine(0.03, 0.00117, 0.0006)
"""With arithmetic in bfloat16."""
THE_SAME_SLOWER = Machine(0.041, 0.0024)
"""Two cores on a day of longer steps, about as fitted: 1.25 requests a second saturate them."""


class Found(NamedTuple):
    gaps_s: list[float]
    first_s: list[float]
    duration_s: float


def open_scheduler(num_stages: int, pace: dict[str, float]) -> Scheduler:
    config = SchedulerConfig(
        num_blocks=4000,
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_prefill_tokens=256,
        max_model_len=1000,
        num_stages=num_stages,
        max_plans_in_flight=num_stages + 1 if num_stages > 1 else 1,
        **pace,
    )
    return Scheduler(config)


def lockstep(
    machine: Machine, num_clients: int = 8, num_stages: int = 1, *, away_s: float = 0.0, **pace: float
) -> Found:
    """Clients, each with its next prompt of 128 tokens `away_s` after it has the 64 tokens of the last.

    Each stage is such a machine.
    """
    return serve(machine, [0.0] * num_clients, 4 * num_clients, num_stages, away_s, pace)


def poisson(machine: Machine, requests_per_s: float, seed: int = 1, **pace: float) -> Found:
    """Prompts of 128 tokens, 64 tokens each, as they come."""
    random, now_s = Random(seed), 0.0
    arrivals_s = [now_s := now_s + random.expovariate(requests_per_s) for _ in range(64)]
    return serve(machine, arrivals_s, len(arrivals_s), 1, 0.0, pace)


def serve(
    machine: Machine,
    arrivals_s: list[float],
    num_in_all: int,
    num_stages: int,
    away_s: float,
    pace: dict[str, float],
) -> Found:
    """Serve the arrivals; until it is `num_in_all`, each that is answered is followed by one more."""
    random = Random(1)
    scheduler, now_s, gaps_s, first_s = open_scheduler(num_stages, pace), 0.0, [], []
    arrived_s: dict[int, float] = {}
    last_s: dict[int, float] = {}
    coming = deque((moment_s, number) for number, moment_s in enumerate(arrivals_s))
    under_way: deque[tuple[SchedulerOutput, float, float]] = deque()
    done_s = [0.0] * num_stages
    while coming or scheduler.has_unfinished_requests:
        if not scheduler.has_unfinished_requests:
            now_s = max(now_s, coming[0][0])
        while coming and coming[0][0] <= now_s:
            moment_s, number = coming.popleft()
            arrived_s[number] = moment_s
            prompt = [number * 131 + place for place in range(128)]
            scheduler.add_request(make_sequence(number, prompt, max_tokens=64), now_s=moment_s)
        while scheduler.can_schedule and not (plan := scheduler.schedule(now_s=now_s)).is_empty:
            launched_s = end_s = now_s + machine.between_s
            stage_s = machine.step_s(plan, random)
            for stage in range(num_stages):
                done_s[stage] = end_s = max(end_s, done_s[stage]) + stage_s
            under_way.append((plan, launched_s, end_s))
        plan, launched_s, end_s = under_way.popleft()
        began_s, waited_s = max(launched_s, now_s), max(launched_s - now_s, 0.0)
        now_s = end_s
        scheduler.observe_step(plan, now_s - began_s, waited_s=waited_s)
        sampled = {share.sequence_id: (5,) for share in plan.scheduled if share.samples}
        result = ModelRunnerOutput(token_ids=sampled, logprobs={}, failures={})
        for output in scheduler.update_from_output(plan, result).get(0, []):
            number = int(output.sequence_id)
            if number in last_s:
                gaps_s.append(now_s - last_s[number])
            else:
                first_s.append(now_s - arrived_s[number])
            last_s[number] = now_s
            if output.finish_reason is not None and number + len(arrivals_s) < num_in_all:
                coming.append((now_s + away_s, number + len(arrivals_s)))
    assert len(first_s) == num_in_all
    return Found(gaps_s, first_s, now_s)


def p99(pauses_s: list[float]) -> float:
    return sorted(pauses_s)[int(0.99 * len(pauses_s))]


@pytest.mark.parametrize(
    "machine",
    [
        Machine(0.0145, 0.00093, variation=0.04),
        Machine(0.0145, 0.00093, between_s=0.007),
        TWO_FASTER_CORES,
        TWO_FASTER_CORES._replace(variation=0.02),
    ],
)
def test_ninety_nine_pauses_of_a_hundred_keep_the_target(machine: Machine) -> None:
    paced, none = lockstep(machine, target_itl_s=0.07), lockstep(machine)
    assert p99(paced.gaps_s) <= 0.07 < p99(none.gaps_s)
    assert paced.duration_s < 1.15 * none.duration_s


@pytest.mark.parametrize("num_stages", [2, 3])
def test_with_several_stages_the_target_is_that_of_a_sequences_pause(num_stages: int) -> None:
    stage = Machine(0.0145 / num_stages, 0.00093 / num_stages)
    paced = lockstep(stage, num_stages=num_stages, target_itl_s=0.07)
    none = lockstep(stage, num_stages=num_stages)
    assert p99(paced.gaps_s) <= 0.07
    assert p99(none.gaps_s) > 0.12
    assert paced.duration_s < 1.05 * none.duration_s


def test_by_default_a_crowd_keeps_the_target_until_prompts_have_waited_for_seconds() -> None:
    few, many = (lockstep(TWO_FASTER_CORES, num, **BY_DEFAULT) for num in (8, 32))
    assert p99(few.gaps_s) <= 0.07 < p99(many.gaps_s)
    strict = lockstep(TWO_FASTER_CORES, 32, target_itl_s=0.07)
    assert median(many.first_s) < 0.5 * median(strict.first_s)
    assert many.duration_s < 0.8 * strict.duration_s


@pytest.mark.parametrize(("decodes_s", "keeps_target"), [(0.046, True), (0.049, False)])
def test_a_crowd_keeps_the_target_while_decodes_take_less_than_two_thirds_of_it(
    decodes_s: float, *, keeps_target: bool
) -> None:
    of_eight_s = 8 * (TWO_FASTER_CORES.token_s + TWO_FASTER_CORES.decode_s)
    found = lockstep(TWO_FASTER_CORES._replace(base_s=decodes_s - of_eight_s), 8, **BY_DEFAULT)
    assert (p99(found.gaps_s) <= 0.07) is keeps_target


def test_a_prompt_that_has_waited_for_seconds_gets_more_of_a_step_than_the_target_left_it() -> None:
    pace = BY_DEFAULT | {"target_itl_s": 0.08}
    patient, strict = (
        lockstep(TWO_FASTER_CORES, 32, **pace),
        lockstep(TWO_FASTER_CORES, 32, target_itl_s=0.08),
    )
    assert median(patient.first_s) < 0.7 * median(strict.first_s)


def test_no_stream_of_a_crowd_pauses_for_seconds_while_prompts_come_and_first_tokens_come_in_time() -> None:
    paced, unpaced = lockstep(TWO_CORES, **BY_DEFAULT), lockstep(TWO_CORES)
    assert max(unpaced.gaps_s) > 2.0
    assert max(paced.gaps_s) < 0.31, "sixteen tokens are the smallest chunk"
    assert median(paced.first_s) < 1.3 * median(unpaced.first_s)
    assert paced.duration_s < 1.1 * unpaced.duration_s


def test_short_pauses_of_a_crowd_cost_a_small_model_next_to_nothing() -> None:
    small = Machine(0.0145, 0.00093)
    short, long = lockstep(small, **BY_DEFAULT), lockstep(small, **ELSEWHERE)
    assert max(long.gaps_s) > 0.18
    assert max(short.gaps_s) < 0.08
    assert short.duration_s < 1.04 * long.duration_s
    assert median(short.first_s[:8]) < 1.05 * median(long.first_s[:8])


@pytest.mark.parametrize("base_s", [0.15, 1.0])
def test_a_large_model_gives_the_prompts_of_eight_about_as_much_time_as_decodes(base_s: float) -> None:
    machine = Machine(base_s, 0.002)
    paced, strict = lockstep(machine, **BY_DEFAULT), lockstep(machine, target_itl_s=0.2)
    assert max(paced.gaps_s) <= 2.1 * (base_s + 8 * machine.token_s)
    assert median(paced.first_s) < median(strict.first_s)
    assert paced == lockstep(machine, **BY_DEFAULT | {"prefill_patience_s": 0.0}), "at once"
    few, crowd = lockstep(machine, 4, **BY_DEFAULT), lockstep(machine, 4, **IN_A_CROWD)
    assert median(few.first_s) <= median(crowd.first_s), "few have no less"


def check_share(machine: Machine, num_clients: int, share: float) -> None:
    """Check the longest step of a crowd in lockstep: one prompt gets `share` of it, beside all others."""
    found = lockstep(machine, num_clients, **IN_A_CROWD)
    most_s = (machine.base_s + (num_clients - 1) * machine.token_s) / (1 - share)
    # One or two prompts are being computed, and a step has whole tokens.
    assert 0 <= most_s - max(found.gaps_s) + 1e-6 < machine.token_s / (1 - share) + machine.token_s


@pytest.mark.parametrize(
    ("num_clients", "share"),
    [(6, 0.5), (7, 0.5), (8, 0.5), (9, 0.5875), (10, 0.675), (11, 0.7625), (12, 0.85)],
)
def test_prompts_get_half_of_a_step_of_eight_and_more_with_each_sequence_up_to_twelve(
    num_clients: int, share: float
) -> None:
    check_share(Machine(0.045, 0.004), num_clients, share)


@pytest.mark.parametrize(
    ("base_s", "num_clients", "share"),
    [(0.1, 12, 1 - 0.155 / 0.6), (0.1, 20, 1 - 0.195 / 0.6), (0.3, 10, 0.6), (0.3, 20, 0.6), (0.3, 8, 0.5)],
)
def test_beyond_three_fifths_prompts_of_a_large_crowd_make_no_step_longer_than_0_6_s(
    base_s: float, num_clients: int, share: float
) -> None:
    check_share(Machine(base_s, 0.005), num_clients, share)


def test_with_several_stages_the_longest_step_of_a_large_crowd_is_divided_too() -> None:
    stage = Machine(0.05, 0.002)
    found = lockstep(stage, 24, num_stages=2, **IN_A_CROWD)
    assert 0.45 < p99(found.gaps_s) <= 0.6


def test_a_large_crowd_whose_prompts_get_more_time_than_decodes_has_no_long_queue() -> None:
    found, halves = (lockstep(THE_SAME_SLOWER, 32, **pace) for pace in (BY_DEFAULT, HALVES))
    assert median(found.first_s) < 0.15 * median(halves.first_s)
    assert found.duration_s < 0.9 * halves.duration_s
    assert max(found.gaps_s) <= 0.6


@pytest.mark.parametrize("slowness", [1.0, 1.43])
def test_at_most_of_what_a_machine_answers_first_tokens_of_a_crowd_come_soon(slowness: float) -> None:
    machine = THE_SAME_SLOWER._replace(
        base_s=slowness * THE_SAME_SLOWER.base_s, token_s=slowness * THE_SAME_SLOWER.token_s
    )
    rate = 1.45 / slowness  # 80 % of what 32 clients in lockstep get
    draws = [
        [poisson(machine, rate, seed, **pace) for pace in (BY_DEFAULT, THREE_FIFTHS)] for seed in range(1, 10)
    ]
    now_s, before_s = (median(median(found.first_s) for found in rule) for rule in zip(*draws, strict=True))
    assert now_s < 0.8 * before_s
    assert all(max(found.gaps_s) < 0.9 for found, _ in draws), "no stream stops"


def test_a_fast_device_computes_whole_prompts() -> None:
    machine = Machine(0.005, 0.00002)
    paced, unpaced = lockstep(machine, **ELSEWHERE), lockstep(machine)
    assert paced == unpaced


@pytest.mark.parametrize(("requests_per_s", "longest_first_s"), [(0.625, 0.45), (1.0, 0.65)])
def test_the_prompts_of_few_are_computed_whole(requests_per_s: float, longest_first_s: float) -> None:
    # 50 and 80 % of what the machine answers.
    whole, cut = (poisson(THE_SAME_SLOWER, requests_per_s, **pace) for pace in (BY_DEFAULT, IN_A_CROWD))
    assert median(whole.first_s) < longest_first_s
    assert median(whole.first_s) < 0.75 * median(cut.first_s)
    assert p99(whole.gaps_s) < 0.42, "a prompt of 128 tokens and six decodes"
    assert whole.duration_s <= cut.duration_s


def test_the_prompts_of_few_are_whole_also_where_pauses_are_longer_than_steps() -> None:
    machine = THE_SAME_SLOWER._replace(between_s=0.12)
    found = poisson(machine, 0.5, **BY_DEFAULT)
    assert p99(found.gaps_s) > 0.12 + machine.base_s + 128 * machine.token_s


@pytest.mark.parametrize("machine", [THE_SAME_SLOWER, Machine(0.0145, 0.00093)])
def test_seven_that_send_at_once_are_a_crowd(machine: Machine) -> None:
    six, seven = (lockstep(machine, num, **BY_DEFAULT) for num in (6, 7))
    assert p99(six.gaps_s) > 2 * p99(seven.gaps_s)
    assert seven == lockstep(machine, 7, **IN_A_CROWD)


@pytest.mark.parametrize("machine", [THE_SAME_SLOWER, Machine(0.0145, 0.00093)])
def test_eight_clients_stay_a_crowd_while_one_of_them_is_away_for_milliseconds(machine: Machine) -> None:
    found, crowd = (lockstep(machine, away_s=0.005, **pace) for pace in (BY_DEFAULT, IN_A_CROWD))
    assert p99(found.gaps_s) <= 1.03 * p99(crowd.gaps_s)


def test_with_several_stages_the_pauses_of_few_are_divided_too() -> None:
    stage = Machine(0.041 / 2, 0.0024 / 2)
    few, crowd = (lockstep(stage, 4, num_stages=2, **pace) for pace in (BY_DEFAULT, IN_A_CROWD))
    assert 0.3 < max(few.gaps_s) <= 0.5
    assert few.duration_s < 0.95 * crowd.duration_s
