"""Cost of a swap for the decodes that run beside it.

Owns: plans to which copies of blocks are added that no sequence has, and how much longer steps take by them.
Never: chooses what is swapped: here nobody is preempted.

A swap that ran between the steps would cost the time of its copies. One that runs beside them should cost
little, and the share of the memory's bandwidth that it takes.
"""

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from scheduler.messages import BlockCopy, BlockId, SchedulerOutput

if TYPE_CHECKING:
    from campaigns.gpu.driving import Drive
    from campaigns.gpu.results import Record
    from worker.worker import Worker
    from worker.worker_config import ModelFacts

_EVERY = 4
"""One decode of so many has copies."""


class _Way(NamedTuple):
    """Copies that are added to every so many plans, and to those behind them."""

    name: str
    goes_out: bool
    comes_back: bool


_WAYS = (
    _Way("nothing", goes_out=False, comes_back=False),
    _Way("a swap out", goes_out=True, comes_back=False),
    _Way("a swap out, and in the next step a swap in", goes_out=True, comes_back=True),
)


class _SwappingWorker:
    """A worker whose plans are more than the scheduler asked for."""

    def __init__(self, worker: "Worker", copies: tuple[BlockCopy, ...], way: _Way) -> None:
        self._worker, self._way = worker, way
        self._out = copies
        self._back = tuple(BlockCopy(copy.target, copy.source) for copy in copies)
        self._num_decodes = 0

    def launch(self, plan: SchedulerOutput) -> Any:
        """See Worker."""
        if plan.num_scheduled_tokens == len(plan.scheduled) > 0:
            turn = self._num_decodes % _EVERY
            self._num_decodes += 1
            if turn == 0 and self._way.goes_out:
                plan = plan._replace(swap_out=self._out)
            elif turn == 1 and self._way.comes_back:
                plan = plan._replace(swap_in=self._back)
        return self._worker.launch(plan)


def measure_swaps(
    record: "Record",
    worker: "Worker",
    facts: "ModelFacts",
    drive_on: Callable[[Any, int], "Drive"],
    *,
    num_warm: int,
) -> None:
    """Swap all of the host's pool, out and back. `drive_on` takes a worker, and how many blocks it may use.

    Nothing is measured where the worker has no host pool. The first `num_warm` decodes do not count.
    """
    num_copied = min(facts.num_host_blocks, facts.num_blocks // 2)
    if not num_copied:
        return
    num_used = facts.num_blocks - num_copied
    copies = tuple(BlockCopy(BlockId(num_used + n), BlockId(n)) for n in range(1, num_copied + 1))
    block_bytes = facts.kv_cache_bytes // (facts.num_blocks + 1)
    one_way_s = num_copied * facts.copy_s_per_block
    table = record.table(
        f"Decodes, and {num_copied * block_bytes / 2**20:.3g} MiB of blocks swapped beside every {_EVERY}th",
        *("Beside it", "Step, mean", "Slowest step", "A swap costs", "Its copies take"),
    )
    record.figure("swap_bytes_per_s", block_bytes / facts.copy_s_per_block)
    alone_s = 0.0
    for way in _WAYS:
        drive = drive_on(_SwappingWorker(worker, copies, way), num_used)
        drive.run().free_rows()
        took_s = [step.took_s for step in drive.steps if step.is_decode][num_warm:]
        mean_s = statistics.fmean(took_s)
        alone_s = alone_s or mean_s
        num_ways = way.goes_out + way.comes_back
        cost_s = (mean_s - alone_s) * _EVERY
        table.add(
            *(way.name, f"{mean_s * 1e3:.2f} ms", f"{max(took_s) * 1e3:.2f} ms"),
            *(f"{cost_s * 1e3:.2f} ms", f"{num_ways * one_way_s * 1e3:.2f} ms"),
        )
        record.figure(f"swap_cost_s_{num_ways}", cost_s)
