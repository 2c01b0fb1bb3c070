"""Streams of one GPU in torch.cuda.

Owns: the calls of torch.cuda.
Never: decides which stream waits for which (copy_streams.py).
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from worker.devices.copy_streams import StreamEvent, Streams


class CudaStream:
    """Stream of torch.cuda."""

    def __init__(self, find: Callable[[], torch.cuda.Stream]) -> None:
        """Take in `find`, which returns the stream at each call: each thread has a current one."""
        self._find = find

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """See Stream. The tensors live as long as the process: torch need not track their use."""
        with torch.cuda.stream(self._find()):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def record(self) -> StreamEvent:
        new_event: Any = torch.cuda.Event  # torch leaves its constructor untyped
        event: torch.cuda.Event = new_event()
        event.record(self._find())
        return event

    def wait(self, event: StreamEvent) -> None:
        self._find().wait_event(cast("torch.cuda.Event", event))  # `record` gave it


def open_streams(torch_device: torch.device) -> Streams:
    """Open streams for copies, and find the one that computes."""
    new_stream: Any = torch.cuda.Stream  # its constructor is untyped, too
    copying = [new_stream(torch_device) for _ in Streams._fields[1:]]
    return Streams(
        CudaStream(lambda: torch.cuda.current_stream(torch_device)),
        *(CudaStream(lambda stream=stream: stream) for stream in copying),  # type: ignore[misc]
    )
