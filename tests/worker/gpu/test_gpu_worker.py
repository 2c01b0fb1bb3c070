"""The whole GPU worker on an interpreted GPU: it draws the tokens that the CPU's worker draws."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton import TritonError

from scheduler.messages import (
    BlockCopy,
    BlockId,
    NewTable,
    PoolingParams,
    SamplingParams,
    ScheduledSequence,
    SequenceId,
)
from tests.checkpoints import make_checkpoint
from tests.pooling_checkpoints import make_embedder, write_pooling_files
from tests.tiers import by_day
from tests.worker.conftest import BLOCK_SIZE, load_worker
from tests.worker.gpu.ahead import AheadDriver
from tests.worker.gpu.interpreted_gpu import HAS_GPU, InterpretedGpu, open_gpu
from tests.worker.gpu.test_launch import new, plan
from tests.worker.plan_driver import PlanDriver
from worker.attention.interface import num_layers_begun
from worker.gpu import graphs, unfused
from worker.gpu import kernel_choice as opening
from worker.gpu.runner import GpuSteps
from worker.gpu.trials import launch_trial, skinny
from worker.gpu.triton_attention import TritonAttention
from worker.steps.generation_step import GenerationSteps
from worker.steps.model_runner import EagerSteps
from worker.worker import Worker
from worker.worker_config import ModelFacts, WorkerConfig
from worker.worker_errors import FamilyRefused, StartupError

LONG = [(7 * index + 3) % 300 for index in range(17)]
SHORT = [5, 9, 100, 7, 3]
SCORED = [77, 6]
SEEDED = SamplingParams(temperature=0.9, seed=7, top_p=0.9, num_logprobs=2)
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.4, num_prompt_logprobs=1)
NUM_LAYERS = {"llama": 1, "qwen3": 1, "gemma2": 3}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "block_size": BLOCK_SIZE,
    "max_num_seqs": 4,
    "num_blocks": 60,
    "max_num_batched_tokens": 32,
    "swap_space_bytes": 1 << 20,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("gpu")
    return {
        family: make_checkpoint(family, root / family, num_hidden_layers=num_layers)
        for family, num_layers in NUM_LAYERS.items()
    }


def load_gpu(folder: Path, **options: Any) -> tuple[Worker, ModelFacts]:
    worker = Worker(WorkerConfig(model_path=str(folder), **{**SETTINGS, **options}), open_gpu)
    return worker, worker.load(lambda progress: None)


def steps_of(worker: Worker) -> GpuSteps:
    assert isinstance(worker._steps, GenerationSteps)
    steps = worker._steps._steps
    assert isinstance(steps, GpuSteps)
    return steps


@pytest.fixture(scope="module")
def with_graphs(folders: dict[str, Path]) -> Worker:
    """Decodes of 1, 2 and 4, and one size for mixed steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_MIXED", (16,))
        return load_gpu(folders["llama"])[0]


@pytest.fixture
def captured(with_graphs: Worker) -> Iterator[Worker]:
    steps = steps_of(with_graphs)
    steps._num_replayed = steps._num_eager = steps._num_padding = 0
    yield with_graphs
    assert isinstance(with_graphs._steps, GenerationSteps)
    rows = with_graphs._steps.rows
    with_graphs.execute(plan(released=tuple(rows._row_of)))


@pytest.fixture(scope="module")
def on_cpu(folders: dict[str, Path]) -> Worker:
    return load_worker(folders["llama"], swap_space_bytes=1 << 20)[0]


