"""Ranks on GPUs, by torch.distributed.

Owns: the process groups: NCCL between ranks that have a GPU each, whose exchanges are part of the device's
work and are captured with it; gloo between ranks that share one, through the host's memory. One group has all
ranks. Where there are stages, each has one of its own, and so has each way from a stage to the next. Ranks
of one machine meet over a file, those of several over links.
Never: notices that another rank has ended: one inside an exchange waits on its device, until the engine
process, which watches all of them, ends it (engine/core/rank_group.py).

Shapes: T tokens, P numbers of one rank.
"""

import os
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from worker.ranks.device_stage import DeviceReceiver, DeviceSender, around_graph, through_host
from worker.ranks.gathering_ranks import GatheringRanks
from worker.ranks.places import RankPlace
from worker.ranks.ranks import ExchangeTimes, Reducer
from worker.ranks.shared_ranks import NodeLinks, stage_of
from worker.ranks.stage import Stage
from worker.worker_config import WorkerConfig

_TIMEOUT = timedelta(minutes=30)
"""Time that a rank may be later than another while they load: kernels are compiled, and files read."""
_NCCL, _GLOO = "nccl", "gloo"
_STORE = "ranks"
_LOOPBACK = "lo"
_INTERFACES = {"NCCL_SOCKET_IFNAME": "={}", "GLOO_SOCKET_IFNAME": "{}"}
"""Settings of both libraries, with the form in which they take the name of one interface and no other."""
# A way has a group of its own, in which sends come one after the other anyway.
_QUIET = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"


class DeviceWorld:
    """All ranks of all stages: see World."""

    def __init__(self, directory: Path, config: WorkerConfig, rank: int, links: NodeLinks | None) -> None:
        """Meet once `join` is called: in a directory that all ranks have for themselves, or over links."""
        self.rank = rank
        self.is_by_nccl = not shares_device(config)
        self._size = config.num_stages * config.num_ranks
        self._links = links
        self._store = FileStore(str(directory / _STORE), self._size) if links is None else links.store()
        self._store.set_timeout(_TIMEOUT)
        self.device = torch.device(device_of_rank(config, rank))

    def join(self, library: Path | None) -> None:  # noqa: ARG002 - for ranks on CPUs
        os.environ.setdefault(_QUIET, "false")
        for name, form in _INTERFACES.items():
            if name not in os.environ:  # nothing listens on other addresses of the machine
                found = _LOOPBACK if self._links is None else self._links.interface()
                os.environ[name] = form.format(found)
        dist.init_process_group(
            _NCCL if self.is_by_nccl else _GLOO,
            store=self._store,
            rank=self.rank,
            world_size=self._size,
            timeout=_TIMEOUT,
            # At once, and not within the first exchange, which may be in a capture.
            device_id=self.device if self.is_by_nccl else None,
        )

    def of_all(self, numbers: list[int]) -> Tensor:
        """See World. The host waits."""
        return self.numbers_of(None, self._size, numbers)

    def new_group(self, ranks: Iterable[int]) -> dist.ProcessGroup | None:
        """Make a group of some ranks, which all ranks do; None for those that are not in it."""
        found = dist.new_group(list(ranks), timeout=_TIMEOUT)
        return found if isinstance(found, dist.ProcessGroup) else None

    def numbers_of(self, group: dist.ProcessGroup | None, size: int, numbers: list[int]) -> Tensor:
        """Return the numbers of all ranks of a group, or of all groups. The host waits."""
        return self.gathered(group, size, torch.tensor(numbers, device=self.device)).cpu()

    def gathered(self, group: dist.ProcessGroup | None, size: int, own: Tensor) -> Tensor:
        """Return the tensors of all ranks of a group, [ranks, ...], on the device."""
        if self.is_by_nccl:
            whole = own.new_empty((size, *own.shape))
            dist.all_gather_into_tensor(whole, own.contiguous(), group=group)
            return whole
        on_host = own.cpu().contiguous()
        parts = [torch.empty_like(on_host) for _ in range(size)]
        dist.all_gather(parts, on_host, group=group)
        return torch.stack(parts).to(own.device)


