"""Prompts to be pooled under a real scheduler: few blocks, sliding windows, small steps."""

from pathlib import Path

import numpy as np
import pytest
from torch.nn import functional

from scheduler.config import SchedulerConfig
from scheduler.messages import (
    FinishReason,
    PoolingParams,
    SamplingParams,
    SequenceId,
    SequenceInputs,
    SequenceOutput,
)
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from tests.pooling_checkpoints import make_embedder, write_pooling_files
from tests.tiers import by_day
from tests.worker.conftest import load_worker
from tests.worker.pooling.test_pooling import hidden_states, pooled

LENGTHS = (40, 30, 12, 44, 20, 41)
PROMPTS = [
    [(7 * place + number) % 290 + 5 for place in range(length)] for number, length in enumerate(LENGTHS)
]


@pytest.mark.parametrize("num_blocks", by_day([None, 12], [12]))
@pytest.mark.parametrize(
    ("family", "mode"),
    [("mistral", "lasttoken"), ("mistral", "mean"), ("llama", "lasttoken"), ("bert", "mean")],
)
def test_each_prompt_gets_its_vector_however_few_blocks_there_are(
    family: str, mode: str, num_blocks: int | None, tmp_path: Path
) -> None:
    folder = make_embedder(family, tmp_path / family)
    write_pooling_files(folder, mode)
    worker, facts = load_worker(folder, max_num_batched_tokens=48, num_blocks=num_blocks)
    assert facts.pooling is not None
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            max_model_len=facts.max_model_len,
            groups=facts.groups,
            max_num_seqs=8,
            max_num_batched_tokens=48,
        )
    )
    pooling = PoolingParams(task=facts.pooling.task, prompt=facts.pooling.prompt)
    for number, prompt in enumerate(PROMPTS):
        seq = Sequence(
            SequenceId(number), tuple(prompt), SamplingParams(), inputs=SequenceInputs(pooling=pooling)
        )
        scheduler.add_request(seq, now_s=0.0)
    outputs: dict[SequenceId, SequenceOutput] = {}
    while scheduler.has_unfinished_requests:
        plan = scheduler.schedule(now_s=0.0)
        assert not plan.is_empty, "nobody can be served"
        for output in scheduler.update_from_output(plan, worker.execute(plan)).get(0, []):
            assert outputs.setdefault(output.sequence_id, output) is output, "told twice"
    assert scheduler.stats().num_used_blocks == 0
    for number, prompt in enumerate(PROMPTS):
        output = outputs[SequenceId(number)]
        assert output.finish_reason is FinishReason.STOP
        expected = functional.normalize(pooled(hidden_states(folder, prompt), mode), dim=0)
        np.testing.assert_allclose(np.frombuffer(output.pooled, dtype="<f4"), expected.numpy(), atol=2e-5)
