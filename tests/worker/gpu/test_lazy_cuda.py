"""The whole GPU worker on the real CudaDevice, over a device that does everything late or out of order."""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scheduler.messages import (
    Grammar,
    GrammarKind,
    ModelRunnerOutput,
    NewTable,
    PoolingParams,
    SamplingParams,
    SchedulerOutput,
    SequenceId,
)
from tests.checkpoints import make_checkpoint
from tests.pooling_checkpoints import make_embedder, write_pooling_files
from tests.tiers import by_day
from tests.worker.conftest import BLOCK_SIZE, load_worker
from tests.worker.gpu import test_gpu_worker as whole
from tests.worker.gpu import test_launch as launching
from tests.worker.gpu.ahead import AheadDriver
from tests.worker.gpu.interpreted_gpu import HAS_GPU
from tests.worker.gpu.lazy_cuda import LazyCuda
from tests.worker.gpu.test_launch import new, plan
from tests.worker.gpu.test_launch_scheduled import expected_tokens, serve_with_scheduler
from tests.worker.plan_driver import PlanDriver
from worker.devices.device import CudaDevice, open_device
from worker.gpu import graphs
from worker.steps.generation_step import GenerationSteps
from worker.steps.protocol import LaunchedStep
from worker.worker import Worker
from worker.worker_config import ModelFacts, WorkerConfig
from worker.worker_errors import StepOutOfMemory

