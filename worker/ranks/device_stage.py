"""Hidden states on their way between stages on GPUs.

Owns: a one-way channel over NCCL, whose sends wait on a stream of their own and not
within the device's work; and one through the host's memory, for stages that share a GPU.

A stage with a GPU of its own goes on with its next step while the hidden states of up to two others wait for
the next stage. So sends are no part of a graph: the last layer in a graph leaves its result at a fixed place,
and its content is sent once the graph was launched. The first layer of the next stage finds it at a fixed
place too, where it was received before.

Shapes: T tokens, H numbers of a hidden state.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from worker.ranks.stage import HiddenReceiver, HiddenSender, Stage

_FIRST, _SECOND = 0, 1
"""The ranks of a channel, in its group."""
_MOST_UNDER_WAY = 2


class _DeviceEnd:
    def __init__(self, max_graph_tokens: int) -> None:
        """Prepare an end for graphs of this size, 0 without graphs; `open` comes before a step."""
        self._max_graph_tokens = max_graph_tokens
        self._group: dist.ProcessGroup | None = None
        self._kept_1TH: Tensor

    def open(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Exchange the first number: NCCL takes its memory before a KV cache takes the rest."""
        self._group = group
        self._exchange_first(torch.zeros(1, device=device))

    def _exchange_first(self, number: Tensor) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing: the group is open as long as the process."""

    def _keep(self, hidden_1TH: Tensor) -> None:
        """Allocate the place for graphs. Each graph is computed once before it is recorded."""
        if self._max_graph_tokens and not hasattr(self, "_kept_1TH"):
            self._kept_1TH = hidden_1TH.new_empty((1, self._max_graph_tokens, hidden_1TH.shape[-1]))

    def _kept_of(self, num_tokens: int) -> Tensor:
        return self._kept_1TH[:, :num_tokens]


class DeviceReceiver(_DeviceEnd):
    """HiddenReceiver whose device receives, in the order of its work."""

    def _exchange_first(self, number: Tensor) -> None:
        dist.recv(number, group=self._group, group_src=_FIRST)

    def receive(self, hidden: Tensor) -> None:
        """See HiddenReceiver. The device waits, and not the host."""
        if torch.cuda.is_current_stream_capturing():
            hidden.copy_(self._kept_of(hidden.shape[1]))
            return
        self._keep(hidden)
        dist.recv(hidden, group=self._group, group_src=_FIRST)

    def receive_for_graph(self, num_tokens: int) -> None:
        self.receive(self._kept_of(num_tokens))


class DeviceSender(_DeviceEnd):
    """HiddenSender whose device sends, in the order of its work."""

    def __init__(self, max_graph_tokens: int) -> None:
        super().__init__(max_graph_tokens)
        self._under_way: deque[tuple[Tensor, dist.Work]] = deque()

    def _exchange_first(self, number: Tensor) -> None:
        self._begin(number)

    def send(self, hidden: Tensor) -> None:
        """See HiddenSender. The device waits for the last but one; `hidden` must not be changed any more."""
        if torch.cuda.is_current_stream_capturing():
            self._kept_of(hidden.shape[1]).copy_(hidden)
            return
        self._keep(hidden)
        self._wait_for_earlier()
        self._begin(hidden)

    def _wait_for_earlier(self) -> None:
        """Wait for the last but one, and free it."""
        while len(self._under_way) >= _MOST_UNDER_WAY:
            _, earlier = self._under_way.popleft()
            earlier.wait()

    def _begin(self, numbers: Tensor) -> None:
        work = dist.isend(numbers, group=self._group, group_dst=_SECOND)
        assert work is not None, "this rank is in the group"
        self._under_way.append((numbers, work))

    def send_from_graph(self, num_tokens: int) -> None:
        self._wait_for_earlier()  # before the copy, so that there are never three
        self.send(self._kept_of(num_tokens).clone())


class _HostReceiver(NamedTuple):
    """HiddenReceiver through the memory of the host."""

    way: HiddenReceiver

    def receive(self, hidden: Tensor) -> None:
        """See HiddenReceiver. The host waits."""
        on_host = torch.empty(hidden.shape, dtype=hidden.dtype)
        self.way.receive(on_host)
        hidden.copy_(on_host)

    def close(self) -> None:
        self.way.close()


class _HostSender(NamedTuple):
    """HiddenSender through the memory of the host."""

    way: HiddenSender

    def send(self, hidden: Tensor) -> None:
        """See HiddenSender. The host waits for the device."""
        self.way.send(hidden.cpu())

    def close(self) -> None:
        self.way.close()


def through_host(stage: Stage) -> Stage:
    """Bring hidden states of a device to the ways of a stage, which are the host's."""
    return replace(
        stage,
        inlet=None if stage.inlet is None else _HostReceiver(stage.inlet),
        outlet=None if stage.outlet is None else _HostSender(stage.outlet),
    )


def around_graph(
    inlet: DeviceReceiver | None, outlet: DeviceSender | None
) -> Callable[[int], AbstractContextManager[None]]:
    """Make the context of a graph, by its number of tokens: receive before it, and send behind it."""

    @contextmanager
    def around(num_tokens: int) -> Iterator[None]:
        with torch.inference_mode():
            if inlet is not None:
                inlet.receive_for_graph(num_tokens)
            yield
            if outlet is not None:
                outlet.send_from_graph(num_tokens)

    return around
