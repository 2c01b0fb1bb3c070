"""Faults that the lazy device shows: each way to use torch.cuda wrongly, and beside it the right one."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.worker.gpu.interpreted_gpu import HAS_GPU
from tests.worker.gpu.lazy_cuda import DEVICE, LazyCuda
from worker.devices.device import Device, open_device
from worker.gpu.kernels.input_fill import fill_unknown_tokens
from worker.worker_config import WorkerConfig

pytestmark = pytest.mark.skipif(HAS_GPU, reason="it stands for one")
SEEDS = range(12)


@pytest.fixture
def cuda() -> Iterator[LazyCuda]:
    with LazyCuda() as cuda:
        torch.cuda.set_device(DEVICE)
        yield cuda


@pytest.fixture
def device(cuda: LazyCuda) -> Device:
    return open_device(WorkerConfig(model_path="", device="cuda:1"))


def on_device(*numbers: float) -> Tensor:
    return torch.tensor(numbers, device=DEVICE)


def in_any_order(cuda: LazyCuda, work: Callable[[], list[float]]) -> set[tuple[float, ...]]:
    """Results, as late as possible and in other orders."""
    found = set()
    for seed in (None, *SEEDS):
        cuda.start_order(seed)
        found.add(tuple(work()))
    return found


def test_a_result_is_not_there_before_its_event(device: Device) -> None:
    pinned = device.pinned(2, torch.float32)
    pinned.copy_(on_device(1.0, 2.0) + 1, non_blocking=True)
    event = device.record()
    assert pinned.isnan().all()
    event.wait()
    assert pinned.tolist() == [2.0, 3.0]


def test_a_copy_brings_what_stands_in_pinned_memory_when_it_is_made(device: Device) -> None:
    pinned, target = device.pinned(1, torch.float32), device.zeros(1, torch.float32)
    for written, waits in ((1.0, True), (2.0, False)):
        pinned.fill_(written)
        target.copy_(pinned, non_blocking=True)
        if waits:
            device.record().wait()
        pinned.fill_(5.0)
        assert target.tolist() == [1.0 if waits else 5.0]


def test_an_upload_keeps_its_pinned_memory_until_it_is_copied(device: Device) -> None:
    sent = [device.tensor(np.full(3, number)) for number in range(20)]
    assert [each.tolist() for each in sent] == [[number] * 3 for number in range(20)]


def test_a_copy_from_memory_that_is_not_pinned_is_waited_for(device: Device, cuda: LazyCuda) -> None:
    host, target = torch.ones(1), device.zeros(1, torch.float32)
    target.copy_(host, non_blocking=True)
    host.fill_(2.0)
    assert cuda.shadow(target).tolist() == [1.0]


@pytest.mark.parametrize("waits", [True, False])
def test_streams_have_no_order_but_the_one_that_was_asked_for(cuda: LazyCuda, waits: bool) -> None:
    side = torch.cuda.Stream(DEVICE)

    def work() -> list[float]:
        source = torch.zeros(1, device=DEVICE)
        side.wait_stream(torch.cuda.current_stream(DEVICE))
        source.add_(1.0)
        if waits:
            side.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(side):
            result = source * 10
        side.synchronize()
        return cuda.shadow(result).tolist()

    assert in_any_order(cuda, work) == ({(10.0,)} if waits else {(0.0,), (10.0,)})


def test_an_event_stands_for_what_was_asked_before_it(cuda: LazyCuda) -> None:
    number, side = torch.zeros(1, device=DEVICE), torch.cuda.Stream(DEVICE)
    event = torch.cuda.Event()
    assert event.query(), "one that was never recorded is waited for by nobody"
    number.add_(1.0)
    event.record()
    number.add_(1.0)
    assert not event.query()
    side.wait_event(event)
    with torch.cuda.stream(side):
        seen = number.clone()
    side.synchronize()
    assert event.query()
    assert cuda.shadow(seen).tolist() == [1.0]
    while not torch.cuda.current_stream(DEVICE).query():
        pass
    assert cuda.shadow(number).tolist() == [2.0]


@pytest.mark.parametrize("tells", [True, False])
def test_memory_is_handed_on_while_another_stream_still_reads_it(cuda: LazyCuda, tells: bool) -> None:
    side = torch.cuda.Stream(DEVICE)

    def work() -> list[float]:
        source = on_device(3.0, 4.0)
        side.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(side):
            result = source * 2
        if tells:
            source.record_stream(side)
        del source
        later = on_device(0.5, 0.5)
        torch.cuda.synchronize(DEVICE)
        assert later.tolist() == [0.5, 0.5]
        return result.tolist()

    found = in_any_order(cuda, work)
    assert (found == {(6.0, 8.0)}) == tells


def test_a_graph_needs_the_memory_that_it_was_captured_with(device: Device) -> None:
    sources = [on_device(1.0), on_device(1.0)]
    results = device.zeros(2, torch.float32)
    graph = device.capture(lambda: torch.cat(sources, out=results))
    sources.pop()
    graph.replay()
    first, second = results.tolist()
    assert first == 1.0
    assert second != 1.0


def test_what_one_graph_leaves_in_the_common_memory_is_gone_with_the_next(device: Device) -> None:
    made: list[Tensor] = []
    number = on_device(1.0)
    first = device.capture(lambda: made.append(number * 2))
    kept = made.pop()
    address = kept.data_ptr()
    first.replay()
    assert kept.tolist() == [2.0]
    made.clear()
    del kept
    second = device.capture(lambda: made.append(number * 3))
    assert made[-1].data_ptr() == address
    second.replay()
    assert made[-1].tolist() == [3.0]


@pytest.mark.parametrize(
    "wait",
    [
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor.cpu(),
        lambda tensor: torch.tensor([1.0], device=DEVICE),
        lambda tensor: tensor.copy_(torch.ones(1), non_blocking=True),
        lambda tensor: torch.cuda.synchronize(DEVICE),
        lambda tensor: torch.cuda.Event().synchronize(),
        lambda tensor: torch.empty(1, pin_memory=True),
    ],
)
def test_a_capture_permits_nothing_that_waits(cuda: LazyCuda, wait: Callable[[Tensor], object]) -> None:
    number, graph = on_device(1.0), torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="due to a previous error during capture") as refused,
        torch.cuda.stream(torch.cuda.current_stream(DEVICE)),
        torch.cuda.graph(graph),
    ):
        wait(number)
    assert "not permitted when stream is capturing" in str(refused.value.__context__)
    assert number.tolist() == [1.0]


def test_graphs_are_captured_when_all_before_them_are_gone(device: Device) -> None:
    """Trials leave none: torch would not take their pool again."""
    number = device.zeros(1, torch.float32)
    for _ in range(2):
        graph = device.capture(lambda: number.add_(1))
        del graph
    device.wait()
    assert number.tolist() == [4.0], "each time tried, and replayed"
    alone = torch.cuda.graph_pool_handle()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=alone):
        number.add_(1)
    with pytest.raises(RuntimeError, match="all graphs have left"):
        torch.cuda.graph(torch.cuda.CUDAGraph(), pool=alone).__enter__()


@pytest.mark.parametrize("wait", [lambda tensor: float(tensor), lambda tensor: tensor.to("cpu")])
def test_what_waits_unasked_is_told_of_on_demand(cuda: LazyCuda, wait: Callable[[Tensor], object]) -> None:
    number = on_device(1.0)
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        wait(number)
    torch.cuda.set_sync_debug_mode("default")


def test_tensors_of_host_and_device_do_not_mix(cuda: LazyCuda) -> None:
    number = on_device(1.0)
    assert number.device == DEVICE
    assert (number + torch.tensor(2.0)).tolist() == [3.0], "but for a number"
    with pytest.raises(RuntimeError, match="on the same device"):
        number + torch.ones(1)
    with pytest.raises(TypeError, match="to numpy"):
        number.numpy()
    ids = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        fill_unknown_tokens(ids.to(DEVICE), ids.int(), ids)


def test_a_thread_that_does_not_say_which_gpu_it_uses_launches_on_another(cuda: LazyCuda) -> None:
    ids = torch.full((1, 1), -1, dtype=torch.int64, device=DEVICE)
    rows, last = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.full((1,), 7, device=DEVICE)
    refused: list[str] = []

    def launch() -> None:
        cuda.watch_thread()
        try:
            fill_unknown_tokens(ids, rows, last)
        except RuntimeError as error:
            refused.append(str(error))

    for make_current in (None, 0, DEVICE):
        thread = threading.Thread(
            target=lambda made=make_current: (made is not None and torch.cuda.set_device(made), launch())
        )
        thread.start()
        thread.join()
    assert ["GPU 0" in each for each in refused] == [True, True]
    assert ids.tolist() == [[7]]


def test_a_kernel_touches_no_tensor_but_its_own(cuda: LazyCuda) -> None:
    ids = torch.full((1, 1), -1, dtype=torch.int64, device=DEVICE)
    rows = torch.full((1,), 100, dtype=torch.int32, device=DEVICE)
    last = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    fill_unknown_tokens(ids, rows, last)
    with pytest.raises(RuntimeError, match=r"_fill_kernel failed.*illegal memory access"):
        torch.cuda.synchronize(DEVICE)


def test_memory_has_an_end_and_comes_back(cuda: LazyCuda, device: Device) -> None:
    cuda.driver.memory.limit_bytes = 1 << 20
    held = torch.zeros(3 << 16, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate 0\.50 MiB"):
        torch.zeros(1 << 17, device=DEVICE)
    del held
    assert torch.zeros(1 << 17, device=DEVICE).sum().item() == 0.0
    assert torch.cuda.max_memory_allocated(DEVICE) >= 3 << 18
    assert torch.cuda.memory_allocated(DEVICE) < 1 << 18
    assert device.free_bytes() <= 1 << 20
