"""Blocks between two pools, by hand: which are copied, in what order, and which are not."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from scheduler.messages import BlockCopy, BlockId
from worker.attention.kv_cache import BlockLayout, KVCache, LayerShape
from worker.devices.block_copies import BlockRun, Pools, RowCopy, TouchedRows, merge_runs
from worker.devices.device import CpuDevice, CudaDevice
from worker.steps.host_pool import HostPool
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

LAYOUT = BlockLayout(layers={0: LayerShape(1, 8, 8)}, block_size=4, dtype=torch.bfloat16)
NUM_BLOCKS, NUM_HOST_BLOCKS = 6, 4


@pytest.fixture
def cache() -> KVCache:
    """Block n is full of n; the padding block of -1."""
    cache = KVCache(
        LAYOUT, NUM_BLOCKS, torch.zeros((NUM_BLOCKS + 1) * LAYOUT.block_numel, dtype=LAYOUT.dtype)
    )
    for block_id in range(NUM_BLOCKS + 1):
        cache.pool_NE[block_id] = block_id or -1
    return cache


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice(WorkerConfig(model_path="", num_threads=1))


@pytest.fixture
def pool(cache: KVCache, device: CpuDevice) -> HostPool:
    return HostPool(NUM_HOST_BLOCKS * LAYOUT.block_bytes + 1, cache, device)


def contents(cache: KVCache) -> list[int]:
    assert (cache.pool_NE == cache.pool_NE[:, :1]).all(), "a block came in pieces"
    return cache.pool_NE[:, 0].int().tolist()


def copies(*pairs: tuple[int, int]) -> list[BlockCopy]:
    return [BlockCopy(BlockId(source), BlockId(target)) for source, target in pairs]


def test_blocks_come_back_whole_and_all_go_out_before_any_comes_in(cache: KVCache, pool: HostPool) -> None:
    assert pool.swap(copies((1, 4), (2, 1), (5, 2)), []) == {}
    cache.pool_NE[1:] = 9
    # Block 6 goes to host block 3 and from there to 1; host block 4 to 6, once 6 has left.
    assert pool.swap(copies((6, 3)), copies((3, 1), (4, 6), (1, 2), (2, 3))) == {}
    assert contents(cache) == [-1, 9, 2, 5, 9, 9, 1]


@pytest.mark.parametrize("source", [-1, 0, NUM_BLOCKS + 1])
@pytest.mark.parametrize("target", [1, -1, 0, NUM_HOST_BLOCKS + 1])
def test_nothing_outside_of_the_pools_is_swapped_out(
    cache: KVCache, pool: HostPool, source: int, target: int
) -> None:
    pool.swap(copies((2, 1)), [])
    pool.swap(copies((source, target), (3, 2)), [])
    assert pool.swap([], copies((2, 6))) == {}
    assert contents(cache) == [-1, 1, 2, 3, 4, 5, 3]
    assert list(pool.swap([], copies((target, 5)))) == [5], "an earlier owner's content is not handed out"
    assert contents(cache) == [-1, 1, 2, 3, 4, 5, 3]


@pytest.mark.parametrize("target", [-1, 0, NUM_BLOCKS + 1])
def test_nothing_outside_of_the_pool_is_swapped_in(cache: KVCache, pool: HostPool, target: int) -> None:
    lost = pool.swap(copies((2, 1)), copies((1, target), (1, 3)))
    assert list(lost) == [target]
    assert contents(cache) == [-1, 1, 2, 2, 4, 5, 6]


@pytest.mark.parametrize("source", [-1, 0, 2, NUM_HOST_BLOCKS + 1])
def test_what_was_never_swapped_out_is_lost(cache: KVCache, pool: HostPool, source: int) -> None:
    lost = pool.swap(copies((2, 1)), copies((source, 4), (1, 3)))
    assert list(lost) == [4]
    assert contents(cache) == [-1, 1, 2, 2, 4, 5, 6]


def test_what_was_being_copied_when_a_step_failed_is_lost(
    cache: KVCache, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.swap(copies((1, 1)), [])
    with monkeypatch.context() as broken:
        broken.setattr(pool._copier, "swap", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pool.swap(copies((2, 1)), [])
    assert list(pool.swap([], copies((1, 3)))) == [3]


def test_copies_within_the_device_come_after_what_comes_in(cache: KVCache, pool: HostPool) -> None:
    pool.swap(copies((5, 1)), [])
    assert pool.swap([], copies((1, 2)), copies((2, 3), (4, 6))) == {}
    assert contents(cache) == [-1, 1, 5, 5, 4, 5, 4]


def test_a_kernel_for_copies_is_compiled_before_anybody_needs_it(cache: KVCache, pool: HostPool) -> None:
    asked: list[list[list[int]]] = []
    pool.copy_with(lambda _, sources, targets: asked.append([sources.tolist(), targets.tolist()]))
    assert asked == [[[-1], [0]]], "no pair"
    assert pool.swap([], [], copies((2, 1), (5, 4))) == {}
    assert asked[1:] == [[[2, 5], [1, 4]]]


def test_without_a_host_pool_blocks_are_copied_within_the_device(cache: KVCache, device: CpuDevice) -> None:
    assert HostPool(0, cache, device).swap([], [], copies((6, 1))) == {}
    assert contents(cache) == [-1, 6, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("source", "target"), [(0, 3), (-1, 3), (NUM_BLOCKS + 1, 3), (2, 0), (2, 99)])
def test_nothing_outside_of_the_pool_is_copied(
    cache: KVCache, pool: HostPool, source: int, target: int
) -> None:
    assert list(pool.swap([], [], copies((source, target), (1, 4)))) == [target]
    assert contents(cache) == [-1, 1, 2, 3, 1, 5, 6]


def test_a_copy_of_what_was_lost_is_lost(cache: KVCache, pool: HostPool) -> None:
    assert list(pool.swap([], copies((3, 2)), copies((2, 5)))) == [2, 5]
    assert contents(cache) == [-1, 1, 2, 3, 4, 5, 6]


def test_without_swap_space_there_is_no_pool(cache: KVCache, device: CpuDevice) -> None:
    pool = HostPool(0, cache, device)
    assert (pool.num_blocks, pool.measure_copy_s()) == (0, 0.0)
    assert pool.swap([], []) == {}
    assert list(pool.swap(copies((1, 1)), copies((1, 2)))) == [2]


def test_a_swap_space_below_one_block_is_refused(cache: KVCache, device: CpuDevice) -> None:
    with pytest.raises(StartupError, match=f"--swap-space {LAYOUT.block_bytes} or more"):
        HostPool(LAYOUT.block_bytes - 1, cache, device)


@pytest.mark.parametrize("num_blocks", [1, NUM_HOST_BLOCKS, 2 * NUM_BLOCKS])
def test_measuring_leaves_no_trace(cache: KVCache, device: CpuDevice, num_blocks: int) -> None:
    pool = HostPool(num_blocks * LAYOUT.block_bytes, cache, device)
    assert pool.measure_copy_s() > 0
    assert list(pool.swap([], copies((1, 2)))) == [2]
    assert contents(cache) == [-1, 1, 2, 3, 4, 5, 6]


def test_neighbours_in_both_pools_are_copied_at_once_in_whatever_order_they_are_named() -> None:
    def runs(*pairs: tuple[int, int]) -> list[BlockRun]:
        return merge_runs(RowCopy(*pair) for pair in pairs)

    assert runs() == []
    assert runs((5, 2), (4, 1), (3, 0)) == [BlockRun(3, 0, 3)]
    assert runs((1, 7), (2, 6), (3, 5)) == [BlockRun(1, 7, 1), BlockRun(2, 6, 1), BlockRun(3, 5, 1)]
    assert runs((1, 1), (2, 2), (4, 3), (5, 4)) == [BlockRun(1, 1, 2), BlockRun(4, 3, 2)]


class FakeStream:
    """Does at once what it is asked, and tells of events."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_event(self, event: "FakeEvent") -> None:
        self._log.append(f"{self.name} waits for {event.stream.name}")

    def __enter__(self) -> None:
        self._log.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None: ...


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return False


