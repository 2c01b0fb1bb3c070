"""Sums that kernels ask for and that Python code exchanges.

Owns: the C function that the kernels call, and the end of the process where the exchange fails: a layer
cannot be left, and any other end would be wrong tokens.
Never: exchanges anything itself.
"""

import ctypes
import logging
import os
from collections.abc import Callable

import torch
from torch import Tensor

from worker.ranks.ranks import Reducer

log = logging.getLogger(__name__)

_Reduce = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class CalledReducer:
    """Lives as long as kernels may call it."""

    def __init__(self, reduce: Callable[[Tensor], None]) -> None:
        """Let `reduce` replace the sums, float32 numbers of any count, by those of all ranks."""
        self._reduce = reduce
        self._function = _Reduce(self._reduce_at)
        function = ctypes.cast(self._function, ctypes.c_void_p).value
        assert function is not None
        self.reducer = Reducer(function, None)

    def _reduce_at(self, _context: int | None, address: int, count: int) -> None:
        try:
            numbers = (ctypes.c_float * count).from_address(address)
            self._reduce(torch.frombuffer(numbers, dtype=torch.float32))
        except BaseException:
            log.critical("a rank cannot exchange sums with the others, and ends", exc_info=True)
            os.abort()
