"""Memory of a lazy device, and pinned memory of its host: two pieces of the address space, handed out.

Owns: who has which bytes, what becomes of them when nobody in Python holds them any more, the limit.
Never: when they are overwritten (lazy_driver.py).

As in torch's allocator, bytes that are given back go to whoever asks next on the stream that they were
allocated on, without waiting for any other stream. Bytes of a graph's pool go to the next capture.
"""

import mmap
import weakref
from bisect import insort
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

POISON = 0xFF
"""Not a number in every floating type; -1 as an integer, which interpreted kernels can add to an address."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_ALIGNMENT = 512
_NOBODY = "nobody's"


class Piece:
    """Bytes that somebody has, or had."""

    def __init__(self, start: int, content: Bytes, home: Hashable) -> None:
        self.start = start
        self.content = content
        self.home = home
        """Home to which it goes back: a stream, or the pool of graphs."""
        self.users: set[int] = set()
        """Other streams that were told with record_stream."""
        self._seen: dict[torch.dtype, Tensor] = {}

    def seen_as(self, dtype: torch.dtype) -> Tensor:
        """Its bytes, for whoever carries out work: nobody is held by this."""
        if dtype not in self._seen:
            self._seen[dtype] = torch.from_numpy(self.content).view(dtype)
        return self._seen[dtype]


class Arena:
    """One kind of memory."""

    def __init__(self, num_bytes: int) -> None:
        self._bytes = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        self._start: int = self._bytes.ctypes.data
        self._free: dict[Hashable, list[tuple[int, int]]] = {_NOBODY: [(0, num_bytes)]}
        self._pieces: dict[int, Piece] = {}
        self.abandoned: deque[Piece] = deque()
        """Pieces that are not held any more and not given back yet. Filled by any thread, at any time."""
        self.total_bytes = self.limit_bytes = num_bytes
        self.held_bytes = self.peak_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that no stream and no graph has taken."""
        return sum(size for _, size in self._free[_NOBODY]) - (self.total_bytes - self.limit_bytes)

    def holds(self, tensor: Tensor) -> bool:
        return 0 <= tensor.untyped_storage().data_ptr() - self._start < self.total_bytes

    def piece_of(self, tensor: Tensor) -> Piece:
        return self._pieces[tensor.untyped_storage().data_ptr() - self._start]

    def take(self, num_bytes: int, home: Hashable) -> tuple[Tensor, Piece]:
        """Take `num_bytes`, good as long as the tensor or a view of it is held. They are not cleared."""
        size = max(-(-num_bytes // _ALIGNMENT), 1) * _ALIGNMENT
        start = self._find(size, home)
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        piece = self._pieces[start] = Piece(start, self._bytes[start : start + size], home)
        owner = self._bytes[start : start + size]
        weakref.finalize(owner, self.abandoned.append, piece).atexit = False
        return torch.from_numpy(owner)[:num_bytes], piece

    def give_back(self, piece: Piece) -> None:
        del self._pieces[piece.start]
        size = len(piece.content)
        self.held_bytes -= size
        _insert(self._free.setdefault(piece.home, []), piece.start, size)

    def release(self, homes: Iterable[Hashable]) -> None:
        """Give homes up: their free pieces go to the next that asks."""
        for home in homes:
            for start, size in self._free.pop(home, ()):
                _insert(self._free.setdefault(_NOBODY, []), start, size)

    def homes(self) -> list[Hashable]:
        return [home for home in self._free if home != _NOBODY]

    def free_in(self, home: Hashable) -> list[Bytes]:
        """Pieces that are free there at present."""
        return [self._bytes[start : start + size] for start, size in self._free.get(home, ())]

    def _find(self, size: int, home: Hashable) -> int:
        for owner in (home, _NOBODY):
            if owner == home or self.free_bytes >= size:
                free = self._free.get(owner, [])
                fitting = min(
                    (each for each in free if each[1] >= size), key=lambda each: each[1], default=None
                )
                if fitting is not None:
                    free.remove(fitting)
                    start, found = fitting
                    if found > size:
                        # What is left over stays where it was found.
                        insort(free, (start + size, found - size))
                    return start
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {size / (1 << 20):.2f} MiB. "
            f"GPU 1 has a total capacity of {self.limit_bytes / (1 << 20):.2f} MiB"
        )


def _insert(free: list[tuple[int, int]], start: int, size: int) -> None:
    """Neighbours become one."""
    insort(free, (start, size))
    merged: list[tuple[int, int]] = []
    for start, size in free:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((start, size))
    free[:] = merged