def test_a_gpu_copies_on_streams_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: what is asked of torch.cuda."""
    log: list[str] = []
    names = iter(("out", "late out", "back"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: FakeStream(next(names), log))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: FakeStream("compute", log))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    gpu = CudaDevice(WorkerConfig(model_path=""), torch.device("cpu"))
    pools = Pools(torch.arange(8.0).view(4, 2), torch.zeros(3, 2))
    copier = gpu.open_copier(pools)
    rows = np.array([1])
    with copier.step(TouchedRows(rows, rows[None], rows)):
        log.append("step 1")
    copier.swap([RowCopy(1, 0), RowCopy(2, 1)], [RowCopy(1, 3)])
    with copier.step(TouchedRows(rows, rows[None], rows)):
        log.append("step 2")
    assert log == [
        "step 1",
        "on out",
        *("late out waits for compute", "on late out"),
        *("back waits for out", "on back"),
        *("compute waits for late out", "step 2"),
    ]
    assert pools.host_ME.tolist() == [[2.0, 3.0], [4.0, 5.0], [0.0, 0.0]]
    assert pools.device_NE[3].tolist() == [4.0, 5.0]


def test_a_gpu_pins_the_hosts_pool_while_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, int] = {}

    def register(address: int, num_bytes: int, flags: int) -> int:
        pinned[address] = num_bytes
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    gpu = CudaDevice(WorkerConfig(model_path=""), torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "device", lambda _: FakeStream("device", []))
    memory = gpu.host_zeros(1000, torch.float16)
    assert pinned == {memory.data_ptr(): 2000}
    view = memory.view(10, 100)
    assert not view.any()
    del view, memory
    assert pinned == {}
