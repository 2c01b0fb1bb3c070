"""The real scheduler with plans in flight, over a worker whose tokens are read late."""

from pathlib import Path

import pytest

from scheduler.config import SchedulerConfig
from scheduler.messages import SequenceId
from scheduler.scheduler import Scheduler
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from tests.worker.gpu.ahead import let_work_ahead
from tests.worker.gpu.served import Served, serve
from tests.worker.transformers_generate import NUM_TOKENS, expected
from worker.worker import Worker
from worker.worker_config import ModelFacts

PROMPTS = [
    [(step * index + 3) % 300 for index in range(length)]
    for step, length in ((7, 25), (13, 30), (11, 9), (5, 14))
]


@pytest.fixture(scope="module", params=["llama", "mistral"])
def folder(request: pytest.FixtureRequest, checkpoints: MakeCheckpoint) -> Path:
    return checkpoints(request.param)


def serve_with_scheduler(worker: Worker, facts: ModelFacts) -> Served:
    """PROMPTS in too few blocks, with two plans in flight."""
    config = SchedulerConfig(
        num_blocks=15,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        max_model_len=facts.max_model_len,
        watermark=0.0,
        num_host_blocks=facts.num_host_blocks,
        groups=facts.groups,
        max_plans_in_flight=2,
    )
    return serve(worker, Scheduler(config), PROMPTS, NUM_TOKENS)


def expected_tokens(folder: Path) -> dict[SequenceId, list[int]]:
    """Tokens by transformers, each prompt alone."""
    return {SequenceId(number): expected(folder, tuple(prompt)) for number, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("swap_bytes", [0, 1 << 20])
def test_sequences_that_are_preempted_with_a_token_in_flight_draw_what_they_draw_alone(
    folder: Path, swap_bytes: int
) -> None:
    worker, facts = load_worker(folder, num_blocks=60, swap_space_bytes=swap_bytes)
    steps = let_work_ahead(worker)
    served = serve_with_scheduler(worker, facts)
    assert served.tokens == expected_tokens(folder)
    assert served.num_preemptions > 0
    assert steps.num_filled > NUM_TOKENS
