"""Memory that interpreted kernels may touch: that of the tensors that they were given, and no other.

Owns: the bounds of the launch that is carried out.
Never: when it is (lazy_queues.py).

The interpreter takes addresses as they come. One that was computed from a number that is not there yet would
end the process, or change what has nothing to do with it; a GPU says so, sometimes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder

from tests.worker.gpu.lazy_memory import Piece


class Reach:
    """Patched into the interpreter, it lets kernels of the host through as they are."""

    def __init__(self) -> None:
        self._starts: Any = None
        self._ends: Any = None

    def install(self, patch: pytest.MonkeyPatch) -> None:
        builder, reach = InterpreterBuilder, self
        load, store = builder.create_masked_load, builder.create_masked_store
        add, swap = builder.create_atomic_rmw, builder.create_atomic_cas

        def checked_load(this: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
            reach.check(ptrs.data, mask.data)
            return load(this, ptrs, mask, *rest)

        def checked_store(this: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            reach.check(ptrs.data, mask.data)
            return store(this, ptrs, value, mask, *rest)

        def checked_add(this: Any, operation: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            reach.check(ptrs.data, mask.data)
            return add(this, operation, ptrs, value, mask, *rest)

        def checked_swap(this: Any, ptrs: Any, *rest: Any) -> Any:
            reach.check(ptrs.data, np.ones_like(ptrs.data, dtype=bool))
            return swap(this, ptrs, *rest)

        patch.setattr(builder, "create_masked_load", checked_load)
        patch.setattr(builder, "create_masked_store", checked_store)
        patch.setattr(builder, "create_atomic_rmw", checked_add)
        patch.setattr(builder, "create_atomic_cas", checked_swap)

    @contextmanager
    def limited_to(self, pieces: Sequence[Piece]) -> Iterator[None]:
        bounds = sorted(
            {(each.content.ctypes.data, each.content.ctypes.data + len(each.content)) for each in pieces}
        )
        self._starts, self._ends = np.array(bounds, np.uint64).T
        try:
            yield
        finally:
            self._starts = self._ends = None

    def check(self, addresses: Any, mask: Any) -> None:
        if self._starts is None:
            return
        touched = np.broadcast_to(addresses, mask.shape)[mask].astype(np.uint64)
        found = np.searchsorted(self._starts, touched, side="right")
        outside = (found == 0) | (touched >= self._ends[found - 1])
        if outside.any():
            raise RuntimeError("an illegal memory access was encountered")
