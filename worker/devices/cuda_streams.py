"""The streams of one GPU, as torch.cuda has them.

Owns: nothing but the calls.
Never: decides what waits for what (copy_streams.py).
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from worker.devices.copy_streams import StreamEvent, Streams


class CudaStream:
    """A Stream."""

    def __init__(self, find: Callable[[], torch.cuda.Stream]) -> None:
        """`find` gives it whenever something is asked: each thread chooses which one is current."""
        self._find = find

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """See Stream. The tensors live as long as the process: torch need not be told who uses them."""
        with torch.cuda.stream(self._find()):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def record(self) -> StreamEvent:
        """See Stream."""
        new_event: Any = torch.cuda.Event  # torch leaves its constructor untyped
        event: torch.cuda.Event = new_event()
        event.record(self._find())
        return event

    def wait(self, event: StreamEvent) -> None:
        """See Stream."""
        self._find().wait_event(cast("torch.cuda.Event", event))  # `record` gave it


def open_streams(torch_device: torch.device) -> Streams:
    """New ones for copies, beside the one that computes."""
    new_stream: Any = torch.cuda.Stream  # its constructor is untyped, too
    copying = [new_stream(torch_device) for _ in Streams._fields[1:]]
    return Streams(
        CudaStream(lambda: torch.cuda.current_stream(torch_device)),
        *(CudaStream(lambda stream=stream: stream) for stream in copying),  # type: ignore[misc]
    )
