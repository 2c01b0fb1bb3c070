"""Swapping on the real CudaDevice, which does everything late: who is preempted draws what it draws alone."""

from functools import partial
from pathlib import Path

import pytest

import worker.devices.device
from scheduler.config import PreemptionMode, SchedulerConfig
from scheduler.counters import SchedulerStats
from scheduler.messages import FinishReason, SchedulerOutput, SequenceId
from scheduler.scheduler import Scheduler
from tests.checkpoints import make_checkpoint
from tests.worker.conftest import BLOCK_SIZE
from tests.worker.gpu.interpreted_gpu import HAS_GPU
from tests.worker.gpu.lazy_cuda import LazyCuda
from tests.worker.gpu.served import Served, serve
from tests.worker.transformers_generate import expected
from worker.devices.copy_streams import CopyStreams
from worker.devices.device import CudaDevice
from worker.worker import Worker
from worker.worker_config import ModelFacts, WorkerConfig

pytestmark = [pytest.mark.night, pytest.mark.skipif(HAS_GPU, reason="a device that stands for one is needed")]

NUM_TOKENS = 6
ORDERS = (None, 1)
"""Orders: as late as possible, and in one other."""
FAMILY = [(7 * index + 3) % 300 for index in range(17)]
PROMPTS = [
    FAMILY + [(5 * index + 1) % 300 for index in range(6)],
    [(13 * index + 2) % 300 for index in range(21)],
    FAMILY + [(11 * index + 4) % 300 for index in range(3)],
    FAMILY + [(5 * index + 1) % 300 for index in range(8)],
]
ABORTED = SequenceId(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("swapped"), num_hidden_layers=1)


def drive(worker: Worker, facts: ModelFacts, *, aborts: bool) -> Served:
    """All prompts, two plans in flight, in a pool for two of them."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=9,
            block_size=facts.block_size,
            max_num_seqs=4,
            max_num_batched_tokens=24,
            max_model_len=facts.max_model_len,
            watermark=0.0,
            num_host_blocks=facts.num_host_blocks,
            preemption_mode=PreemptionMode.SWAP,
            max_plans_in_flight=2,
        )
    )

    def abort_beside_a_swap() -> None:
        if aborts and scheduler.get_request_counts().swapped:
            scheduler.finish_requests([ABORTED], FinishReason.ABORTED)

    return serve(worker, scheduler, PROMPTS, NUM_TOKENS, abort_beside_a_swap)


def test_sequences_that_are_swapped_beside_steps_draw_what_they_draw_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.devices.device, "CopyStreams", partial(CopyStreams, piece_bytes=1))
    with LazyCuda() as cuda:
        gpu_worker = Worker(
            WorkerConfig(
                model_path=str(folder),
                device="cuda:1",
                dtype="float32",
                block_size=BLOCK_SIZE,
                num_blocks=12,
                max_num_seqs=4,
                max_num_batched_tokens=24,
                swap_space_bytes=1 << 18,
                enforce_eager=True,
            )
        )
        facts = gpu_worker.load(lambda _: None)
        for seed in ORDERS:
            cuda.start_order(seed)
            stats = check_tokens(folder, gpu_worker, facts, aborts=seed == 1)
            assert sum(num for (_, was_swapped), num in stats.num_preemptions.items() if was_swapped) > 0
            assert stats.num_kept_host_blocks > 0
            assert stats.num_prefix_host_hits > 0
        check_that_closing_waits(gpu_worker, monkeypatch)


def check_that_closing_waits(gpu_worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the host's pool goes with the worker, and copies may still be under way."""
    waits: list[CudaDevice] = []
    monkeypatch.setattr(CudaDevice, "wait", lambda device: waits.append(device))
    gpu_worker.close()
    assert waits


def check_tokens(folder: Path, gpu_worker: Worker, facts: ModelFacts, *, aborts: bool) -> SchedulerStats:
    served = drive(gpu_worker, facts, aborts=aborts)
    gpu_worker.launch(SchedulerOutput(0, tuple(served.tokens), (), {}, (), 0))
    for number, tokens in served.tokens.items():
        wanted = expected(folder, tuple(PROMPTS[number]))[:NUM_TOKENS]
        assert tokens == wanted[: len(tokens)]
        assert len(tokens) == NUM_TOKENS or (aborts and number == ABORTED)
    return served.stats
