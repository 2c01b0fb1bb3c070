"""The engine's loop over a real worker whose device has too little memory now and then."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.loop import EngineLoop
from engine.process_messages import AddRequest
from scheduler import scheduler as scheduler_module
from scheduler.config import SchedulerConfig
from scheduler.messages import FinishReason, SamplingParams, SequenceId, ServiceTerms
from scheduler.scheduler import Scheduler
from tests.engine.core.test_loop import Desk
from tests.worker.conftest import BLOCK_SIZE, load_worker
from tests.worker.gpu.ahead import let_work_ahead
from worker.worker import Worker

PROMPTS = [[(number * 31 + place * 7) % 300 for place in range(3 + 5 * number)] for number in range(5)]
MAX_TOKENS = 9


def open_loop(folder: Path, depth: int) -> tuple[EngineLoop, Desk, Any]:
    """And whoever computes steps, to be broken."""
    worker, facts = load_worker(folder, num_blocks=64)
    steps: Any = let_work_ahead(worker) if depth > 1 else steps_of(worker)
    config = SchedulerConfig(
        num_blocks=facts.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_model_len=64,
        max_plans_in_flight=depth,
    )
    desk = Desk()
    return EngineLoop(Scheduler(config), worker, desk, lambda: desk.now_s), desk, steps


def steps_of(worker: Worker) -> Any:
    return worker._steps._steps  # type: ignore[union-attr]


def served(folder: Path, depth: int, short_at: set[int]) -> tuple[dict[int, list[int]], int]:
    """The tokens of each prompt, and how often memory was short; of these computations it is."""
    loop, desk, steps = open_loop(folder, depth)
    compute, calls = steps.compute, iter(range(10**6))

    def compute_or_not(inputs: Any) -> Any:
        if next(calls) in short_at:
            raise torch.OutOfMemoryError("planted. A second sentence")
        return compute(inputs)

    steps.compute = compute_or_not
    desk.letters.append([asked(number, prompt) for number, prompt in enumerate(PROMPTS, 1)])
    for _ in range(200):
        loop.turn()
    ends = {news.sequence_id: news.finish_reason for news in desk.news() if news.finish_reason is not None}
    assert set(ends.values()) == {FinishReason.LENGTH}
    tokens: dict[int, list[int]] = {}
    for news in desk.news():
        tokens.setdefault(news.sequence_id, []).extend(news.token_ids)
    return tokens, desk.beats()[-1].stats.num_out_of_memory


def asked(number: int, prompt: list[int]) -> AddRequest:
    return AddRequest(
        sequence_ids=(SequenceId(number),),
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
        terms=ServiceTerms(),
    )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("short_at", [{0}, {1, 2}, {3, 9, 10, 17}, set(range(0, 60, 5))])
def test_steps_without_memory_change_nobodys_tokens(
    tiny_model: Path, depth: int, short_at: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "SMALLEST_CHUNK_TOKENS", 0)
    expected, never = served(tiny_model, 1, set())
    tokens, often = served(tiny_model, depth, short_at)
    assert tokens == expected
    assert never == 0
    assert 1 <= often <= len(short_at)