pytestmark = pytest.mark.skipif(HAS_GPU, reason="it stands for one")
NUM_LAYERS = {"llama": 1, "qwen3": 1}
LATEST = None
NUM_BLOCKS = 80
PREFERENCES = (
    SamplingParams(temperature=0.8, seed=3, min_p=0.02, top_k=40, num_logprobs=3),
    SamplingParams(
        temperature=0.0,
        grammar=Grammar(kind=GrammarKind.REGEX, text="[a-m]{20}"),
        stop_token_ids=(334,),
        num_logprobs=1,
    ),
    SamplingParams(
        seed=5, repetition_penalty=1.3, logit_bias=((7, 4.0),), allowed_token_ids=tuple(range(90))
    ),
    SamplingParams(temperature=0.0, frequency_penalty=0.4, min_tokens=9, stop_token_ids=(5, 6)),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("lazy")
    return {
        family: make_checkpoint(family, root / family, num_hidden_layers=num_layers)
        for family, num_layers in NUM_LAYERS.items()
    }


@pytest.fixture(scope="module")
def on_cpu(folders: dict[str, Path]) -> Worker:
    return load_worker(folders["llama"], swap_space_bytes=1 << 20)[0]


def load_lazy(folder: Path, **options: Any) -> tuple[Worker, ModelFacts]:
    settings = {**whole.SETTINGS, "device": "cuda:1", "num_blocks": NUM_BLOCKS, **options}
    worker = Worker(WorkerConfig(model_path=str(folder), **settings))
    return worker, worker.load(lambda progress: None)


@pytest.fixture(scope="module")
def device_of_all() -> Iterator[LazyCuda]:
    with LazyCuda() as cuda:
        yield cuda


@pytest.fixture
def cuda(device_of_all: LazyCuda) -> Iterator[LazyCuda]:
    yield device_of_all
    device_of_all.start_order(LATEST)


@pytest.fixture(scope="module")
def with_graphs(device_of_all: LazyCuda, folders: dict[str, Path]) -> Worker:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_MIXED", (16,))
        worker, facts = load_lazy(folders["llama"])
    assert (facts.device, facts.runs_ahead) == ("lazy CUDA", True)
    assert isinstance(worker._device, CudaDevice)
    return worker


@pytest.fixture
def lazy(with_graphs: Worker) -> Iterator[Worker]:
    yield with_graphs
    assert isinstance(with_graphs._steps, GenerationSteps)
    with_graphs.execute(plan(released=tuple(with_graphs._steps.rows._row_of)))


def expected_from(worker: Worker, scenario: Callable[[PlanDriver], Any]) -> Any:
    driver = PlanDriver(worker, BLOCK_SIZE)
    expected = scenario(driver)
    driver.release_all()
    return expected


@pytest.mark.parametrize("seed", by_day([LATEST, 1], [1]))
def test_graphs_draw_the_cpus_tokens_in_whatever_order_streams_are_done(
    cuda: LazyCuda, lazy: Worker, on_cpu: Worker, seed: int | None
) -> None:
    """In a batch, in chunks, with a shared prefix, preempted and swapped, two steps in flight."""
    cuda.start_order(seed)
    found = whole.serve(AheadDriver(lazy, BLOCK_SIZE, depth=2))
    assert found == expected_from(on_cpu, whole.serve)


@pytest.fixture
def launching_may_not_wait(lazy: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for events."""
    launch = lazy.launch

    def launch_without_waiting(asked: SchedulerOutput) -> LaunchedStep:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(asked)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(lazy, "launch", launch_without_waiting)


@pytest.mark.usefixtures("launching_may_not_wait")
@pytest.mark.parametrize("seed", by_day([LATEST, 2], [2]))
def test_what_depends_on_earlier_tokens_is_drawn_as_on_the_cpu_and_launched_without_waiting(
    cuda: LazyCuda, lazy: Worker, on_cpu: Worker, seed: int | None
) -> None:
    """Penalties, bad words and seeds, preempted and swapped, three steps in flight."""
    cuda.start_order(seed)
    found = launching.generate(AheadDriver(lazy, BLOCK_SIZE, depth=3))
    assert found == expected_from(on_cpu, launching.generate)


@pytest.mark.night
def test_a_family_launched_kernel_by_kernel_draws_the_cpus_tokens(
    cuda: LazyCuda, folders: dict[str, Path]
) -> None:
    expected = expected_from(load_worker(folders["qwen3"], swap_space_bytes=1 << 20)[0], whole.serve)
    worker, _ = load_lazy(folders["qwen3"], enforce_eager=True)
    assert whole.serve(AheadDriver(worker, BLOCK_SIZE, depth=2)) == expected


def outputs_of(worker: Worker, depth: int) -> list[ModelRunnerOutput]:
    """Tokens of one sequence for each of PREFERENCES; some join late, with `depth` steps in flight."""
    starts = [new(n, [40 + n, 9, 5], 1 + 3 * n, params) for n, params in enumerate(PREFERENCES)]
    plans = [plan(*starts[:2]), plan(*starts[2:], decodes=((0, 3), (1, 3)))]
    plans += [plan(decodes=((0, at), (1, at), (2, at - 1), (3, at - 1))) for at in range(4, 10)]
    in_flight: deque[LaunchedStep] = deque()
    outputs = []
    for each in plans:
        in_flight.append(worker.launch(each))
        if len(in_flight) == depth:
            outputs.append(in_flight.popleft().result())
    outputs += [launched.result() for launched in in_flight]
    worker.execute(plan(released=tuple(SequenceId(n) for n in range(len(PREFERENCES)))))
    return outputs


def test_grammars_bias_and_reports_are_those_of_the_cpu(cuda: LazyCuda, lazy: Worker, on_cpu: Worker) -> None:
    for found, expected in zip(outputs_of(lazy, depth=2), outputs_of(on_cpu, depth=1), strict=True):
        assert found.token_ids == expected.token_ids
        assert not found.failures
        assert found.logprobs.keys() == expected.logprobs.keys() == {0, 1}
        for number, [report] in found.logprobs.items():
            [same] = expected.logprobs[number]
            assert [token for token, _ in report.top] == [token for token, _ in same.top]
            assert report.logprob == pytest.approx(same.logprob, abs=1e-4)


def test_a_step_without_memory_leaves_those_before_it_and_those_behind_it_alone(
    cuda: LazyCuda, lazy: Worker, on_cpu: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = cuda.driver.memory
    steps = [plan(new(1, [5, 6, 7], 1), new(2, [9, 8], 4)), plan(decodes=((1, 3), (2, 2)))]
    # It scores a prompt, for which there is no graph, nor memory.
    scored = plan(new(3, [4] * 17, 7, SamplingParams(temperature=0.0, num_prompt_logprobs=1)))
    scored = scored._replace(new_sequences=tuple(_longer(each) for each in scored.new_sequences))
    expected = [on_cpu.execute(each).token_ids for each in steps]
    on_cpu.execute(plan(released=(SequenceId(1), SequenceId(2))))
    first, second = (lazy.launch(each) for each in steps)
    memory.release([0])  # what the stream of steps keeps for later
    with monkeypatch.context() as patch:
        patch.setattr(memory, "limit_bytes", 0)
        with pytest.raises(StepOutOfMemory, match="CUDA out of memory"):
            lazy.launch(scored)
    assert [first.result().token_ids, second.result().token_ids] == expected


def test_a_capture_that_fails_leaves_the_stream_and_the_graphs_before_it(
    cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = open_device(WorkerConfig(model_path="", device="cuda:1"))
    number, doubled = (device.zeros(1, torch.float32) for _ in range(2))
    graph = device.capture(lambda: doubled.copy_(number * 2))
    rounds: list[int] = []

    def run_out() -> None:
        rounds.append(1)
        if len(rounds) == 2:
            monkeypatch.setattr(cuda.driver.memory, "limit_bytes", 0)
        torch.zeros(1 << 20, device=device.torch_device)

    with pytest.raises(torch.OutOfMemoryError):
        device.capture(run_out)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="previous error during capture"):
        device.capture(device.wait)  # torch tells of no wait like this one
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    number.fill_(3.0)
    graph.replay()
    assert doubled.tolist() == [6.0]


def _longer(sequence: Any) -> Any:
    return sequence._replace(tables=(NewTable((*sequence.tables[0].block_ids, *range(20, 25))),))


@pytest.mark.night
def test_the_scheduler_preempts_and_swaps_with_tokens_in_flight(
    cuda: LazyCuda, folders: dict[str, Path]
) -> None:
    worker, facts = load_lazy(folders["llama"], max_num_seqs=8, enforce_eager=True)
    served = serve_with_scheduler(worker, facts)
    assert served.tokens == expected_tokens(folders["llama"])
    assert served.num_preemptions > 0


@pytest.mark.night
def test_torchs_own_operations_draw_the_cpus_tokens(
    cuda: LazyCuda, folders: dict[str, Path], on_cpu: Worker
) -> None:
    cuda.start_order(6)
    worker, _ = load_lazy(folders["llama"], gpu_kernels="off")
    assert whole.serve(PlanDriver(worker, BLOCK_SIZE)) == expected_from(on_cpu, whole.serve)


@pytest.mark.night
def test_a_model_that_pools_gives_the_cpus_vector(cuda: LazyCuda, tmp_path: Path) -> None:
    folder = make_embedder("llama", tmp_path / "llama", num_hidden_layers=1)
    write_pooling_files(folder, "lasttoken")
    vectors = []
    for worker, facts in (load_worker(folder, **whole.SETTINGS), load_lazy(folder)):
        assert facts.pooling is not None
        pooling = PoolingParams(task=facts.pooling.task, prompt=facts.pooling.prompt)
        prompt = new(1, whole.LONG[:11], 1)._replace(pooling=pooling)
        pooled = worker.launch(plan(prompt)).result().pooled[SequenceId(1)]
        vectors.append(np.frombuffer(pooled, dtype="<f4"))
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)
