"""Few tokens of a row, with all of the heaviest among them.

Source: a tournament: the k greatest of a row are in the blocks with the k greatest maxima.

Shapes: none; a program has one row.
"""

import triton
import triton.language as tl

from worker.gpu.sampling_kernels.token_weights import LEAST_LOG
from worker.gpu.sampling_kernels.truncation import CAPACITY

BLOCK = tl.constexpr(128)
"""Logits of which the maximum is known."""
_NUM_BLOCKS_AT_ONCE = tl.constexpr(32)
_NUM_FOLLOWED = tl.constexpr(192)
"""The fewest of the greatest maxima that are followed; at most twice as many are."""


@triton.jit
def _find_bound(maxima, peak, temperature):
    """Find a logit that _NUM_FOLLOWED maxima reach, or fewer where no lower one can be sampled."""
    low = peak - LEAST_LOG * temperature
    high = peak
    num_low = tl.sum((maxima >= low).to(tl.int32), axis=0)
    # Equal maxima cannot be distinguished: their tokens are too many to be listed, then.
    num_left = tl.full((), 24, tl.int32)
    while (num_low > 2 * _NUM_FOLLOWED) & (num_left > 0):
        middle = low + (high - low) * 0.5
        num_middle = tl.sum((maxima >= middle).to(tl.int32), axis=0)
        if num_middle >= _NUM_FOLLOWED:
            low = middle
            num_low = num_middle
        else:
            high = middle
        num_left -= 1
    return low


@triton.jit
def list_candidates(  # noqa: ANN201 - a pair of numbers
    line_logits,
    maxima,
    peak,
    temperature,
    num_tokens,
    num_blocks,
    blocks,
    values,
    ids,
    ALL_BLOCKS: tl.constexpr,
):
    """Write the greatest logits and their ids, in order; returns their number and a bound below all.

    There may be more than CAPACITY; then they are not all written. `blocks` is memory for the blocks.
    """
    places = tl.arange(0, ALL_BLOCKS)
    of_blocks = tl.load(maxima + places, mask=places < num_blocks, other=-float("inf"))
    bound = _find_bound(of_blocks, peak, temperature)
    is_followed = of_blocks >= bound
    tl.store(blocks + tl.cumsum(is_followed.to(tl.int32), axis=0) - 1, places, mask=is_followed)
    # The other threads of the program read what this one has written.
    tl.debug_barrier()
    num_followed = tl.sum(is_followed.to(tl.int32), axis=0)
    offsets = tl.arange(0, _NUM_BLOCKS_AT_ONCE * BLOCK)
    num = tl.full((), 0, tl.int32)
    for start in range(0, num_followed, _NUM_BLOCKS_AT_ONCE):
        nth = start + offsets // BLOCK
        block = tl.load(blocks + nth, mask=nth < num_followed, other=0)
        token_ids = block * BLOCK + offsets % BLOCK
        is_there = (nth < num_followed) & (token_ids < num_tokens)
        x = tl.load(line_logits + token_ids, mask=is_there, other=-float("inf")).to(tl.float32)
        reaches = x >= bound
        targets = num + tl.cumsum(reaches.to(tl.int32), axis=0) - 1
        fits = reaches & (targets < CAPACITY)
        tl.store(values + targets, x, mask=fits)
        tl.store(ids + targets, token_ids, mask=fits)
        num += tl.sum(reaches.to(tl.int32), axis=0)
    tl.debug_barrier()
    return num, bound
