"""Which steps are replayed from graphs, what a graph knows, and what is done where none can be had."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.worker.gpu.interpreted_gpu import HAS_GPU, InterpretedGpu, WaitsForDevice
from worker.attention.interface import note_layers_begun, num_layers_begun
from worker.config import WorkerConfig
from worker.device import CudaDevice, Graph
from worker.gpu.graphs import CapturedStep, GraphSizes, StepGraphs, capture_all
from worker.gpu.kernels.inputs import fill_unknown_tokens
from worker.gpu.step_buffers import BatchSizes, Limits
from worker.memory import cuda_budget_bytes, graph_bytes

LIMITS = Limits(num_tokens=2048, num_sequences=40, num_blocks=9, block_size=4)


@pytest.fixture
def device() -> InterpretedGpu:
    return InterpretedGpu(WorkerConfig(model_path=""))


class _Nothing:
    def replay(self) -> None: ...


def graphs_of(sizes: GraphSizes) -> StepGraphs:
    graphs = StepGraphs()
    for each in sizes.largest_first():
        graphs.add(CapturedStep(each, _Nothing(), num_layers=3))
    return graphs


def step_of(query_lens: list[int], num_logits: int = 1) -> Any:
    return SimpleNamespace(
        input_ids_T=[0] * sum(query_lens),
        metadata=SimpleNamespace(num_decodes=query_lens.count(1), seq_lens=query_lens),
        rows=[0] * num_logits,
    )


def size_for(graphs: StepGraphs, step: Any) -> int | None:
    found = graphs.find(step)
    return None if found is None else found.sizes.num_tokens


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (40, [1, 2, 4, 8, 16, 24, 32, 40])],
)
def test_decodes_are_captured_up_to_the_most_that_run(max_num_seqs: int, expected: list[int]) -> None:
    sizes = GraphSizes(LIMITS._replace(num_sequences=max_num_seqs), max_model_len=36)
    assert [each.num_tokens for each in sizes.decodes] == expected
    assert all(each.num_decodes == each.num_sequences == each.num_tokens for each in sizes.decodes)
    assert [each.num_tokens for each in sizes.mixed] == [256, 512, 1024, 2048]
    everything = [each.num_tokens for each in sizes.largest_first()]
    assert everything == [2048, 1024, 512, 256, *reversed(expected)], "so that the later find room"


def test_no_graph_is_larger_than_a_step_may_be() -> None:
    sizes = GraphSizes(Limits(600, 600, 9, 4), max_model_len=36)
    assert max(each.num_tokens for each in sizes.decodes) == 512
    assert [each.num_tokens for each in sizes.mixed] == [512]
    assert not GraphSizes(Limits(64, 8, 9, 4), max_model_len=36).mixed


@pytest.mark.parametrize(
    ("query_lens", "size"),
    [([1], 1), ([1] * 3, 4), ([1] * 5, 8), ([1] * 40, 40), ([2], 256), ([1, 7], 256), ([200, 90], 512)],
)
def test_a_step_is_padded_to_the_next_size(query_lens: list[int], size: int) -> None:
    assert size_for(graphs_of(GraphSizes(LIMITS, max_model_len=36)), step_of(query_lens)) == size


def test_a_step_that_fits_no_graph_has_none() -> None:
    graphs = graphs_of(GraphSizes(LIMITS, max_model_len=36))
    assert size_for(graphs, step_of([2000, 49])) is None
    assert size_for(graphs, step_of([2] * 41)) is None
    assert size_for(graphs, step_of([2] * 40, num_logits=40)) == 256
    assert size_for(graphs_of(GraphSizes(LIMITS._replace(num_tokens=64), 36)), step_of([3])) is None
    assert size_for(StepGraphs(), step_of([1])) is None


def doubling(numbers: torch.Tensor, results: torch.Tensor) -> Callable[[BatchSizes], Callable[[], None]]:
    """A step that gives back twice its numbers; its three layers begin."""

    def work_on(sizes: BatchSizes) -> Callable[[], None]:
        def work() -> None:
            note_layers_begun(3)
            results[: sizes.num_tokens].copy_(numbers[: sizes.num_tokens] * 2)

        return work

    return work_on


def test_a_graph_computes_on_what_stands_in_memory_by_then(device: InterpretedGpu) -> None:
    numbers, results = torch.zeros(4), torch.zeros(4)
    sizes = GraphSizes(Limits(8, 4, 9, 4), max_model_len=36)
    graphs = capture_all(sizes, doubling(numbers, results), device)
    assert len(graphs) == len(sizes) == 3
    numbers.copy_(torch.arange(4.0))
    found = graphs.find(step_of([1, 1]))
    assert found is not None
    assert found.num_layers == 3
    results.zero_()
    found.graph.replay()
    assert results.tolist() == [0.0, 2.0, 0.0, 0.0]


@pytest.mark.skipif(HAS_GPU, reason="a tape holds kernels that are interpreted")
def test_a_kernel_in_a_graph_is_launched_again_with_the_numbers_of_the_capture(
    device: InterpretedGpu,
) -> None:
    ids, rows, last = (
        torch.tensor([[-1, 7, -1]]),
        torch.tensor([2, 0, 1], dtype=torch.int32),
        torch.zeros(4).long(),
    )
    host = {"ids": ids}
    graph = device.capture(lambda: fill_unknown_tokens(host["ids"], rows, last))
    ids.copy_(torch.tensor([[-1, 5, -1]]))
    last.copy_(torch.tensor([10, 11, 12, 13]))
    host.clear()
    graph.replay()
    assert ids.tolist() == [[12, 5, 11]]


@pytest.mark.parametrize(
    "wait",
    [
        lambda numbers: float(numbers.sum()),
        lambda numbers: numbers[numbers > 0],
        lambda numbers: numbers.nonzero(),
    ],
)
def test_a_step_that_waits_for_the_device_is_not_captured_and_the_log_says_so(
    device: InterpretedGpu, wait: Callable[[torch.Tensor], object], caplog: pytest.LogCaptureFixture
) -> None:
    numbers = torch.arange(4.0)
    sizes = GraphSizes(Limits(8, 4, 9, 4), max_model_len=36)
    with pytest.raises(WaitsForDevice):
        device.capture(lambda: wait(numbers))
    with caplog.at_level(logging.WARNING):
        graphs = capture_all(sizes, lambda _: lambda: wait(numbers), device)
    assert len(graphs) == 0
    assert "cannot be captured" in caplog.text
    assert size_for(graphs, step_of([1])) is None


def test_where_memory_runs_out_smaller_steps_take_a_larger_ones_graph(
    device: InterpretedGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    capture, released = device.capture, []

    def twice(work: Callable[[], None]) -> Graph:
        if len(device.tapes) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return capture(work)

    monkeypatch.setattr(device, "capture", twice)
    monkeypatch.setattr(device, "release_cached_memory", lambda: released.append(True))
    sizes = GraphSizes(Limits(8, 8, 9, 4), max_model_len=36)
    graphs = capture_all(sizes, doubling(torch.zeros(8), torch.zeros(8)), device)
    assert [size_for(graphs, step_of([1] * count)) for count in (1, 4, 5, 8)] == [4, 4, 8, 8]
    assert released
    assert "memory ran out" in caplog.text


def test_the_pulse_grows_by_the_layers_of_each_replay() -> None:
    before = num_layers_begun()
    note_layers_begun(28)
    assert num_layers_begun() == before + 28


def test_graphs_are_reserved_for_before_the_cache_is_sized() -> None:
    assert graph_bytes(0, activation_bytes=5 << 30) == 0
    assert graph_bytes(39, activation_bytes=1 << 30) == (1 << 30) + 39 * (16 << 20)
    common = {
        "total_bytes": 80 << 30,
        "free_bytes": 60 << 30,
        "activation_bytes": 1 << 30,
        "utilization": 0.9,
    }
    without = cuda_budget_bytes(**common)
    assert cuda_budget_bytes(**common, reserved_bytes=2 << 30) == without - (2 << 30)


def test_a_gpu_captures_after_a_first_round_and_shares_memory_among_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a GPU: the order of what is asked of torch."""
    log: list[str] = []

    class FakeCapture:
        def __init__(self, graph: object, *, pool: str, capture_error_mode: str) -> None:
            log.append(f"capture in {pool}, {capture_error_mode}")

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            log.append("captured")

    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: object())
    monkeypatch.setattr(torch.cuda, "graph", FakeCapture)
    gpu = CudaDevice(WorkerConfig(model_path=""), torch.device("cuda:0"))
    for _ in range(2):
        gpu.capture(lambda: log.append("work"))
    assert log == ["work", "wait", "capture in pool, thread_local", "work", "captured"] * 2
