"""Split-K reduction: the last program to finish a tile sums the partial results of all.

Source: split-K products (Stream-K, arXiv:2301.03598).
"""

import triton
import triton.language as tl


@triton.jit
def is_last_arrival(arrivals, num_programs) -> tl.tensor:
    """Tell whether all other programs have stored their results; clears the counter then for the next launch.

    Their results are not to be read from the cache of this processor.
    """
    # All threads store their part before one of them counts the program.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals, 1, sem="acq_rel") == num_programs - 1
    tl.store(arrivals, 0, mask=is_last)
    return is_last