class DeviceRanks(GatheringRanks):
    """Ranks whose devices exchange. Not for several threads at once."""

    def __init__(
        self, directory: Path, config: WorkerConfig, place: RankPlace, links: NodeLinks | None = None
    ) -> None:
        self.rank, self.size = place.shard, place.num_shards
        self._all = DeviceWorld(directory, config, place.rank, links)
        self._world = self._all
        self._group: dist.ProcessGroup | None = None
        self._inlet: DeviceReceiver | None = None
        self._outlet: DeviceSender | None = None
        self._is_open = False
        if self._all.is_by_nccl:
            self.stage = self._open_stage(place, 0 if config.enforce_eager else config.max_num_batched_tokens)
        else:
            self.stage = through_host(stage_of(place, links))

    def _open_stage(self, place: RankPlace, max_graph_tokens: int) -> Stage:
        index, count = place.stage, place.num_stages
        if index > 0:
            self._inlet = DeviceReceiver(max_graph_tokens)
        if index < count - 1:
            self._outlet = DeviceSender(max_graph_tokens)
        around = around_graph(self._inlet, self._outlet)
        return Stage(index, count, inlet=self._inlet, outlet=self._outlet, around_graph=around)

    def join(self, library: Path | None) -> None:
        """See Ranks. Later calls do nothing."""
        if self._is_open:
            return
        self._all.join(library)
        if self.stage.count > 1:
            self._open_groups()
        self._is_open = True

    def _open_groups(self) -> None:
        """Make the groups of all stages and ways, in one order on all ranks."""
        own, num_shards = self._all.rank, self.size
        num_ranks = self.stage.count * num_shards
        if num_shards > 1:
            for first in range(0, num_ranks, num_shards):
                self._group = self._all.new_group(range(first, first + num_shards)) or self._group
        if not self._all.is_by_nccl:
            return
        for rank in range(num_ranks - num_shards):
            way = self._all.new_group((rank, rank + num_shards))
            if own == rank and self._outlet is not None and way is not None:
                self._outlet.open(way, self._all.device)
            elif own == rank + num_shards and self._inlet is not None and way is not None:
                self._inlet.open(way, self._all.device)

    @property
    def reducer(self) -> Reducer:
        raise NotImplementedError("sums of GPUs are no part of a C function")

    @property
    def _is_alone(self) -> bool:
        """Whether the stage has no other rank."""
        return self.size == 1 and self.stage.count > 1

    def reduce(self, sums: Tensor) -> None:
        if self._is_alone:
            return
        if self._all.is_by_nccl:
            dist.all_reduce(sums, group=self._group)
            return
        on_host = sums.cpu()
        dist.all_reduce(on_host, group=self._group)
        sums.copy_(on_host)

    def gather(self, part_TP: Tensor) -> Tensor:
        if self._is_alone:
            return part_TP
        num_rows, num_own = part_TP.shape
        parts_STP = self._all.gathered(self._group, self.size, part_TP)
        return parts_STP.transpose(0, 1).reshape(num_rows, self.size * num_own)

    def share(self, numbers: Tensor) -> None:
        """See Ranks. Not with several stages, whose tokens come with a later plan."""
        if self._all.is_by_nccl:
            dist.broadcast(numbers, src=0)
        else:
            super().share(numbers)

    def of_all(self, numbers: list[int]) -> Tensor:
        """See World. The host waits."""
        if self._is_alone:
            return torch.tensor([numbers], dtype=torch.int64)
        return self._all.numbers_of(self._group, self.size, numbers)

    def times(self) -> ExchangeTimes:
        """Return none: exchanges are a part of the device's work."""
        return ExchangeTimes()


def shares_device(config: WorkerConfig) -> bool:
    """Tell whether all ranks are on one GPU, which is the case where its number was asked for."""
    return config.num_stages * config.num_ranks > config.num_devices


def device_of_rank(config: WorkerConfig, rank: int) -> str:
    """Name the device of a rank, by its number among all stages'.

    Each has one of those in its node's CUDA_VISIBLE_DEVICES, in their order.
    """
    return f"cuda:{rank % config.num_gpus_of_a_node}" if config.num_devices > 1 else config.device
