"""Memory of large pages, for weights, which every step reads from end to end.

Owns: regions of memory for which the system is asked for large pages, and their division among tensors.
Never: takes a part back: a region, which is for tensors that live long, is freed with the last one in it.
Source: the transparent large pages of Linux (madvise, MADV_HUGEPAGE).
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_PAGE_BYTES = 2 << 20
_LINE_BYTES = 64
_REGION_BYTES = 64 << 20
_MOST_SHARED_BYTES = 4 << 20
"""Larger tensors have a region of their own, which is freed with them."""


class _Region:
    """Memory that begins with a large page. Its last part has small ones, so that none is left unused."""

    def __init__(self, num_bytes: int) -> None:
        """Raises MemoryError."""
        try:
            pages = mmap.mmap(-1, num_bytes + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no memory for {num_bytes} bytes of packed weights") from error
        whole = torch.frombuffer(pages, dtype=torch.uint8)
        first = -whole.data_ptr() % _PAGE_BYTES
        if hasattr(mmap, "MADV_HUGEPAGE") and num_bytes >= _PAGE_BYTES:
            with suppress(OSError):  # a system without them: small pages are right, too
                pages.madvise(mmap.MADV_HUGEPAGE, first, num_bytes // _PAGE_BYTES * _PAGE_BYTES)
        self._left = whole[first : first + num_bytes]

    def take(self, num_bytes: int) -> Tensor | None:
        """Give away the next bytes; None where there are too few."""
        if num_bytes > self._left.numel():
            return None
        taken = self._left[:num_bytes]
        self._left = self._left[-(-num_bytes // _LINE_BYTES) * _LINE_BYTES :]
        return taken


class LargePages:
    """Tensors of zeros, small ones side by side. Not for several threads at once."""

    def __init__(self) -> None:
        self._open: _Region | None = None

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Make zeros, which take no memory before they are written. Raises MemoryError."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes > _MOST_SHARED_BYTES:
            taken = _Region(num_bytes).take(num_bytes)
        else:
            taken = self._open.take(num_bytes) if self._open is not None else None
            if taken is None:
                self._open = _Region(_REGION_BYTES)
                taken = self._open.take(num_bytes)
        assert taken is not None
        return taken.view(dtype).view(shape)


WEIGHTS = LargePages()
"""Memory of packed weights."""
