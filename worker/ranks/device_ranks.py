"""Ranks on GPUs of one machine, by torch.distributed.

Owns: the process group: NCCL between ranks that have a GPU each, whose exchanges are part of the device's
work and are captured with it; gloo between ranks that share one, through the host's memory.
Never: notices that another rank has ended: one inside an exchange waits on its device, until the engine
process, which watches all of them, ends it (engine/core/rank_group.py).

Shapes: T tokens, P numbers of one rank.
"""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from worker.ranks.gathering_ranks import GatheringRanks
from worker.ranks.ranks import ExchangeTimes, Reducer
from worker.ranks.stage import ONLY_STAGE
from worker.worker_config import WorkerConfig

_TIMEOUT = timedelta(minutes=30)
"""Time that a rank may be later than another while they load: kernels are compiled, and files read."""
_NCCL, _GLOO = "nccl", "gloo"
_STORE = "ranks"
# They are on one machine: nothing listens on other addresses of it.
_INTERFACES = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


class DeviceRanks(GatheringRanks):
    """See Ranks. Not for several threads at once."""

    stage = ONLY_STAGE

    def __init__(self, directory: Path, config: WorkerConfig, *, rank: int) -> None:
        """Meet over a file in a directory that all ranks have for themselves, once `join` is called."""
        self.rank, self.size = rank, config.num_ranks
        self._store = directory / _STORE
        self._device = torch.device(device_of_rank(config, rank))
        self._backend = _GLOO if shares_device(config) else _NCCL
        self._world = self
        self._is_open = False

    def join(self, library: Path | None) -> None:  # noqa: ARG002 - for ranks on CPUs
        """See Ranks. Later calls do nothing."""
        if self._is_open:
            return
        for name, interface in _INTERFACES.items():
            os.environ.setdefault(name, interface)
        dist.init_process_group(
            self._backend,
            store=dist.FileStore(str(self._store), self.size),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.size,
            timeout=_TIMEOUT,
            # At once, and not within the first exchange, which may be in a capture.
            device_id=self._device if self._backend == _NCCL else None,
        )
        self._is_open = True

    @property
    def reducer(self) -> Reducer:
        raise NotImplementedError("sums of GPUs are no part of a C function")

    def reduce(self, sums: Tensor) -> None:
        """See Ranks."""
        if self._backend == _NCCL:
            dist.all_reduce(sums)
            return
        on_host = sums.cpu()
        dist.all_reduce(on_host)
        sums.copy_(on_host)

    def gather(self, part_TP: Tensor) -> Tensor:
        """See Ranks."""
        num_rows, num_own = part_TP.shape
        parts_STP = self._gathered(part_TP)
        return parts_STP.transpose(0, 1).reshape(num_rows, self.size * num_own)

    def share(self, numbers: Tensor) -> None:
        """See Ranks."""
        if self._backend == _NCCL:
            dist.broadcast(numbers, src=0)
        else:
            super().share(numbers)

    def of_all(self, numbers: list[int]) -> Tensor:
        """See World. The host waits."""
        return self._gathered(torch.tensor(numbers, device=self._device)).cpu()

    def times(self) -> ExchangeTimes:
        """Return none: exchanges are a part of the device's work."""
        return ExchangeTimes()

    def _gathered(self, own: Tensor) -> Tensor:
        """Return the tensors of all ranks, [ranks, ...], on the device."""
        shape = (self.size, *own.shape)
        if self._backend == _NCCL:
            whole = own.new_empty(shape)
            dist.all_gather_into_tensor(whole, own.contiguous())
            return whole
        on_host = own.cpu().contiguous()
        parts = [torch.empty_like(on_host) for _ in range(self.size)]
        dist.all_gather(parts, on_host)
        return torch.stack(parts).to(own.device)


def shares_device(config: WorkerConfig) -> bool:
    """Tell whether all ranks are on one GPU, which is the case where its number was asked for."""
    return config.num_ranks_on_device > 1


def device_of_rank(config: WorkerConfig, rank: int) -> str:
    """Name the device of a rank: each has one of those in CUDA_VISIBLE_DEVICES, in their order."""
    return f"cuda:{rank}" if config.num_devices > 1 else config.device
