"""Paged attention for sequences with any number of tokens in the step.

Owns: the cut of the tokens into blocks, and which program takes which.
Source: the blocks follow vLLM's Triton attention (arXiv:2511.11581), the programs that take them one after
another FlashAttention-3 (arXiv:2407.08608). Its results are defined by worker/attention/ref_attention.py.

    tokens     | sequence 0          | sequence 1 | 2    | padding |
    blocks     | B tokens | B | less | B | less   | less | less    |

The grid is as large as the device. Each program takes the next free block and head, from the end,
until there is none.

Shapes: T tokens, R sequences, Hq query heads, and those of attention_tiles.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.attention.interface import AttentionOptions
from worker.attention.kv_cache import LayerCache
from worker.gpu.kernels.attention_tiles import (
    AttentionTiles,
    HeadGroups,
    attend_tiles,
    find_line,
    first_seen,
    head_groups,
    layer_constants,
    load_queries,
    pages,
    pick_tiles,
    score_scale,
    store_attended,
)
from worker.gpu.kernels.attention_work import AttentionWork, find_listed, load_ends, load_prefill

# By the bytes of the widest row, up to and including. From 64 rows on, products use the instructions of
# whole warp groups. Compiled within shared memory and registers; others were not measured.
_TILES = {
    128: AttentionTiles(num_rows=128, num_keys=64, num_warps=8, num_stages=5),
    256: AttentionTiles(num_rows=128, num_keys=64, num_warps=8, num_stages=5),
    512: AttentionTiles(num_rows=64, num_keys=32, num_warps=8, num_stages=3),
    1024: AttentionTiles(num_rows=32, num_keys=32, num_warps=8, num_stages=2),
    2048: AttentionTiles(num_rows=32, num_keys=16, num_warps=8, num_stages=2),
}
# No tensor core multiplies float32 exactly; without them, larger tiles do not fit into registers.
_FLOAT32_TILES = {
    512: AttentionTiles(num_rows=32, num_keys=32, num_warps=8, num_stages=1),
    4096: AttentionTiles(num_rows=16, num_keys=16, num_warps=8, num_stages=1),
}

_PROGRAMS_PER_PROCESSOR = 2
"""Programs that the smallest tiles let run side by side. One that begins late finds nothing left."""
_SEQUENCES_AT_ONCE = 512


def prefill_tiles(shape: HeadGroups, dtype: torch.dtype) -> AttentionTiles:
    """Pick the tiles of prefills, by pick_tiles."""
    return pick_tiles(_TILES, _FLOAT32_TILES, shape, dtype)


def attend_prefills(
    queries_THD: Tensor,
    cache: LayerCache,
    work: AttentionWork,
    options: AttentionOptions,
    out_THV: Tensor,
) -> None:
    """Attend for all sequences behind the decodes; tokens that belong to none get zeros.

    Where the host does not know the decodes, they are left to attend_decodes all the same. queries_THD has
    any strides, but its last is 1; out_THV is contiguous.
    """
    batch = work.batch
    shape = head_groups(queries_THD, cache)
    tiles = prefill_tiles(shape, queries_THD.dtype)
    heads_per_program = min(shape.num_groups, tiles.num_rows)
    tokens_per_program = tiles.num_rows // heads_per_program
    head_parts = triton.cdiv(shape.num_groups, heads_per_program)
    most_blocks = batch.num_tokens // tokens_per_program + batch.num_sequences - batch.num_decodes + 1
    num_programs = min(
        _PROGRAMS_PER_PROCESSOR * work.num_processors, most_blocks * shape.num_kv_heads * head_parts
    )
    keys, values = pages(cache, shape)
    tables_CB = batch.block_tables_SCB[cache.stripe]
    prefill_kernel[(num_programs,)](
        queries_THD, out_THV, keys, values,
        work.list_prefills(tokens_per_program), work.counters,
        tables_CB, batch.table_rows_R, batch.query_starts_R, batch.seq_lens_R, options.sinks,
        batch.ends_seen(options.lifetime), batch.num_tokens, batch.num_sequences, batch.num_decodes,
        *queries_THD.stride()[:2], keys.stride(0), tables_CB.stride(0), score_scale(options),
        **layer_constants(shape, keys, options, queries_THD.dtype),
        VALUE_ROW=cache.values.blocks_NHSD.stride(2),
        KV_HEADS=shape.num_kv_heads, NUM_ROWS=tiles.num_rows, NUM_KEYS=tiles.num_keys,
        HEADS=heads_per_program, PARTS=head_parts, TOKENS=tokens_per_program,
        SEQUENCES_AT_ONCE=_SEQUENCES_AT_ONCE,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "first_sequence", "table_stride"])
def prefill_kernel(
    queries, out, keys, values, listed, counters, tables, table_rows, query_starts, seq_lens, sinks,
    picture_ends, num_tokens, num_sequences, first_sequence,
    query_token_stride, query_head_stride, block_stride, table_stride, scale,
    NUM_GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_ROW: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    WORDS: tl.constexpr, KV_HEADS: tl.constexpr, NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr,
    HEADS: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr, SEQUENCES_AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """One program: blocks of TOKENS tokens of a sequence and HEADS query heads, while there are any.

    A KV head has PARTS such groups of query heads.
    """
    HEAD_GROUPS: tl.constexpr = KV_HEADS * PARTS
    most_listed = num_sequences - first_sequence + 1
    num_listed, num_blocks = tl.load(listed), tl.load(listed + 1)
    item = tl.atomic_add(counters, 1)
    while item < num_blocks * HEAD_GROUPS:
        # From the end: later tokens see more keys, and the longest work should not begin last.
        block = num_blocks - 1 - item // HEAD_GROUPS
        head = item % HEAD_GROUPS
        zero = tl.minimum(item, 0)  # see _attend_block
        ends_L = load_ends(listed + zero, most_listed, SEQUENCES_AT_ONCE)
        place = find_listed(listed, num_listed, ends_L, block, SEQUENCES_AT_ONCE)
        first_block, sequence = load_prefill(listed, most_listed, place)
        _attend_block(
            queries, out, keys, values, tables, table_rows, query_starts, seq_lens, sinks, picture_ends,
            sequence, block - first_block, head, num_tokens, num_sequences,
            query_token_stride, query_head_stride, block_stride, table_stride, scale, zero,
            NUM_GROUPS, KEY_DIM, VALUE_DIM, VALUE_ROW, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, WINDOW, CHUNK,
            SOFTCAP, WORDS, KV_HEADS, NUM_ROWS, NUM_KEYS, HEADS, PARTS, TOKENS,
        )  # fmt: skip
        item = tl.atomic_add(counters, 1)
    # The last program to finish resets the counters for the next launch.
    if tl.atomic_add(counters + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counters, 0)
        tl.store(counters + 1, 0)


@triton.jit
def _attend_block(
    queries, out, keys, values, tables, table_rows, query_starts, seq_lens, sinks, picture_ends,
    sequence, block, head, num_tokens, num_sequences,
    query_token_stride, query_head_stride, block_stride, table_stride, scale, zero,
    NUM_GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_ROW: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, WORDS: tl.constexpr,
    KV_HEADS: tl.constexpr, NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr,
    HEADS: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    """Attend for the TOKENS tokens of one of a sequence's blocks, and HEADS query heads of one KV head."""
    is_sequence = sequence < num_sequences
    start = tl.load(query_starts + sequence)
    end_token = tl.where(
        is_sequence, tl.load(query_starts + sequence + 1, mask=is_sequence, other=0), num_tokens
    )
    # Padding has a length of 0, and so neither a first key nor an end.
    seq_len = tl.load(seq_lens + sequence, mask=is_sequence, other=0)
    first_token = start + block * TOKENS
    NUM: tl.constexpr = 2 if WORDS else 1
    kv_head = head // PARTS
    # The compiler does not know that `zero` is 0. If it did, it would hoist cheap terms out of the
    # caller's loop and run out of registers.
    rows_M = tl.arange(0, NUM_ROWS) + zero
    groups_M = head % PARTS * HEADS + rows_M % HEADS
    heads_M = kv_head * NUM_GROUPS + groups_M
    tokens_M = first_token + rows_M // HEADS
    is_row_M = (rows_M < TOKENS * HEADS) & (tokens_M < end_token) & (groups_M < NUM_GROUPS)
    queries_MD = load_queries(
        queries, tokens_M, heads_M, is_row_M, query_token_stride, query_head_stride, KEY_DIM, KEY_WIDTH,
        NUM,
    )  # fmt: skip
    first_position = tl.maximum(seq_len - (end_token - first_token), 0)
    positions_M = first_position + rows_M // HEADS
    lasts_M, end_key = _last_seen(picture_ends, tokens_M, is_row_M, positions_M, first_position + TOKENS)
    sums_MV, totals_M, peaks_M = _attend(
        queries_MD, positions_M, lasts_M,
        keys + kv_head * (BLOCK_SIZE * (KEY_DIM // NUM)),
        values + kv_head * (BLOCK_SIZE * (VALUE_ROW // NUM)),
        tables + find_line(table_rows, tl.where(is_sequence, sequence, 0)) * table_stride,
        block_stride, scale,
        first_position, tl.minimum(end_key, seq_len),
        KEY_DIM, VALUE_DIM, VALUE_ROW, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP, WORDS,
        NUM_ROWS, NUM_KEYS,
    )  # fmt: skip
    store_attended(
        out, sums_MV, totals_M, peaks_M, sinks, tokens_M, heads_M, KV_HEADS * NUM_GROUPS, is_row_M,
        VALUE_DIM, VALUE_WIDTH,
    )  # fmt: skip


@triton.jit
def _last_seen(picture_ends, tokens_M, is_row_M, positions_M, end_key) -> tl.tuple:
    """Return the last place that each row sees, in its picture or its own, and the end of all."""
    if picture_ends is None:
        return positions_M, end_key
    else:
        ends_M = tl.load(picture_ends + tokens_M, mask=is_row_M, other=0)
        return tl.maximum(positions_M, ends_M - 1), tl.maximum(end_key, tl.max(ends_M, axis=0))


@triton.jit
def _attend(
    queries_MD, positions_M, lasts_M, keys, values, table, block_stride, scale, first_position, end_key,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_ROW: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    WORDS: tl.constexpr, NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr,
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
            sums_MV, totals_M, peaks_M, queries_MD, positions_M, lasts_M,
            keys, values, table, block_stride, scale, first_key, end_key, first_key // NUM_KEYS, full_tile,
            KEY_DIM, VALUE_DIM, VALUE_ROW, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP, WORDS,
            NUM_KEYS, MASKED=True,
        )  # fmt: skip
    sums_MV, totals_M, peaks_M = attend_tiles(
        sums_MV, totals_M, peaks_M, queries_MD, positions_M, lasts_M,
        keys, values, table, block_stride, scale, first_key, end_key, full_tile, edge_tile,
        KEY_DIM, VALUE_DIM, VALUE_ROW, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP, WORDS,
        NUM_KEYS, MASKED=False,
    )  # fmt: skip
    return attend_tiles(
        sums_MV, totals_M, peaks_M, queries_MD, positions_M, lasts_M,
        keys, values, table, block_stride, scale, first_key, end_key, edge_tile, end_tile,
        KEY_DIM, VALUE_DIM, VALUE_ROW, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP, WORDS,
        NUM_KEYS, MASKED=True,
    )  # fmt: skip
