"""Copies of KV blocks within the device's pool, many in one launch.

Blocks are moved as 8-byte words, whatever they hold.

Shapes: N blocks of E numbers, P pairs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD_BYTES = 8
_BLOCK = 2048


# Where the targets begin depends on the number of pairs: no step should wait for a second compilation.
@triton.jit(do_not_specialize_on_alignment=["sources_ptr", "targets_ptr"])
def _copy_kernel(pool_ptr, sources_ptr, targets_ptr, num_words, BLOCK: tl.constexpr):
    source = tl.load(sources_ptr + tl.program_id(1)).to(tl.int64)
    if source < 0:
        return
    target = tl.load(targets_ptr + tl.program_id(1)).to(tl.int64)
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = words < num_words
    moved = tl.load(pool_ptr + source * num_words + words, mask=mask)
    tl.store(pool_ptr + target * num_words + words, moved, mask=mask)


def copy_blocks(pool_NE: Tensor, sources_P: Tensor, targets_P: Tensor) -> None:
    """Copy whole rows of the pool, in place: row sources_P[p] to row targets_P[p]; a source of -1 is no pair.

    No target may be the source or the target of another pair: they are copied in any order.
    Raises nothing: rows are not checked, so one out of range corrupts memory. Raises ValueError for
    rows that are no whole number of 8-byte words.
    """
    row_bytes = pool_NE.shape[1] * pool_NE.element_size()
    if row_bytes % WORD_BYTES:
        raise ValueError(f"blocks of {row_bytes} bytes are no whole number of {WORD_BYTES}-byte words")
    if not len(sources_P):
        return
    words_NW = pool_NE.view(torch.int64)
    num_words = words_NW.shape[1]
    _copy_kernel[(triton.cdiv(num_words, _BLOCK), len(sources_P))](
        words_NW, sources_P, targets_P, num_words, BLOCK=_BLOCK, num_warps=8
    )
