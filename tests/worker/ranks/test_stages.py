"""A model in stages samples the tokens that it samples in one process, with several plans in flight."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.loop import Executor, Launched
from scheduler.config import PreemptionMode, SchedulerConfig
from scheduler.messages import SamplingParams, SchedulerOutput, SequenceId
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from tests.checkpoints import make_checkpoint
from tests.worker.conftest import BLOCK_SIZE
from tests.worker.plan_driver import PlanDriver
from tests.worker.ranks.divided import DividedWorker
from tests.worker.ranks.test_divided_models import OVERRIDES, a_busy_hour, config_of
from worker.worker import Worker
from worker.worker_config import DraftMethod, ModelFacts, SpeculationConfig
from worker.worker_errors import StartupError

FAMILIES = (
    *("llama", "dynamic_rope", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3_longrope"),
    *("mixtral", "qwen3_moe"),
)
NUM_REQUESTS, NUM_TOKENS = 12, 14
NUM_BLOCKS = 26
"""Too few for all requests at once."""
PREFIX = tuple(range(20, 31))


@pytest.fixture(scope="module")
def two_stages() -> Iterator[DividedWorker]:
    worker = DividedWorker(1, num_stages=2)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


def requests() -> list[Sequence]:
    """Prompts of different lengths, of which some begin alike; greedy and seeded."""
    found = []
    for number in range(NUM_REQUESTS):
        own = tuple(40 + (number * 7 + place) % 50 for place in range(1 + 5 * (number % 4)))
        prompt = (*PREFIX, *own) if number % 2 else own
        temperature = 0.0 if number % 3 else 0.9
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=number)
        found.append(Sequence(SequenceId(number), prompt, params))
    return found


def serve(worker: Executor, facts: ModelFacts, mode: PreemptionMode) -> tuple[list[list[int]], Scheduler]:
    """Tokens of each request. Plans are made ahead as the engine's loop does."""
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=24,
        preemption_mode=mode,
        num_blocks=facts.num_blocks,
        num_host_blocks=facts.num_host_blocks,
        block_size=facts.block_size,
        max_model_len=facts.max_model_len,
        sliding_window=facts.sliding_window,
        num_stages=facts.num_stages,
        max_plans_in_flight=facts.num_stages + 1 if facts.num_stages > 1 else 1,
    )
    scheduler, all_of_them = Scheduler(config), requests()
    for seq in all_of_them:
        scheduler.add_request(seq, now_s=0.0)
    under_way: deque[tuple[SchedulerOutput, Launched]] = deque()
    while scheduler.has_unfinished_requests or under_way:
        plan = scheduler.schedule(now_s=1.0)
        if not plan.is_empty:
            under_way.append((plan, worker.launch(plan)))
        if under_way and (plan.is_empty or not scheduler.can_schedule):
            oldest, launched = under_way.popleft()
            scheduler.update_from_output(oldest, launched.result())
    return [seq.token_ids[seq.num_prompt_tokens :] for seq in all_of_them], scheduler


def compare(divided: DividedWorker, checkpoint: Path, num_stages: int, num_ranks: int = 1) -> None:
    alone_config = replace(config_of(checkpoint, 1), num_blocks=NUM_BLOCKS)
    divided_config = replace(alone_config, num_stages=num_stages, num_ranks=num_ranks)
    for mode in (PreemptionMode.RECOMPUTE, PreemptionMode.SWAP):
        alone = Worker(alone_config)
        expected, _ = serve(alone, alone.load(lambda _progress: None), mode)
        facts = divided.load(divided_config)
        found, scheduler = serve(divided, facts, mode)
        assert found == expected
        assert all(found)
        stats = scheduler.stats()
        assert sum(each.num for each in stats.preemptions) > 0
        assert stats.num_prefix_hits > 0
        assert (facts.num_stages, facts.num_ranks) == (num_stages, num_stages * num_ranks)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_stages_sample_the_tokens_of_one(two_stages: DividedWorker, folder: Path, family: str) -> None:
    compare(two_stages, make_checkpoint(family, folder / family, **OVERRIDES.get(family, {})), 2)


def test_scored_prompts_and_one_plan_at_a_time(two_stages: DividedWorker, folder: Path) -> None:
    checkpoint = make_checkpoint("llama", folder / "scored")
    alone = Worker(config_of(checkpoint, 1))
    alone.load(lambda _progress: None)
    expected, expected_logprobs = a_busy_hour(PlanDriver(alone, BLOCK_SIZE))
    two_stages.load(replace(config_of(checkpoint, 1), num_stages=2))
    found, logprobs = a_busy_hour(PlanDriver(two_stages, BLOCK_SIZE))  # type: ignore[arg-type]
    assert found == expected
    assert [each.token_id for each in logprobs] == [each.token_id for each in expected_logprobs]


def test_stages_have_ranks_of_their_own(folder: Path) -> None:
    grid = DividedWorker(2, num_stages=2)
    try:
        compare(grid, make_checkpoint("llama", folder / "grid", tie_word_embeddings=True), 2, 2)
    finally:
        grid.close()


def test_each_stage_keeps_the_cache_of_its_layers(two_stages: DividedWorker, folder: Path) -> None:
    checkpoint = make_checkpoint("llama", folder / "cache", num_hidden_layers=4)
    alone = Worker(config_of(checkpoint, 1)).load(lambda _progress: None)
    facts = two_stages.load(replace(config_of(checkpoint, 1), num_stages=2))
    assert facts.kv_cache_bytes * 2 == alone.kv_cache_bytes
    assert (facts.num_blocks, facts.num_host_blocks) == (alone.num_blocks, alone.num_host_blocks)


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("llama", {"num_hidden_layers": 1}, "it has 1 layers"),
        ("gpt2", {}, "--pipeline-parallel-size 2 does not fit this model: .* 0 of 0 layers fused"),
    ],
)
def test_models_that_have_no_stages_are_refused_with_the_reason(
    two_stages: DividedWorker, folder: Path, family: str, overrides: dict[str, int], reason: str
) -> None:
    checkpoint = make_checkpoint(family, folder / f"no {family}", **overrides)
    with pytest.raises(StartupError, match=reason):
        two_stages.load(replace(config_of(checkpoint, 1), num_stages=2))


def test_drafts_are_refused_by_stages_and_none_are_expected(two_stages: DividedWorker, folder: Path) -> None:
    config = replace(config_of(make_checkpoint("llama", folder / "no drafts"), 1), num_stages=2)
    with pytest.raises(StartupError, match="--speculative-config: stages verify no drafts yet"):
        two_stages.load(replace(config, speculation=SpeculationConfig(method=DraftMethod.SUFFIX)))
    assert two_stages.load(config).max_drafts == 0
