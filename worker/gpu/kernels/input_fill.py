"""The completion of a step's inputs on the device: tokens unknown to the host, new blocks of tables.

Shapes: T tokens, N logits wanted, C rows of the worker and one more of no sequence, R sequences, B
blocks of the longest table that there may be (tables have no line for the row of no sequence).
"""

import triton
import triton.language as tl
from torch import Tensor

from worker.gpu.device_batch import TableChanges

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


def change_tables(changes: TableChanges, tables_SCB: Tensor) -> None:
    """Bring the blocks that are new to a step's sequences into their lines; the rest of a line stays."""
    _change_kernel[(len(changes.lines_X),)](*changes, tables_SCB, tables_SCB.stride(1), BLOCK=_TABLE_BLOCK)


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
def _change_kernel(rows, firsts, starts, blocks, tables, stride, BLOCK: tl.constexpr):
    sequence = tl.program_id(0)
    start = tl.load(starts + sequence)
    num_changed = tl.load(starts + sequence + 1) - start
    line = tables + tl.load(rows + sequence).to(tl.int64) * stride + tl.load(firsts + sequence)
    for some in range(0, num_changed, BLOCK):
        places = some + tl.arange(0, BLOCK)
        is_one = places < num_changed
        tl.store(line + places, tl.load(blocks + start + places, mask=is_one, other=0), mask=is_one)
