"""A rank's stage of a pipeline: which layers it has, and how hidden states come and go.

Owns: the division of layers, and a one-way channel for hidden states over memory that two processes share.
Source: pipeline parallelism as in GPipe, arXiv:1811.06965, for inference.

A channel has places for pieces. The sender fills one and sends its length over a socket; the receiver empties
it and sends a byte back. Both sleep in the system while they wait, and end with an error when the other does.
"""

import mmap
import socket
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from worker.ranks.places import PAGE_BYTES, PipeEnd

_NUM_PIECES = 4
_PIECE_BYTES = PAGE_BYTES // _NUM_PIECES
_LENGTH_BYTES = 8


class HiddenSender(Protocol):
    """Sender of hidden states to the next stage."""

    def send(self, hidden: Tensor) -> None:
        """Send hidden states; wait while the next stage has not taken the ones before."""

    def close(self) -> None: ...


class HiddenReceiver(Protocol):
    """Receiver of hidden states from the stage before."""

    def receive(self, hidden: Tensor) -> None:
        """Wait for hidden states of the same size, and write them to `hidden`."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of `count`, as one rank sees it."""

    index: int
    count: int
    inlet: HiddenReceiver | None = None
    outlet: HiddenSender | None = None
    sampled: deque[list[int]] = field(default_factory=deque)
    """Tokens of steps, on a rank that does not sample: they come with a later plan."""
    head_layers: float = 0.0
    """Number of layers that the output layer, which the last stage has too, counts for."""
    around_graph: Callable[[int], AbstractContextManager[None]] = lambda _num_tokens: nullcontext()
    """Context by a graph's number of tokens: receive before it, send behind it; graphs do not record that."""

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def close(self) -> None:
        """Close both ways."""
        for end in (self.inlet, self.outlet):
            if end is not None:
                end.close()

    def layers_of(self, num_layers: int) -> range:
        """Return this stage's layers, divided so that the slowest stage has as few as possible.

        The first stages have one more where they are uneven.
        """
        num_before = self.count - 1
        if num_before == 0 or num_layers < self.count:  # too few are refused where they are counted
            return range(num_layers) if self.is_last else range(0)

        def slowest(num_last: int) -> float:
            return max(-(-(num_layers - num_last) // num_before), num_last + self.head_layers)

        num_last = min(range(1, num_layers - num_before + 1), key=slowest)
        if self.is_last:
            return range(num_layers - num_last, num_layers)
        size, rest = divmod(num_layers - num_last, num_before)
        start = self.index * size + min(self.index, rest)
        return range(start, start + size + (self.index < rest))

    def node_of(self, num_nodes: int) -> range:
        """Return all stages of which some ranks are on the node of this one."""
        num_own = max(1, self.count // num_nodes)
        first = self.index // num_own * num_own
        return range(first, first + num_own)


ONLY_STAGE = Stage(0, 1)


class _SharedEnd:
    def __init__(self, end: PipeEnd) -> None:
        """Map the memory behind the end, whose descriptors belong to this object from now on."""
        self._socket = socket.socket(fileno=end.socket)
        self._page = mmap.mmap(end.page, PAGE_BYTES)
        self._pieces = torch.frombuffer(self._page, dtype=torch.uint8).view(_NUM_PIECES, _PIECE_BYTES)
        self._num_moved = 0

    def close(self) -> None:
        self._socket.close()

    def _next_piece(self) -> Tensor:
        piece = self._pieces[self._num_moved % _NUM_PIECES]
        self._num_moved += 1
        return piece


class SharedSender(_SharedEnd):
    """HiddenSender over memory that two processes share."""

    def __init__(self, end: PipeEnd) -> None:
        super().__init__(end)
        self._num_free = _NUM_PIECES

    def send(self, hidden: Tensor) -> None:
        for part in pieces_of(hidden, _PIECE_BYTES):
            if self._num_free == 0:
                self._num_free += len(_received(self._socket, 1))
            self._num_free -= 1
            self._next_piece()[: len(part)] = part
            self._socket.sendall(len(part).to_bytes(_LENGTH_BYTES, "little"))


class SharedReceiver(_SharedEnd):
    """HiddenReceiver over memory that two processes share."""

    def receive(self, hidden: Tensor) -> None:
        for part in pieces_of(hidden, _PIECE_BYTES):
            length = int.from_bytes(_received(self._socket, _LENGTH_BYTES), "little")
            if length != len(part):
                raise ValueError(f"stages do not compute the same: {length} bytes came for {len(part)}")
            part.copy_(self._next_piece()[:length])
            self._socket.sendall(b".")


def pieces_of(hidden: Tensor, num_bytes: int) -> tuple[Tensor, ...]:
    """Cut the bytes of hidden states into pieces of at most `num_bytes`, which share their memory."""
    assert hidden.is_contiguous()
    return torch.split(hidden.view(-1).view(torch.uint8), num_bytes)


def _received(from_peer: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = from_peer.recv(count - len(found))
        if not part:
            raise ConnectionError("the next or the last stage has ended")
        found += part
    return found
