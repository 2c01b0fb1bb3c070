"""NCCL without NCCL: exchanges that a lazy device makes when it comes to them, with that of another process.

Owns: the place of an exchange in the order of the device's work, and in a graph; the comparison of what ranks
exchange. Tensors of the device travel by gloo, when the device carries the exchange out.
Never: time, links between GPUs, or what NCCL itself refuses.

Seen with it: a sum that is left out of a graph, or made beside it; ranks that exchange something else, or in
another order; a step of which one rank waits and the other does not.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.worker.gpu.lazy_cuda import LazyCuda

_TIMEOUT = timedelta(seconds=240)
_NAMES = ("all_reduce", "all_gather", "broadcast")


class LazyNccl:
    """The functions of torch.distributed as NCCL gives them, for one process with a lazy device."""

    def __init__(self, cuda: LazyCuda) -> None:
        self._cuda = cuda
        self._all_reduce, self._all_gather, self._broadcast = dist.all_reduce, dist.all_gather, dist.broadcast
        self._begin = dist.init_process_group

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(dist, "init_process_group", self._open)
        patch.setattr(dist, "all_reduce", self._sum)
        patch.setattr(dist, "all_gather_into_tensor", self._gather)
        patch.setattr(dist, "broadcast", self._send_first)

    def _open(self, backend: str, *, device_id: torch.device, **options: Any) -> None:
        assert backend == "nccl"
        assert device_id == torch.device("cuda", torch.cuda.current_device()), "of this thread"
        self._begin("gloo", **{**options, "timeout": _TIMEOUT})

    def _sum(self, tensor: Tensor) -> None:
        own = self._cuda.shadow(tensor)
        self._ask("all_reduce", own, lambda: self._all_reduce(own))

    def _gather(self, whole: Tensor, part: Tensor) -> None:
        own, parts = self._cuda.shadow(part), self._cuda.shadow(whole)
        self._ask("all_gather", own, lambda: self._all_gather(list(parts), own))

    def _send_first(self, tensor: Tensor, src: int) -> None:
        own = self._cuda.shadow(tensor)
        self._ask("broadcast", own, lambda: self._broadcast(own, src=src))

    def _ask(self, name: str, own: Tensor, exchange: Callable[[], Any]) -> None:
        assert own.is_contiguous()

        def carry_out() -> None:
            self._compare(name, own)
            exchange()

        self._cuda.ask(name, carry_out)

    def _compare(self, name: str, own: Tensor) -> None:
        mine = torch.tensor([_NAMES.index(name), own.numel(), own.dtype.itemsize])
        of_all = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        self._all_gather(of_all, mine)
        if any(not torch.equal(each, mine) for each in of_all):
            raise RuntimeError(f"ranks exchange different things: {[each.tolist() for each in of_all]}")
