"""Random histories once more, over two real pools whose copies are made late, beside the steps.

The scheduler, the host's pool and its streams are the real ones. Slots hold a number for what was computed
there; a step checks what it reads when the streams get to it, in whatever order they do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from scheduler.cache_groups import CacheGroup, Lifetime, LifetimeKind
from scheduler.config import PreemptionMode, PrefixCaching, SchedulerConfig
from scheduler.messages import ModelRunnerOutput, SchedulerOutput
from tests.fakes import FakeWorker, _content, _Row
from tests.late_streams import LateGpu
from tests.properties.lengths import TIMES, seeds
from tests.properties.test_scheduler_histories import check_ends, play, random_history
from tests.world import World, small_config, windows_of
from worker.attention.interface import AttentionMetadata, BlockTables
from worker.attention.kv_cache import BlockLayout, KVCache, LayerShape
from worker.devices.block_copies import PoolCopier, Pools
from worker.devices.copy_streams import CopyStreams
from worker.devices.device import CpuDevice
from worker.steps.host_pool import HostPool
from worker.worker_config import WorkerConfig

_NUMBERS_PER_SLOT = 2
_BLOCKS_PER_PIECE = 2


class LateDevice(CpuDevice):
    """A device whose copies are made by the streams of a LateGpu."""

    def __init__(self, gpu: LateGpu) -> None:
        super().__init__(WorkerConfig(model_path="", num_threads=1))
        self._gpu = gpu

    def open_copier(self, pools: Pools) -> PoolCopier:
        piece_bytes = _BLOCKS_PER_PIECE * pools.device_NE.shape[1] * pools.device_NE.itemsize
        return CopyStreams(pools, self._gpu.streams, piece_bytes=piece_bytes)


class LateWorker(FakeWorker):
    """A FakeWorker whose slots are in the pools of a device that works late."""

    def __init__(self, config: SchedulerConfig, random: Random) -> None:
        super().__init__(config.block_size, config.groups, config.encoder_cache_tokens)
        self.gpu = LateGpu()
        self._random = random
        layout = BlockLayout(layers={0: LayerShape(1, 1, 1)}, block_size=config.block_size, dtype=torch.int64)
        assert layout.block_numel == config.block_size * _NUMBERS_PER_SLOT
        cache = KVCache(
            layout, config.num_blocks, torch.zeros((config.num_blocks + 1) * layout.block_numel).long()
        )
        self._slots_NE = cache.pool_NE.numpy()
        self._host_pool = HostPool(config.num_host_blocks * layout.block_bytes, cache, LateDevice(self.gpu))
        self._host_pool.copy_with(self._copy_rows)
        self._written: list[tuple[int, int, int]] = []
        self._read: list[tuple[int, int, int]] = []

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self._written, self._read = [], []
        result = super().execute(plan)
        if self._written:
            with self._host_pool.step(self._metadata()):
                self.gpu.compute.ask(lambda: self.gpu.run_some(self._random))  # in the middle of the step
                self.gpu.compute.ask(lambda written=self._written, read=self._read: self._run(written, read))
        self.gpu.run_some(self._random)
        return result

    def _run(self, written: list[tuple[int, int, int]], read: list[tuple[int, int, int]]) -> None:
        for block, offset, number in written:
            self._slots_NE[block, offset] = number
        for block, offset, number in read:
            held = self._slots_NE[block, offset]
            assert held == number, f"slot {offset} of block {block} holds something else"

    def _copy(self, plan: SchedulerOutput) -> None:
        self._host_pool.swap(plan.swap_out, plan.swap_in, plan.copies)

    def _copy_rows(self, pool_NE: Tensor, sources_P: Tensor, targets_P: Tensor) -> None:
        for source, target in zip(sources_P.tolist(), targets_P.tolist(), strict=True):
            if source >= 0:
                self.gpu.compute.ask(lambda s=source, t=target: pool_NE[t].copy_(pool_NE[s]))

    def _write(self, row: _Row, start: int, num_tokens: int) -> None:
        for position in range(start, start + num_tokens):
            self._written += self._numbers(row, position, self._groups_of_tokens())

    def _check_prefix(self, row: _Row, start: int, end: int) -> None:
        for group in self._groups_of_tokens():
            for position in range(self.groups[group].lifetime.first_read(start), end):
                self._read += self._numbers(row, position, [group])

    def _numbers(self, row: _Row, position: int, groups: list[int]) -> list[tuple[int, int, int]]:
        """Block, offset and content of a position, of each stripe of these groups."""
        return [
            (*slot, hash((group, stripe, *_content(row, position))))
            for group in groups
            for stripe, slot in enumerate(self._slots(row, group, position))
        ]

    def _metadata(self) -> AttentionMetadata:
        """One sequence that reads all that is read."""
        read = list(dict.fromkeys(block for block, _, _ in self._read))
        return AttentionMetadata(
            num_decodes=0,
            query_starts=np.array([0, len(self._written)]),
            seq_lens=np.array([len(read) * self.block_size]),
            tables=BlockTables.of(np.array([read], np.int32)),
            token_blocks_ST=np.array([[block for block, _, _ in self._written]]),
            token_offsets=np.array([offset for _, offset, _ in self._written]),
        )


SEVERAL = (CacheGroup(), CacheGroup(Lifetime(LifetimeKind.WINDOW, 6), num_stripes=2))


def _config(random: Random) -> SchedulerConfig:
    return small_config(
        num_blocks=random.randint(8, 16),
        max_num_seqs=random.randint(2, 6),
        preemption_mode=PreemptionMode.SWAP,
        num_host_blocks=random.choice([4, 12, 30]),
        groups=random.choice([windows_of(None), windows_of(None), windows_of(6), SEVERAL]),
        max_plans_in_flight=random.randint(1, 3),
        encoder_cache_tokens=6,
        max_adapters=2,
    )


@contextmanager
def world_of(config: SchedulerConfig, random: Random) -> Iterator[World]:
    world = World(config, max_drafts=random.choice([0, 0, 3]))
    worker = LateWorker(config, random)
    worker.inputs = world.worker.inputs
    world.worker = worker
    yield world
    worker.gpu.finish(random.sample(range(4), 4))


@pytest.mark.parametrize("caching", PrefixCaching)
def test_every_block_holds_what_it_should_however_late_it_was_copied(caching: PrefixCaching) -> None:
    num_swaps = num_host_hits = num_copies = 0
    for seed in seeds(24):
        random = Random(seed)
        config = replace(_config(random), prefix_caching=caching)
        with world_of(config, random) as world:
            accepted = play(world, random_history(random))
        check_ends(world, accepted)
        num_swaps += world.num_swaps()
        num_host_hits += world.scheduler.stats().num_prefix_host_hits
        num_copies += sum(len(plan.copies) for plan in world.worker.plans)
    assert num_swaps > 60 * TIMES, "the histories are too easy"
    assert (num_host_hits > 100 * TIMES and num_copies > 4 * TIMES) == (caching is PrefixCaching.ON)
