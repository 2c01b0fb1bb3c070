"""Histories of sequences that a divided model must compute as one process does."""

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.interfaces import BegunStep, Executor
from scheduler.config import PreemptionMode, SchedulerConfig
from scheduler.messages import SamplingParams, SchedulerOutput, SequenceId, TokenLogprobs
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from tests.worker.conftest import BLOCK_SIZE
from tests.worker.plan_driver import GREEDY, PlanDriver
from tests.worker.ranks.divided import DividedWorker
from worker.worker import Worker
from worker.worker_config import ModelFacts, WorkerConfig

PROMPT = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110]
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, presence_penalty=0.5)
SCORED = replace(GREEDY, num_prompt_logprobs=2, num_logprobs=2)
NUM_TOKENS = 12
OVERRIDES = {
    **{key: {"moe_intermediate_size": 64} for key in ("qwen3_moe", "qwen3_next")},
    **{key: {"v_head_dim": 16} for key in ("deepseek_v3", "deepseek_v32")},
}
"""Sizes of checkpoints that would not divide as they are."""

_NUM_REQUESTS, _NUM_TOKENS_SERVED = 12, 14
_FEW_BLOCKS = 26
"""Too few for all requests at once."""
_PREFIX = tuple(range(20, 31))

Tokens = list[list[int]]


def config_of(checkpoint: Path) -> WorkerConfig:
    return WorkerConfig(
        model_path=str(checkpoint),
        dtype="float32",
        device="cpu",
        num_threads=1,
        block_size=BLOCK_SIZE,
        num_blocks=400,
        max_num_seqs=8,
        swap_space_bytes=1 << 20,
    )


def load_alone(checkpoint: Path) -> tuple[Worker, ModelFacts]:
    alone = Worker(config_of(checkpoint))
    return alone, alone.load(lambda _progress: None)


def load_divided(divided: DividedWorker, checkpoint: Path) -> ModelFacts:
    """Load, and look whether all ranks were asked for what one process has."""
    config = replace(config_of(checkpoint), num_ranks=divided.num_shards, num_stages=divided.num_stages)
    facts = divided.load(config)
    assert (facts.num_stages, facts.num_ranks) == (
        divided.num_stages,
        divided.num_stages * divided.num_shards,
    )
    assert facts.max_drafts == 0 or facts.num_stages == 1, "stages verify none"
    return facts


def a_busy_hour(worker: Any) -> tuple[Tokens, list[TokenLogprobs]]:
    """Chunks of a prompt, three seeds over one prefix, both kinds of preemption, and a scored prompt."""
    driver = PlanDriver(worker, BLOCK_SIZE)
    greedy = driver.add([*PROMPT, 5, 6, 7])
    driver.step({greedy: 6})
    driver.step({greedy: 5})
    driver.generate([greedy], 3)
    others = [driver.add([*PROMPT, 9], replace(SEEDED, seed=seed), shares_with=greedy) for seed in range(3)]
    everyone = [greedy, *others]
    driver.generate(everyone, 6)
    driver.preempt(others[0])
    driver.swap_out(others[1])
    driver.generate([greedy, others[2]], 9)
    driver.generate(everyone, NUM_TOKENS)
    scored = driver.add(PROMPT[::-1], SCORED)
    first, second = driver.step({scored: 4}), driver.step({scored: None})
    logprobs = [entry for part in (first, second) for each in part.prompt_logprobs.values() for entry in each]
    tokens = [driver.generated(each) for each in (*everyone, scored)]
    driver.release_all()
    return tokens, logprobs


def check_busy_hour(worker: Any, expected: tuple[Tokens, list[TokenLogprobs]]) -> None:
    """Raise AssertionError unless it has the same tokens, and log-probabilities as near as sums allow."""
    tokens, logprobs = a_busy_hour(worker)
    assert tokens == expected[0]
    assert all(tokens)
    assert len(logprobs) == len(PROMPT) - 1
    for ours, theirs in zip(logprobs, expected[1], strict=True):
        assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def _requests() -> list[Sequence]:
    """Prompts of different lengths, of which some begin alike; greedy and seeded."""
    found = []
    for number in range(_NUM_REQUESTS):
        own = tuple(40 + (number * 7 + place) % 50 for place in range(1 + 5 * (number % 4)))
        prompt = (*_PREFIX, *own) if number % 2 else own
        temperature = 0.0 if number % 3 else 0.9
        params = SamplingParams(max_tokens=_NUM_TOKENS_SERVED, temperature=temperature, seed=number)
        found.append(Sequence(SequenceId(number), prompt, params))
    return found


def _release(sequences: list[Sequence]) -> SchedulerOutput:
    """Plan that computes nothing: the next history has the same numbers."""
    return SchedulerOutput(
        step=0,
        released=tuple(seq.sequence_id for seq in sequences),
        new_sequences=(),
        new_blocks={},
        scheduled=(),
        num_scheduled_tokens=0,
    )


def serve(worker: Executor, facts: ModelFacts, mode: PreemptionMode) -> Tokens:
    """Tokens of requests that preempt each other. Plans are made ahead as the engine's loop does.

    States take blocks besides.
    """
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=24,
        preemption_mode=mode,
        num_blocks=_FEW_BLOCKS + 5 * facts.num_state_blocks,
        num_host_blocks=facts.num_host_blocks,
        block_size=facts.block_size,
        max_model_len=facts.max_model_len,
        groups=facts.groups,
        num_stages=facts.num_stages,
        max_plans_in_flight=facts.num_stages + 1 if facts.num_stages > 1 else 1,
    )
    scheduler, all_of_them = Scheduler(config), _requests()
    for seq in all_of_them:
        scheduler.add_request(seq, now_s=0.0)
    under_way: deque[tuple[SchedulerOutput, BegunStep]] = deque()
    while scheduler.has_unfinished_requests or under_way:
        plan = scheduler.schedule(now_s=1.0)
        if not plan.is_empty:
            under_way.append((plan, worker.launch(plan)))
        if under_way and (plan.is_empty or not scheduler.can_schedule):
            oldest, launched = under_way.popleft()
            scheduler.update_from_output(oldest, launched.result())
    worker.launch(_release(all_of_them)).result()
    stats = scheduler.stats()
    assert sum(stats.num_preemptions.values()) > 0
    assert stats.num_prefix_hits > 0
    return [seq.token_ids[seq.num_prompt_tokens :] for seq in all_of_them]
