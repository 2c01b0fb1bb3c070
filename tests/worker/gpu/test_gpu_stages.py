"""Stages on GPUs: tokens of one process on a CPU, with several plans on their way through the stages."""

from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.config import PreemptionMode
from tests.checkpoints import make_checkpoint
from tests.worker.gpu import test_gpu_worker as whole
from tests.worker.gpu.gpu_ranks import AT_ONCE, OWN, SHARED, rank_0
from tests.worker.gpu.interpreted_gpu import HAS_GPU
from tests.worker.ranks.divided import GRID, TWO_STAGES, DividedWorker
from tests.worker.ranks.histories import config_of, load_alone, serve
from worker.worker_config import WorkerConfig

pytestmark = pytest.mark.skipif(HAS_GPU, reason="stand-ins are needed")


def config_for(divided: DividedWorker, folder: Path, device: str) -> WorkerConfig:
    return replace(
        config_of(folder),
        device=device,
        num_stages=divided.num_stages,
        num_ranks=divided.num_shards,
        max_num_batched_tokens=24,
        enforce_eager=device == SHARED,
    )


@pytest.mark.parametrize(
    ("division", "device", "mode"),
    [(TWO_STAGES, OWN, PreemptionMode.SWAP), (GRID, SHARED, PreemptionMode.RECOMPUTE)],
)
def test_stages_draw_the_tokens_of_one_process(
    tmp_path: Path, division: str, device: str, mode: PreemptionMode
) -> None:
    """Chunks, shared prefixes and preemptions: by NCCL around graphs, and through the host."""
    folder = make_checkpoint("llama", tmp_path, num_hidden_layers=2, tie_word_embeddings=True)
    expected = serve(*load_alone(folder), mode)
    with rank_0(device, AT_ONCE, division) as (_, divided):
        facts = divided.load(config_for(divided, folder, device))
        assert (facts.num_stages, facts.runs_ahead) == (2, True)
        assert serve(divided, facts, mode) == expected
        assert divided._worker is not None
        assert bool(whole.steps_of(divided._worker)._num_replayed) == (device == OWN)