def serve(driver: PlanDriver) -> dict[str, list[int]]:
    """In a batch, in chunks beside decodes, with a shared prefix, preempted and swapped."""
    long, short, scored = driver.add(LONG), driver.add(SHORT, SEEDED), driver.add(SCORED, PENALISED)
    driver.step({short: None})
    driver.step({short: None, long: 9})
    driver.step({short: None, scored: None, long: 5})
    driver.step({short: None, scored: None, long: None})
    driver.preempt(short)
    driver.step({scored: None, long: None})
    sharing = driver.add([*LONG[:12], 1, 2], shares_with=long)
    driver.swap_out(long)
    driver.step({scored: None, short: None})
    driver.step({scored: None, short: None, sharing: None, long: None})
    driver.step({scored: None, short: None, sharing: None, long: None})
    if isinstance(driver, AheadDriver):
        driver.collect_all()
    numbers = {"long": long, "short": short, "scored": scored, "sharing": sharing}
    return {name: driver.generated(number) for name, number in numbers.items()}


def expected_from(worker: Worker) -> dict[str, list[int]]:
    driver = PlanDriver(worker, BLOCK_SIZE)
    expected = serve(driver)
    driver.release_all()
    return expected


@pytest.mark.parametrize("family", by_day(["qwen3", "gemma2"], ["gemma2"]))
def test_a_family_launched_kernel_by_kernel_draws_the_cpus_tokens(
    folders: dict[str, Path], family: str
) -> None:
    expected = expected_from(load_worker(folders[family], swap_space_bytes=1 << 20)[0])
    worker, facts = load_gpu(folders[family], enforce_eager=True)
    assert facts.runs_ahead
    assert serve(AheadDriver(worker, BLOCK_SIZE, depth=2)) == expected
    assert steps_of(worker).describe().startswith("0 steps were replayed")


def test_graphs_with_steps_in_flight_draw_the_cpus_tokens(captured: Worker, on_cpu: Worker) -> None:
    assert serve(AheadDriver(captured, BLOCK_SIZE, depth=2)) == expected_from(on_cpu)
    steps = steps_of(captured)
    assert (steps._num_replayed, steps._num_eager) == (7, 1), (
        "one scores a prompt, and keeps what its body gave"
    )
    assert steps._num_padding > 20


@pytest.mark.night
@pytest.mark.skipif(HAS_GPU, reason="a tape tells what was recorded")
def test_decodes_of_kernels_that_are_launched_early_draw_the_cpus_tokens(
    folders: dict[str, Path], on_cpu: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(2.0**-turn for turn in range(20))  # each way is faster than the one before
    monkeypatch.setattr(InterpretedGpu, "seconds_of", lambda self, work: work() or next(seconds))
    monkeypatch.setattr(unfused, "choose_products", lambda products, device: None)
    monkeypatch.setattr(launch_trial, "_NUM_REPLAYS", 2)
    monkeypatch.setattr(graphs, "_MIXED", (16,))
    worker, _ = load_gpu(folders["llama"])
    captured = steps_of(worker)._graphs
    for kept, is_early in ((captured._decodes, True), (captured._mixed, False)):
        calls = [call for each in kept for call in each.graph._calls]  # type: ignore[attr-defined]
        assert {call[2]["WAITS"] for call in calls if "WAITS" in call[2]} == {is_early}
        warmed = [call[2]["warmed_ptr"] for call in calls if call[2].get("WARMERS")]
        # Of each layer the merged query, key and value, the attention's output, gates and ups.
        assert len({each.data_ptr() for each in warmed}) == (3 * NUM_LAYERS["llama"] if is_early else 0)
    assert serve(AheadDriver(worker, BLOCK_SIZE, depth=2)) == expected_from(on_cpu)


@pytest.mark.skipif(HAS_GPU, reason="a tape tells what was recorded")
def test_logits_of_a_graph_are_written_to_their_memory_by_the_product_itself(captured: Worker) -> None:
    steps = steps_of(captured)
    address = steps._logits_NV.data_ptr()
    tapes = captured._device.tapes  # type: ignore[union-attr]
    assert tapes
    for tape in tapes:
        into = [str(call[0]) for call in tape._calls if _writes_to(call, address)]
        assert into == ["aten.mm.out"]


def _writes_to(call: Any, address: int) -> bool:
    _, args, kwargs, _ = call
    targets = [kwargs.get("out"), *(args[:1] if str(call[0]).startswith("aten.copy_") else ())]
    return any(isinstance(each, torch.Tensor) and each.data_ptr() == address for each in targets)


def test_rows_that_are_edited_draw_beside_others_whom_their_graph_draws(
    captured: Worker, on_cpu: Worker
) -> None:
    """Steps in flight: the next step takes a token from the graph, or from what was drawn behind it."""
    each = (
        replace(SEEDED, num_logprobs=None),
        SamplingParams(seed=3, frequency_penalty=2.0, presence_penalty=1.0),
        SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=tuple(range(200))),
        SamplingParams(seed=4, bad_words=((8,), (7, 9)), logit_bias=((8, 50.0), (9, 49.0))),
    )
    found = []
    for driver in (PlanDriver(on_cpu, BLOCK_SIZE), AheadDriver(captured, BLOCK_SIZE, depth=2)):
        numbers = [driver.add([7, number, 5], params) for number, params in enumerate(each)]
        for several in (numbers[:3], numbers, numbers, numbers[1:], numbers, numbers):
            driver.step(dict.fromkeys(several))
        if isinstance(driver, AheadDriver):
            driver.collect_all()
        found.append([driver.generated(number) for number in numbers])
        driver.release_all()
    assert found[0] == found[1]
    assert steps_of(captured)._num_eager == 0


