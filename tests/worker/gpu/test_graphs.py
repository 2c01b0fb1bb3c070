"""Steps that are replayed from graphs, what a graph knows, and what is done where none can be had."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker.gpu.interpreted_gpu import HAS_GPU, InterpretedGpu, WaitsForDevice
from worker.attention.interface import note_layers_begun, num_layers_begun
from worker.devices.device import CudaDevice, Graph, open_device
from worker.gpu.graphs import CapturedStep, GraphSizes, StepGraphs, capture_all
from worker.gpu.kernels.input_fill import fill_unknown_tokens
from worker.gpu.runner import sizes_of
from worker.gpu.step_buffers import BatchSizes, Limits
from worker.memory_sizes import cuda_budget_bytes, graph_bytes
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

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
        metadata=SimpleNamespace(num_decodes=query_lens.count(1), seq_lens=query_lens, cut_states=None),
        logits_indices_N=[0] * num_logits,
        has_drafts=False,
    )


def drafted_step_of(query_lens: list[int]) -> Any:
    """With logits for each token."""
    step = step_of(query_lens, num_logits=sum(query_lens))
    step.has_drafts, step.metadata.query_starts = True, np.cumsum([0, *query_lens])
    return step


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
    mixed = [each.num_tokens for each in sizes.mixed]
    assert mixed == [256, 384, 512, 768, 1024, 1536, 2048]
    everything = [each.num_tokens for each in sizes.largest_first()]
    assert everything == [*reversed(mixed), *reversed(expected)], "so that the later find room"


def test_no_graph_is_larger_than_a_step_may_be() -> None:
    sizes = GraphSizes(Limits(2000, 1500, 9, 4), max_model_len=36)
    assert max(each.num_tokens for each in sizes.decodes) == 1024
    assert [each.num_tokens for each in sizes.mixed] == [256, 384, 512, 768, 1024, 1536]


def test_a_mixed_graph_of_fewer_tokens_than_sequences_that_may_run_has_room_for_as_many_as_it_can() -> None:
    sizes = GraphSizes(LIMITS._replace(num_sequences=600), max_model_len=36)
    assert [each.num_sequences for each in sizes.mixed] == [256, 384, 512, *[600] * 4]
    assert all(each.num_logits == each.num_sequences for each in sizes.mixed)
    assert size_for(graphs_of(sizes), step_of([1] * 300 + [9])) == 384


def test_nothing_is_captured_for_more_tokens_than_a_step_has() -> None:
    assert not GraphSizes(Limits(64, 8, 9, 4), max_model_len=36).mixed


@pytest.mark.parametrize(
    ("query_lens", "size"),
    [([1], 1), ([1] * 3, 4), ([1] * 5, 8), ([1] * 40, 40), ([2], 256), ([1, 7], 256), ([200, 90], 384)],
)
def test_a_step_is_padded_to_the_next_size(query_lens: list[int], size: int) -> None:
    assert size_for(graphs_of(GraphSizes(LIMITS, max_model_len=36)), step_of(query_lens)) == size


@pytest.mark.parametrize(
    ("query_lens", "size"),
    [
        ([5], 8),
        ([2, 1], 4),
        ([1, 1, 1, 5], 8),
        ([5] * 20, 128),
        ([5] * 40, None),
        ([6], None),
        ([9, 1], None),
    ],
)
def test_a_step_with_drafts_has_a_graph_of_all_logits(query_lens: list[int], size: int | None) -> None:
    sizes = GraphSizes(LIMITS._replace(max_drafts=4), max_model_len=36)
    assert [each.num_tokens for each in sizes.drafted] == [4, 8, 16, 32, 64, 128]
    found = graphs_of(sizes).find(drafted_step_of(query_lens))
    assert (None if found is None else found.sizes.num_tokens) == size
    assert sizes.most_logits == 128
    assert all(each.has_drafts for each in sizes.drafted)
    assert not any(each.has_drafts for each in (*sizes.decodes, *sizes.mixed))


def test_a_step_that_fits_no_graph_has_none() -> None:
    graphs = graphs_of(GraphSizes(LIMITS, max_model_len=36))
    assert size_for(graphs, step_of([2000, 49])) is None
    assert size_for(graphs, step_of([2] * 41)) is None
    assert size_for(graphs, step_of([2] * 40, num_logits=40)) == 256
    assert size_for(graphs_of(GraphSizes(LIMITS._replace(num_tokens=64), 36)), step_of([3])) is None
    assert size_for(StepGraphs(), step_of([1])) is None


@pytest.mark.parametrize(("query_lens", "num_decodes"), [([1, 1], 2), ([1, 1, 7], 0), ([5, 7], 0)])
def test_a_step_without_a_graph_is_described_as_graphs_are(query_lens: list[int], num_decodes: int) -> None:
    """Kernels that no graph has would be compiled in the middle of service."""
    step = step_of(query_lens, num_logits=len(query_lens))
    step.metadata.query_starts, step.metadata.seq_lens = np.cumsum([0, *query_lens]), np.array(query_lens)
    num_tokens, num_sequences = sum(query_lens), len(query_lens)
    longest = max(query_lens)
    assert sizes_of(step) == (num_tokens, num_sequences, num_sequences, num_decodes, longest, longest)


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
    graphs = capture_all(sizes, doubling(numbers, results), device, must_have_all=False)
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
        graphs = capture_all(sizes, lambda _: lambda: wait(numbers), device, must_have_all=False)
    assert len(graphs) == 0
    assert "cannot be captured" in caplog.text
    assert size_for(graphs, step_of([1])) is None
    with pytest.raises(StartupError, match="3 CUDA graphs are missing that all ranks need"):
        capture_all(sizes, lambda _: lambda: wait(numbers), device, must_have_all=True)


def test_an_error_without_text_is_named_by_its_type(device: InterpretedGpu) -> None:
    def fail() -> None:
        raise RuntimeError

    sizes = GraphSizes(Limits(8, 4, 9, 4), max_model_len=36)
    with pytest.raises(StartupError, match="all ranks need: RuntimeError"):
        capture_all(sizes, lambda _: fail, device, must_have_all=True)


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
    graphs = capture_all(sizes, doubling(torch.zeros(8), torch.zeros(8)), device, must_have_all=False)
    assert [size_for(graphs, step_of([1] * count)) for count in (1, 4, 5, 8)] == [4, 4, 8, 8]
    assert released
    assert "memory ran out" in caplog.text
    with pytest.raises(StartupError, match="CUDA graphs are missing that all ranks need: memory ran out"):
        capture_all(sizes, doubling(torch.zeros(8), torch.zeros(8)), device, must_have_all=True)


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


class FakeCuda:
    """Notes what is asked of torch, and in what mode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.mode = "default"
        log = self.log

        class Capture:
            def __init__(self, _graph: object, *, pool: str, capture_error_mode: str) -> None:
                log.append(f"capture in {pool}, {capture_error_mode}")

            def __enter__(self) -> None: ...

            def __exit__(self, *_: object) -> None:
                log.append("captured")

        fakes: dict[str, Any] = {
            "set_device": lambda _: None,
            "Stream": lambda _: None,
            "current_stream": lambda _: "compute",
            "stream": self._stream,
            "synchronize": lambda _: log.append("wait"),
            "set_sync_debug_mode": self._set_mode,
            "CUDAGraph": lambda: SimpleNamespace(replay=self.replay, pool=lambda: "pool"),
            "graph": Capture,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(CudaDevice, "zeros", lambda *_: torch.zeros(1))
        self.gpu = CudaDevice(WorkerConfig(model_path=""), torch.device("cuda:0"))
        self.gpu.capture(lambda: None)  # the first time, the pool is opened too
        log.clear()

    @contextmanager
    def _stream(self, stream: str) -> Iterator[None]:
        self.log.append(f"on {stream}")
        try:
            yield
        finally:
            self.log.append(f"back on {stream}")

    def _set_mode(self, mode: str) -> None:
        self.mode = mode

    def work(self) -> None:
        self.log.append(f"work, {self.mode}")

    def replay(self) -> None:
        self.log.append("replay")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Without a GPU: the order of what is asked of torch."""
    return FakeCuda(monkeypatch)


def test_a_gpu_captures_after_a_first_round_and_shares_memory_among_graphs(cuda: FakeCuda) -> None:
    for _ in range(2):
        cuda.gpu.capture(cuda.work)
    round_of_one = [
        *("work, error", "wait", "on compute", "capture in pool, thread_local", "work, default"),
        *("captured", "back on compute", "replay", "wait"),
    ]
    assert cuda.log == round_of_one * 2


def test_a_gpu_begins_no_capture_of_what_would_wait_for_it(cuda: FakeCuda) -> None:
    def work() -> None:
        cuda.work()
        if cuda.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        cuda.gpu.capture(work)
    assert cuda.log == ["work, error"]
    assert cuda.mode == "default"


def test_a_driver_without_memory_for_a_graph_is_out_of_memory(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs that were captured before are kept."""

    def replay() -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(cuda, "replay", replay)
    with pytest.raises(torch.OutOfMemoryError):
        cuda.gpu.capture(cuda.work)


@pytest.mark.parametrize(("name", "index"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_is_opened_by_its_number(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, name: str, index: int
) -> None:
    """torch makes a device without a number nobody's current one: it raises."""
    made_current: list[int | None] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made_current.append(device.index))
    assert open_device(WorkerConfig(model_path="", device=name)).torch_device == torch.device("cuda", index)
    assert made_current == [index]
