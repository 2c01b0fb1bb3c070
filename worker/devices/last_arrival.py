"""The last of several programs of a kernel to arrive, which puts together what all have left.

Owns: the count of arrivals, and its order with what is left.
Never: what is left, or how it is put together.
Source: split-K products (Stream-K, arXiv:2301.03598).
"""

import triton
import triton.language as tl


@triton.jit
def is_last_arrival(arrivals, num_programs) -> tl.tensor:
    """Tell whether all others have left their part; clears the counter then for the next launch.

    What they have left is not to be read from the cache of this processor.
    """
    # All threads have stored their part before one of them says so.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals, 1, sem="acq_rel") == num_programs - 1
    tl.store(arrivals, 0, mask=is_last)
    return is_last
