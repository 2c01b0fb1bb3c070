"""Many requests over few blocks: a state that is found where another text has been gives other tokens."""

from random import Random

import pytest

from scheduler.config import PrefixCaching, SchedulerConfig
from scheduler.messages import SchedulerOutput
from scheduler.scheduler import Scheduler
from tests.fakes import make_sequence
from tests.invariants import check_invariants
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from worker.worker import Worker
from worker.worker_config import ModelFacts

COMMON = [(17 * index + 8) % 300 for index in range(9)]
PREFIXES = [[(number * 37 + 7 * index + 3) % 300 for index in range(25 + 3 * number)] for number in range(4)]

Prompt = tuple[int, ...]


def answers(
    worker: Worker, facts: ModelFacts, prompts: list[Prompt], **changes: object
) -> tuple[list[list[int]], Scheduler]:
    """Tokens of each prompt, of which up to six are under way at once."""
    settings = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "watermark": 0.0} | changes
    scheduler = Scheduler(
        SchedulerConfig(
            **{"num_blocks": facts.num_blocks, **settings},  # type: ignore[arg-type]
            block_size=BLOCK_SIZE,
            max_model_len=facts.max_model_len,
            groups=facts.groups,
        )
    )
    tokens: list[list[int]] = [[] for _ in prompts]
    num_added = num_ended = 0
    while num_ended < len(prompts):
        while num_added < len(prompts) and num_added - num_ended < 6:
            prompt = list(prompts[num_added])
            scheduler.add_request(make_sequence(num_added, prompt, max_tokens=len(prompt) % 4 + 1), now_s=0.0)
            num_added += 1
        plan = scheduler.schedule(now_s=0.0)
        for output in scheduler.update_from_output(plan, worker.execute(plan)).get(0, []):
            tokens[output.sequence_id] += output.token_ids
            num_ended += output.finish_reason is not None
        if plan.step % 20 == 0:
            check_invariants(scheduler)
    worker.execute(SchedulerOutput(0, tuple(scheduler._released), (), {}, (), 0))  # for the next scheduler
    return tokens, scheduler


@pytest.mark.parametrize(
    ("family", "num_requests"),
    [
        ("qwen3_next", 250),
        pytest.param("lfm2", 500, marks=pytest.mark.night),
        pytest.param("mamba", 500, marks=pytest.mark.night),
    ],
)
def test_no_token_differs_from_those_without_a_prefix_cache(
    checkpoints: MakeCheckpoint, family: str, num_requests: int
) -> None:
    """Turns and forks of four prefixes, in a cache of a few states (vLLM #47194, SGLang #36537)."""
    worker, facts = load_worker(checkpoints(family), num_blocks=40 + 8 * 40)
    drawn = Random(1)
    # They part within a block, so that what lies behind a full block is one of several texts.
    ends = [(*COMMON[: drawn.randint(0, 9)], drawn.randrange(300)) for _ in range(12)]
    prompts: list[Prompt] = [(*drawn.choice(PREFIXES), *drawn.choice(ends)) for _ in range(num_requests)]
    unique = sorted(set(prompts))
    alone, _ = answers(worker, facts, unique, prefix_caching=PrefixCaching.OFF)
    expected = dict(zip(unique, alone, strict=True))
    # Every third goes on where another ended: with its reply, or without the last tokens of that.
    turns = [(*each, *expected[each][: drawn.randint(1, 4)], *drawn.choice(ends)) for each in unique[::3]]
    replies, _ = answers(worker, facts, turns, prefix_caching=PrefixCaching.OFF)
    expected |= dict(zip(turns, replies, strict=True))
    asked = [drawn.choice(turns) if number % 3 == 2 else each for number, each in enumerate(prompts)]
    num_blocks = 40 if facts.num_state_blocks < 8 else 40 + 4 * facts.num_state_blocks
    found, scheduler = answers(worker, facts, asked, num_blocks=num_blocks)
    assert [each for each in zip(asked, found, strict=True) if each[1] != expected[each[0]]] == []
    assert scheduler.stats().num_prefix_hits > num_requests, "states are found"
