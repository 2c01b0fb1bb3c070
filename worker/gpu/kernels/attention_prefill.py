"""Paged attention for sequences with any number of tokens in the step.

Owns: the cut of the tokens into programs.
Never: the walk over keys (attention_tiles.py).
Source: the grid whose size the host knows, and each program's search for its sequence, follow vLLM's
Triton attention (arXiv:2511.11581). Its results are defined by worker/attention/ref_attention.py.

    tokens     | sequence 0          | sequence 1 | 2          | padding |
    programs   | B tokens | B | less | B | less   | less | -   | less    |    -: finds nothing to do

Sequence r begins at program query_starts[r] // B + r, counted from the first sequence that comes here:
room enough for a part of a block at each end, without knowing how long any sequence is.

Shapes: T tokens, R sequences, Hq query heads, and those of attention_tiles.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.attention.interface import AttentionOptions
from worker.attention.kv_cache import LayerCache
from worker.gpu.device_batch import AttentionBatch
from worker.gpu.kernels.attention_tiles import (
    AttentionTiles,
    HeadGroups,
    attend_tiles,
    first_seen,
    head_groups,
    layer_constants,
    load_queries,
    pick_tiles,
    score_scale,
    store_attended,
)

# By the bytes of the widest row, up to and including. From 64 rows on, products use the instructions of
# whole warp groups. Compiled within shared memory and registers; speed was estimated, not measured.
_TILES = {
    128: AttentionTiles(num_rows=128, num_keys=64, num_warps=8, num_stages=5),
    256: AttentionTiles(num_rows=128, num_keys=64, num_warps=8, num_stages=5),
    512: AttentionTiles(num_rows=64, num_keys=64, num_warps=8, num_stages=2),
    1024: AttentionTiles(num_rows=32, num_keys=32, num_warps=8, num_stages=2),
    2048: AttentionTiles(num_rows=32, num_keys=16, num_warps=8, num_stages=2),
}
# No tensor core multiplies float32 exactly; without them, larger tiles do not fit into registers.
_FLOAT32_TILES = {
    512: AttentionTiles(num_rows=32, num_keys=32, num_warps=8, num_stages=1),
    4096: AttentionTiles(num_rows=16, num_keys=16, num_warps=8, num_stages=1),
}

_AT_ONCE = tl.constexpr(512)
"""Sequences that are looked at with one load."""


def prefill_tiles(shape: HeadGroups, dtype: torch.dtype) -> AttentionTiles:
    """See pick_tiles."""
    return pick_tiles(_TILES, _FLOAT32_TILES, shape, dtype)


def attend_prefills(
    queries_THD: Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    options: AttentionOptions,
    out_THV: Tensor,
    tiles: AttentionTiles | None = None,
) -> None:
    """Attend for all sequences behind the decodes; tokens that belong to none get zeros.

    Where the host does not know the decodes, they are left to attend_decodes all the same. queries_THD has
    any strides, but its last is 1; out_THV is contiguous.
    """
    shape = head_groups(queries_THD, cache)
    tiles = tiles or prefill_tiles(shape, queries_THD.dtype)
    heads_per_program = min(shape.num_groups, tiles.num_rows)
    tokens_per_program = tiles.num_rows // heads_per_program
    head_parts = triton.cdiv(shape.num_groups, heads_per_program)
    # One more than the sequences: tokens behind the last count as a sequence of their own.
    num_sequences = batch.num_sequences - batch.num_decodes + 1
    grid = (batch.num_tokens // tokens_per_program + num_sequences, shape.num_kv_heads * head_parts)
    keys, values = cache.keys.blocks_NHSD, cache.values.blocks_NHSD
    prefill_kernel[grid](
        queries_THD, out_THV, keys, values,
        batch.block_tables_RB, batch.query_starts_R, batch.seq_lens_R, options.sinks,
        batch.num_tokens, batch.num_sequences, batch.num_decodes,
        *queries_THD.stride()[:2], keys.stride(0), batch.block_tables_RB.stride(0), score_scale(options),
        **layer_constants(shape, cache, options),
        NUM_ROWS=tiles.num_rows, NUM_KEYS=tiles.num_keys,
        HEADS=heads_per_program, PARTS=head_parts, TOKENS=tokens_per_program,
        LEAVE_DECODES=batch.num_decodes == 0,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "first_sequence", "table_stride"])
def prefill_kernel(
    queries, out, keys, values, tables, query_starts, seq_lens, sinks,
    num_tokens, num_sequences, first_sequence,
    query_token_stride, query_head_stride, block_stride, table_stride, scale,
    NUM_GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr,
    HEADS: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr, LEAVE_DECODES: tl.constexpr,
) -> None:  # fmt: skip
    """One program: TOKENS tokens of a sequence, and HEADS query heads of a KV head, which has PARTS such."""
    # From the end: later tokens see more keys, and the longest work should not begin last.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence, first_token, end_token, seq_len = find_tokens(
        block, query_starts, seq_lens, num_tokens, num_sequences, first_sequence, TOKENS, LEAVE_DECODES
    )
    if first_token >= end_token:
        return

    kv_head = tl.program_id(1) // PARTS
    num_heads = tl.num_programs(1) // PARTS * NUM_GROUPS
    rows_M = tl.arange(0, NUM_ROWS)
    groups_M = tl.program_id(1) % PARTS * HEADS + rows_M % HEADS
    heads_M = kv_head * NUM_GROUPS + groups_M
    tokens_M = first_token + rows_M // HEADS
    is_row_M = (rows_M < TOKENS * HEADS) & (tokens_M < end_token) & (groups_M < NUM_GROUPS)
    queries_MD = load_queries(
        queries, tokens_M, heads_M, is_row_M, query_token_stride, query_head_stride, KEY_DIM, KEY_WIDTH
    )
    # Padding has a length of 0, and so neither a first key nor an end.
    first_position = tl.maximum(seq_len - (end_token - first_token), 0)
    end_key = tl.minimum(first_position + TOKENS, seq_len)
    sums_MV, totals_M, peaks_M = _attend(
        queries_MD, first_position + rows_M // HEADS,
        keys + kv_head * (BLOCK_SIZE * KEY_DIM), values + kv_head * (BLOCK_SIZE * VALUE_DIM),
        tables + sequence.to(tl.int64) * table_stride, block_stride, scale, first_position, end_key,
        KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP, NUM_ROWS, NUM_KEYS,
    )  # fmt: skip
    store_attended(
        out, sums_MV, totals_M, peaks_M, sinks, tokens_M, heads_M, num_heads, is_row_M,
        VALUE_DIM, VALUE_WIDTH,
    )  # fmt: skip


@triton.jit
def _attend(
    queries_MD, positions_M, keys, values, table, block_stride, scale, first_position, end_key,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr,
):  # fmt: skip
    """Walk over all keys that rows from first_position on see, which end before end_key."""
    first_key = first_seen(first_position, WINDOW, CHUNK)
    end_tile = tl.cdiv(end_key, NUM_KEYS)
    # In between are tiles that all rows see whole, for which no mask is made.
    full_tile = tl.minimum(tl.cdiv(first_seen(end_key - 1, WINDOW, CHUNK), NUM_KEYS), end_tile)
    edge_tile = tl.maximum(tl.minimum((first_position + 1) // NUM_KEYS, end_tile), full_tile)
    sums_MV = tl.zeros([NUM_ROWS, VALUE_WIDTH], dtype=tl.float32)
    totals_M = tl.zeros([NUM_ROWS], dtype=tl.float32)
    peaks_M = tl.full([NUM_ROWS], float("-inf"), dtype=tl.float32)
    if (WINDOW > 0) or (CHUNK > 0):
        sums_MV, totals_M, peaks_M = attend_tiles(
            sums_MV, totals_M, peaks_M, queries_MD, positions_M,
            keys, values, table, block_stride, scale, first_key, end_key, first_key // NUM_KEYS, full_tile,
            KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP,
            NUM_KEYS, MASKED=True,
        )  # fmt: skip
    sums_MV, totals_M, peaks_M = attend_tiles(
        sums_MV, totals_M, peaks_M, queries_MD, positions_M,
        keys, values, table, block_stride, scale, first_key, end_key, full_tile, edge_tile,
        KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP,
        NUM_KEYS, MASKED=False,
    )  # fmt: skip
    return attend_tiles(
        sums_MV, totals_M, peaks_M, queries_MD, positions_M,
        keys, values, table, block_stride, scale, first_key, end_key, edge_tile, end_tile,
        KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP,
        NUM_KEYS, MASKED=True,
    )  # fmt: skip


@triton.jit
def find_tokens(
    block, query_starts, seq_lens, num_tokens, num_sequences, first_sequence,
    TOKENS: tl.constexpr, LEAVE_DECODES: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Find a block's sequence, its first token, where the sequence's tokens end, and the sequence's length.

    Sequence num_sequences stands for the padding, with a length of 0.
    """
    # All at once: a search by halves is as many loads that wait for one another, and most programs of a step
    # with many decodes do nothing else.
    offset = tl.load(query_starts + first_sequence) // TOKENS + first_sequence
    low = first_sequence - 1
    for some in range(first_sequence, num_sequences + 1, _AT_ONCE):
        sequences = some + tl.arange(0, _AT_ONCE)
        is_one = sequences <= num_sequences
        starts = tl.load(query_starts + sequences, mask=is_one, other=0)
        begins_before = is_one & (starts // TOKENS + sequences - offset <= block)
        low += tl.sum(begins_before.to(tl.int32), axis=0)
    start = tl.load(query_starts + low)
    is_sequence = low < num_sequences
    end = tl.load(query_starts + low + 1, mask=is_sequence, other=0)
    end = tl.where(is_sequence, end, num_tokens)
    seq_len = tl.load(seq_lens + low, mask=is_sequence, other=0)
    first_token = start + (block - (start // TOKENS + low - offset)) * TOKENS
    if LEAVE_DECODES:
        first_token = tl.where(is_sequence & (end - start == 1), end, first_token)
    return low, first_token, end, seq_len
