"""NCCL without NCCL: exchanges that a lazy device makes when it comes to them, with that of another process.

Owns: the place of an exchange in the order of the device's work, in a graph, and of a send beside it; the
comparison of what ranks exchange. Tensors of the device travel by gloo, when the device carries it out.
Never: time, links between GPUs, or what NCCL itself refuses.

Seen with it: a sum that is left out of a graph, or made beside it; ranks that exchange something else, or in
another order; a step of which one rank waits and the other does not.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.worker.gpu.lazy_cuda import LazyCuda

_TIMEOUT = timedelta(seconds=240)
_NAMES = ("all_reduce", "all_gather", "broadcast", "pass on")


Group = dist.ProcessGroup | None


class _Sending(NamedTuple):
    event: Any

    def wait(self) -> None:
        """Let the current stream wait, and not the host."""
        torch.cuda.current_stream().wait_event(self.event)


class LazyNccl:
    """The functions of torch.distributed as NCCL gives them, for one process with a lazy device."""

    def __init__(self, cuda: LazyCuda) -> None:
        self._cuda = cuda
        self._all_reduce, self._all_gather, self._broadcast = dist.all_reduce, dist.all_gather, dist.broadcast
        self._send, self._recv = dist.send, dist.recv
        self._begin = dist.init_process_group
        self._ways: dict[dist.ProcessGroup | None, Any] = {}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(dist, "init_process_group", self._open)
        patch.setattr(dist, "all_reduce", self._sum)
        patch.setattr(dist, "all_gather_into_tensor", self._gather)
        patch.setattr(dist, "broadcast", self._send_first)
        patch.setattr(dist, "isend", self._begin_to_send)
        patch.setattr(dist, "recv", self._receive)

    def _open(self, backend: str, *, device_id: torch.device, **options: Any) -> None:
        assert backend == "nccl"
        assert device_id == torch.device("cuda", torch.cuda.current_device()), "of this thread"
        self._begin("gloo", **{**options, "timeout": _TIMEOUT})

    def _sum(self, tensor: Tensor, group: Group = None) -> None:
        own = self._cuda.shadow(tensor)
        self._ask("all_reduce", own, group, lambda: self._all_reduce(own, group=group))

    def _gather(self, whole: Tensor, part: Tensor, group: Group = None) -> None:
        own, parts = self._cuda.shadow(part), self._cuda.shadow(whole)
        self._ask("all_gather", own, group, lambda: self._all_gather(list(parts), own, group=group))

    def _send_first(self, tensor: Tensor, src: int) -> None:
        own = self._cuda.shadow(tensor)
        self._ask("broadcast", own, None, lambda: self._broadcast(own, src=src))

    def _receive(self, tensor: Tensor, group: Group, group_src: int) -> None:
        own = self._cuda.shadow(tensor)
        self._ask("pass on", own, group, lambda: self._recv(own, group=group, group_src=group_src))

    def _begin_to_send(self, tensor: Tensor, group: Group, group_dst: int) -> "_Sending":
        """Send on the stream of the group, after what the current stream was asked before."""
        own, stream = self._cuda.shadow(tensor), self._ways.setdefault(group, torch.cuda.Stream())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._ask("pass on", own, group, lambda: self._send(own, group=group, group_dst=group_dst))
            return _Sending(stream.record_event())

    def _ask(self, name: str, own: Tensor, group: Group, exchange: Callable[[], Any]) -> None:
        assert own.is_contiguous()

        def carry_out() -> None:
            self._compare(name, own, group)
            exchange()

        self._cuda.ask(name, carry_out)

    def _compare(self, name: str, own: Tensor, group: Group) -> None:
        mine = torch.tensor([_NAMES.index(name), own.numel(), own.dtype.itemsize])
        of_all = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        self._all_gather(of_all, mine, group=group)
        if any(not torch.equal(each, mine) for each in of_all):
            raise RuntimeError(f"ranks exchange different things: {[each.tolist() for each in of_all]}")