def test_a_graph_draws_the_same_for_whoever_stands_in_its_padding(captured: Worker, on_cpu: Worker) -> None:
    """Three sequences in a graph for four, whose last place others have had before."""
    found = []
    for worker in (on_cpu, captured):
        driver = PlanDriver(worker, BLOCK_SIZE)
        numbers = [driver.add([number, 8, 9]) for number in range(4)]
        begun_before = num_layers_begun()
        driver.generate(numbers, 2)
        assert num_layers_begun() == begun_before + 2 * NUM_LAYERS["llama"], "the pulse of a replay"
        driver.generate(numbers[:3], 4)
        found.append([driver.generated(number) for number in numbers])
        if worker is on_cpu:
            driver.release_all()
    assert found[0] == found[1]
    assert steps_of(captured)._num_padding == 4 + 2


def test_a_sibling_gets_a_copy_of_the_tail(captured: Worker, on_cpu: Worker) -> None:
    """Two of the three tokens in the second block: the last one is computed, for its logits."""
    prompt = [*SHORT, 8, 2]
    first, second = new(1, prompt, 1), new(2, prompt, 1)
    second = second._replace(tables=(NewTable((BlockId(1), BlockId(30))),))
    share = ScheduledSequence(SequenceId(2), 6, 1, samples=True)
    copying = plan(second, copies=(BlockCopy(BlockId(2), BlockId(30)),))._replace(scheduled=(share,))
    for worker in (on_cpu, captured):
        drawn = worker.execute(plan(first)).token_ids[SequenceId(1)]
        assert worker.execute(copying).token_ids == {SequenceId(2): drawn}
        worker.execute(plan(released=(SequenceId(1), SequenceId(2))))


