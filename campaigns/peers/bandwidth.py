"""Memory bandwidth of this machine now: no decode step can be faster than reading the weights.

Owns: the measurement: every thread sums an array of its own that no cache holds, all at once.
Never: a figure from a data sheet.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_BYTES = 256 << 20  # of each thread
_NUM_PASSES = 5


def read_bandwidth(num_threads: int) -> float:
    """Bytes per second of streaming reads by `num_threads` threads: the best of a few passes."""
    arrays = [np.ones(_BYTES // 8, dtype=np.int64) for _ in range(num_threads)]
    best = 0.0
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in range(_NUM_PASSES):
            start_s = time.perf_counter()
            # numpy lets go of the interpreter lock while it sums.
            list(threads.map(np.add.reduce, arrays))
            best = max(best, num_threads * _BYTES / (time.perf_counter() - start_s))
    return best
