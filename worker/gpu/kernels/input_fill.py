"""The completion of a step's inputs on the device: tokens unknown to the host, and packed block tables.

Owns: the last token sampled for each row, on its way from one step to the next.
Never: samples it (token_draw.py), or decides which step may begin before it is known (the scheduler).

Shapes: T tokens, N logits wanted, C rows of the worker and one more of no sequence, R sequences, B
blocks of the longest table that there may be.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256
_TABLE_BLOCK = 1024


def fill_unknown_tokens(input_ids_1T: Tensor, rows_T: Tensor, last_token_C: Tensor) -> None:
    """Put the last token of its row wherever input_ids_1T is -1, in place.

    input_ids_1T and last_token_C are int64, rows_T is int32; all contiguous. Where a token is known, its row
    is not read.
    """
    num_tokens = input_ids_1T.numel()
    _fill_kernel[(triton.cdiv(num_tokens, _BLOCK),)](
        input_ids_1T, rows_T, last_token_C, num_tokens, BLOCK=_BLOCK
    )


def remember_tokens(last_token_C: Tensor, rows_N: Tensor, token_ids_N: Tensor) -> None:
    """Keep sampled tokens for `fill_unknown_tokens`; rows are distinct, but for the row of no sequence.

    last_token_C and token_ids_N are int64, rows_N is int32 and may be longer; all contiguous.
    """
    num_tokens = len(token_ids_N)
    assert len(rows_N) >= num_tokens
    _remember_kernel[(triton.cdiv(num_tokens, _BLOCK),)](
        last_token_C, rows_N, token_ids_N, num_tokens, BLOCK=_BLOCK
    )


def spread_tables(packed: Tensor, width_1: Tensor, tables_RB: Tensor) -> None:
    """Copy R lines of the width in width_1 to where lines of B are read; the rest of a line stays.

    All are int32. packed is flat, and holds R lines of any width up to B.
    """
    num_sequences, most_blocks = tables_RB.shape
    _spread_kernel[(num_sequences, triton.cdiv(most_blocks, _TABLE_BLOCK))](
        packed, width_1, tables_RB, tables_RB.stride(0), BLOCK=_TABLE_BLOCK
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _fill_kernel(input_ids, rows, last_tokens, num_tokens, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = places < num_tokens
    token_ids = tl.load(input_ids + places, mask=is_there, other=0)
    is_unknown = is_there & (token_ids < 0)
    row = tl.load(rows + places, mask=is_unknown, other=0)
    tl.store(input_ids + places, tl.load(last_tokens + row, mask=is_unknown, other=0), mask=is_unknown)


@triton.jit(do_not_specialize=["num_tokens"])
def _remember_kernel(last_tokens, rows, token_ids, num_tokens, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = places < num_tokens
    row = tl.load(rows + places, mask=is_there, other=0)
    tl.store(last_tokens + row, tl.load(token_ids + places, mask=is_there, other=0), mask=is_there)


@triton.jit
def _spread_kernel(packed, width, tables, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    num_blocks = tl.load(width)
    is_there = places < num_blocks
    block_ids = tl.load(packed + row * num_blocks + places, mask=is_there, other=0)
    tl.store(tables + row * stride + places, block_ids, mask=is_there)