def test_without_kernels_of_our_own_torch_computes_one_step_at_a_time(
    folders: dict[str, Path], on_cpu: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker, facts = load_gpu(folders["llama"], gpu_kernels="off")
    assert not facts.runs_ahead
    assert isinstance(worker._steps, GenerationSteps)
    assert isinstance(worker._steps._steps, EagerSteps)
    assert "--gpu-kernels is off" in caplog.text
    assert serve(PlanDriver(worker, BLOCK_SIZE)) == expected_from(on_cpu)


def test_kernels_that_compute_something_else_are_found_out_at_start(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = TritonAttention.attend_written
    monkeypatch.setattr(
        TritonAttention, "attend_written", lambda self, *args: attend(self, *args) * 1.01 if self else None
    )
    with pytest.raises(StartupError, match="start with --gpu-kernels off"):
        load_gpu(folders["llama"], enforce_eager=True)


@pytest.mark.parametrize(
    "error", [TritonError("out of resource: shared memory"), RuntimeError("out of resource: shared memory")]
)
def test_kernels_that_cannot_be_launched_are_refused_with_the_way_out(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """And the model is not taken for one that only transformers can compute."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(TritonAttention, "attend_written", fail)
    with pytest.raises(StartupError, match=r"out of resource.*start with --gpu-kernels off") as refused:
        load_gpu(folders["llama"], enforce_eager=True)
    assert not isinstance(refused.value, FamilyRefused)


@pytest.mark.parametrize(
    ("options", "there", "verdict", "what"),
    [
        ({}, {"triton", "clang", "headers"}, "ok", "compiled by Triton"),
        ({}, {"gcc"}, "warning", "triton is not installed"),
        ({}, {"triton"}, "warning", "no C compiler"),
        ({}, {"triton", "gcc"}, "warning", "headers of Python"),
        ({"gpu_kernels": "off"}, {"triton", "gcc"}, "ok", "as asked for"),
    ],
)
def test_doctor_tells_what_will_compute(
    options: dict[str, str], there: set[str], verdict: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(opening.importlib.util, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr(opening.shutil, "which", lambda name: name if name in there else None)
    if "headers" not in there:
        monkeypatch.setattr(opening.sysconfig, "get_config_var", lambda _: "/nowhere")
    config = WorkerConfig(model_path="", **options)
    finding = opening.foresee_kernels(config, open_gpu(config), torch.bfloat16)
    assert (finding.topic, finding.verdict) == ("GPU kernels", verdict)
    assert what in finding.what


def test_a_model_that_pools_gives_the_cpus_vector(tmp_path: Path) -> None:
    folder = make_embedder("llama", tmp_path / "llama", num_hidden_layers=1)
    write_pooling_files(folder, "lasttoken")
    vectors = []
    for worker, facts in (load_worker(folder, **SETTINGS), load_gpu(folder)):
        assert facts.pooling is not None
        assert not facts.runs_ahead
        pooling = PoolingParams(task=facts.pooling.task, prompt=facts.pooling.prompt)
        prompt = new(1, LONG[:11], 1)._replace(pooling=pooling)
        pooled = worker.launch(plan(prompt)).result().pooled[SequenceId(1)]
        vectors.append(np.frombuffer(pooled, dtype="<f4"))
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)


def test_a_family_without_a_paged_cache_is_computed_one_step_at_a_time(tmp_path: Path) -> None:
    folder = make_checkpoint("bloom", tmp_path / "bloom")
    settings = {"swap_space_bytes": 0}
    drawn = []
    for worker, facts in (load_worker(folder, **{**SETTINGS, **settings}), load_gpu(folder, **settings)):
        assert not facts.runs_ahead
        driver = PlanDriver(worker, BLOCK_SIZE)
        number = driver.add(SHORT)
        driver.generate([number], 3)
        drawn.append(driver.generated(number))
    assert drawn[0] == drawn[1]


class SkinnyGpu(InterpretedGpu):
    """An interpreted GPU on which whatever is timed later is faster."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._seconds = 1000.0

    def seconds_of(self, work: Callable[[], None]) -> float | None:
        self._seconds /= 2
        return self._seconds


@pytest.mark.skipif(HAS_GPU, reason="on a GPU time decides")
def test_products_of_few_rows_draw_the_cpus_tokens(
    folders: dict[str, Path], on_cpu: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []
    multiply = skinny.multiply_skinny
    monkeypatch.setattr(
        skinny,
        "multiply_skinny",
        lambda x_TK, *given, **named: launched.append(len(x_TK)) or multiply(x_TK, *given, **named),
    )
    worker = Worker(WorkerConfig(model_path=str(folders["llama"]), **SETTINGS, enforce_eager=True), SkinnyGpu)
    worker.load(lambda progress: None)
    launched.clear()
    assert serve(AheadDriver(worker, BLOCK_SIZE, depth=2)) == expected_from(on_cpu)
    assert set(launched) >= {2, 10}, "steps of few tokens, with prompts among them"
