"""Paged attention for sequences with one token in the step, cut evenly among the programs.

Owns: the cut of all tiles of keys into one share for each program, and the split-K
reduction of the parts of a sequence.
Source: Flash-Decoding (split softmax), with Stream-K's cut (arXiv:2301.03598). Its results are defined by
worker/attention/ref_attention.py.

The grid is as large as the device, whatever may come: programs take equal shares of the tiles that there are.

    tiles      | sequence 3, head 0 | head 1 | sequence 5, head 0                                   | ...
    programs   | 0         | 1         | 2         | 3         | 4         | 5         | 6         |

A program that has a sequence and head whole writes the result. Otherwise it stores partial sums, and the
last program to finish a sequence and head combines the parts of all, always in the same order. A program
stores two parts at most: the end of a head that another began, and the beginning of the next.

Shapes: L sequences of the list, Hq query heads, P programs, and those of attention_tiles.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.attention.interface import AttentionOptions
from worker.attention.kv_cache import LayerCache
from worker.devices.dependent_launch import launch_way, wait_first, warm_l2, warm_way
from worker.devices.last_arrival import is_last_arrival
from worker.gpu.kernels.attention_tiles import (
    AttentionTiles,
    HeadGroups,
    attend_tiles,
    first_seen,
    head_groups,
    layer_constants,
    load_queries,
    pages,
    pick_tiles,
    score_scale,
    side,
    store_attended,
    store_rows,
)
from worker.gpu.kernels.attention_work import AttentionWork, find_listed, load_decode, load_ends

# By the bytes of the widest row, up to and including; a KV head of fewer query heads has fewer rows. Compiled
# within shared memory and registers; measured for heads of 128 numbers of 16 bits, estimates for others.
_TILES = {
    128: AttentionTiles(num_rows=64, num_keys=64, num_warps=4, num_stages=5),
    256: AttentionTiles(num_rows=64, num_keys=64, num_warps=4, num_stages=5),
    512: AttentionTiles(num_rows=32, num_keys=32, num_warps=4, num_stages=3),
    1024: AttentionTiles(num_rows=16, num_keys=32, num_warps=8, num_stages=2),
    2048: AttentionTiles(num_rows=16, num_keys=16, num_warps=4, num_stages=2),
}
# No tensor core multiplies float32 exactly; without them, larger tiles do not fit into registers.
_FLOAT32_TILES = {
    1024: AttentionTiles(num_rows=16, num_keys=32, num_warps=8, num_stages=1),
    4096: AttentionTiles(num_rows=16, num_keys=16, num_warps=8, num_stages=1),
}
# As many as registers let run side by side, so that all of them begin at once. Each has 80 KiB on its way;
# 30 in all keep the memory busy.
_PROGRAMS_PER_PROCESSOR = 2
_PARTS_AT_ONCE = 16
_MOST_HEADS_AT_ONCE = 4
_NUMBERS_AT_ONCE = 8192
"""Numbers of parts that are combined at once: an eighth of a processor's registers."""
_PART_TAIL = tl.constexpr(4)
"""Behind the sums of a row: its total, its peak, and two numbers that keep rows at multiples of 16 bytes."""
_SEQUENCES_AT_ONCE = 512


def decode_tiles(shape: HeadGroups, dtype: torch.dtype) -> AttentionTiles:
    """Pick the tiles of decodes, by pick_tiles."""
    tiles = pick_tiles(_TILES, _FLOAT32_TILES, shape, dtype)
    return tiles._replace(num_rows=min(side(shape.num_groups), tiles.num_rows))


def most_programs(num_processors: int) -> int:
    """Count the programs of a launch that serves."""
    return _PROGRAMS_PER_PROCESSOR * num_processors


def attend_decodes(
    queries_THD: Tensor,
    cache: LayerCache,
    work: AttentionWork,
    options: AttentionOptions,
    out_THV: Tensor,
) -> None:
    """Attend for the batch's decodes; where the host does not know them, for all sequences with one token.

    Padding among the decodes gets zeros if the host knows their number. queries_THD has any
    strides, but its last is 1; out_THV is contiguous.
    """
    batch = work.batch
    shape = head_groups(queries_THD, cache)
    tiles = decode_tiles(shape, queries_THD.dtype)
    heads_per_program = min(shape.num_groups, tiles.num_rows)
    num_programs = most_programs(work.num_processors)
    listed = work.list_decodes(options.lifetime, tiles.num_keys)
    # In a captured graph these are its own memory, which layers use one after another.
    parts = out_THV.new_empty(
        (2 * num_programs, heads_per_program, shape.value_dim + _PART_TAIL.value), dtype=torch.float32
    )
    keys, values = pages(cache, shape)
    tables_CB = batch.block_tables_SCB[cache.stripe]
    decode_kernel[(num_programs,)](
        queries_THD, out_THV, parts, work.arrivals, keys, values,
        listed, tables_CB, options.sinks, batch.num_decodes or batch.num_sequences,
        *queries_THD.stride()[:2], keys.stride(0), tables_CB.stride(0), score_scale(options),
        **layer_constants(shape, keys, options, queries_THD.dtype),
        VALUE_ROW=cache.values.blocks_NHSD.stride(2),
        KV_HEADS=shape.num_kv_heads, NUM_ROWS=tiles.num_rows, NUM_KEYS=tiles.num_keys,
        HEADS=heads_per_program, PARTS=triton.cdiv(shape.num_groups, heads_per_program),
        HEADS_AT_ONCE=_heads_at_once(heads_per_program, shape.widths[1]), PARTS_AT_ONCE=_PARTS_AT_ONCE,
        SEQUENCES_AT_ONCE=_SEQUENCES_AT_ONCE,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **warm_way(), **launch_way(),
    )  # fmt: skip


def _heads_at_once(num_heads: int, value_width: int) -> int:
    """Count the query heads whose parts are combined at once: a power of two, as registers allow."""
    room = max(1, _NUMBERS_AT_ONCE // (_PARTS_AT_ONCE * value_width))
    return min(_MOST_HEADS_AT_ONCE, room, 1 << (num_heads - 1).bit_length())


@triton.jit(do_not_specialize=["most_listed", "table_stride"])
def decode_kernel(
    queries, out, parts, arrivals, keys, values, listed, tables, sinks,
    most_listed, query_token_stride, query_head_stride, block_stride, table_stride, scale,
    NUM_GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_ROW: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, WORDS: tl.constexpr,
    KV_HEADS: tl.constexpr, NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr,
    HEADS: tl.constexpr, PARTS: tl.constexpr, HEADS_AT_ONCE: tl.constexpr, PARTS_AT_ONCE: tl.constexpr,
    SEQUENCES_AT_ONCE: tl.constexpr, warmed_ptr, warmed_bytes, WARMERS: tl.constexpr, WAITS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: its share of all tiles. Those without a share bring memory into the cache.

    HEADS query heads of a KV head, which has PARTS such, go together: that is a head below. Its tiles stand
    behind those of the head before, all of a sequence together.
    """
    wait_first(WAITS)
    HEAD_GROUPS: tl.constexpr = KV_HEADS * PARTS
    # One wait for all three.
    num_listed, num_units = tl.load(listed), tl.load(listed + 1)
    ends_L = load_ends(listed, most_listed, SEQUENCES_AT_ONCE)
    num_tiles = num_units.to(tl.int64) * HEAD_GROUPS
    share = tl.maximum(tl.cdiv(num_tiles, tl.num_programs(0)), 1)
    here = tl.program_id(0) * share
    end = tl.minimum(here + share, num_tiles)
    if here >= end:
        if WARMERS > 0:
            first_idle = tl.cdiv(num_tiles, share).to(tl.int32)
            num_idle = tl.num_programs(0) - first_idle
            warm_l2(warmed_ptr, warmed_bytes, tl.program_id(0) - first_idle, num_idle)
        return
    place = find_listed(listed, num_listed, ends_L, here // HEAD_GROUPS, SEQUENCES_AT_ONCE)
    while here < end:
        first_unit, tiles_each, token, seq_len, line = load_decode(listed, most_listed, place)
        start = first_unit.to(tl.int64) * HEAD_GROUPS
        head = ((here - start) // tiles_each).to(tl.int32)
        passed = ((here - start) % tiles_each).to(tl.int32)
        num_now = tl.minimum((end - here).to(tl.int32), tiles_each - passed)

        _attend_part(
            queries, out, parts, arrivals, keys, values, tables + line.to(tl.int64) * table_stride, sinks,
            token, seq_len, head, passed, num_now, (here - passed) // share,
            (here - passed + tiles_each - 1) // share,
            query_token_stride, query_head_stride, block_stride, scale,
            NUM_GROUPS, KEY_DIM, VALUE_DIM, VALUE_ROW, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, WINDOW, CHUNK,
            SOFTCAP, WORDS, KV_HEADS, NUM_ROWS, NUM_KEYS, HEADS, PARTS, HEADS_AT_ONCE, PARTS_AT_ONCE,
        )  # fmt: skip
        here += num_now
        place += (passed + num_now == tiles_each) & (head == HEAD_GROUPS - 1)


@triton.jit
def _attend_part(
    queries, out, parts, arrivals, keys, values, table, sinks,
    token, seq_len, head, passed, num_tiles, first_program, last_program,
    query_token_stride, query_head_stride, block_stride, scale,
    NUM_GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_ROW: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, WORDS: tl.constexpr,
    KV_HEADS: tl.constexpr, NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr,
    HEADS: tl.constexpr, PARTS: tl.constexpr, HEADS_AT_ONCE: tl.constexpr, PARTS_AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """Attend to `num_tiles` of a sequence's and head's tiles, which first_program to last_program share."""
    NUM: tl.constexpr = 2 if WORDS else 1
    kv_head = head // PARTS
    rows_M = tl.arange(0, NUM_ROWS)
    groups_M = head % PARTS * HEADS + rows_M
    heads_M = kv_head * NUM_GROUPS + groups_M
    is_row_M = (rows_M < HEADS) & (groups_M < NUM_GROUPS)
    tokens_M = rows_M * 0 + token
    queries_MD = load_queries(
        queries, tokens_M, heads_M, is_row_M, query_token_stride, query_head_stride, KEY_DIM, KEY_WIDTH,
        NUM,
    )  # fmt: skip
    first_key = first_seen(seq_len - 1, WINDOW, CHUNK)
    positions_M = rows_M * 0 + (seq_len - 1)
    sums_MV, totals_M, peaks_M = attend_tiles(
        tl.zeros([NUM_ROWS, VALUE_WIDTH], dtype=tl.float32), tl.zeros([NUM_ROWS], dtype=tl.float32),
        tl.full([NUM_ROWS], float("-inf"), dtype=tl.float32), queries_MD, positions_M, positions_M,
        keys + kv_head * (BLOCK_SIZE * (KEY_DIM // NUM)),
        values + kv_head * (BLOCK_SIZE * (VALUE_ROW // NUM)),
        table, block_stride, scale,
        first_key, seq_len, first_key // NUM_KEYS + passed, first_key // NUM_KEYS + passed + num_tiles,
        KEY_DIM, VALUE_DIM, VALUE_ROW, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP, WORDS,
        NUM_KEYS, MASKED=True,
    )  # fmt: skip
    if first_program == last_program:
        store_attended(
            out, sums_MV, totals_M, peaks_M, sinks, tokens_M, heads_M, KV_HEADS * NUM_GROUPS, is_row_M,
            VALUE_DIM, VALUE_WIDTH,
        )  # fmt: skip
    else:
        _leave_part(parts, sums_MV, totals_M, peaks_M, is_row_M, passed == 0, HEADS, VALUE_DIM, VALUE_WIDTH)
        first_head = kv_head * NUM_GROUPS + head % PARTS * HEADS
        num_parts = (last_program - first_program + 1).to(tl.int32)
        if is_last_arrival(arrivals + first_program, num_parts):
            _put_together(
                out, parts, sinks, token, first_head,
                tl.minimum(HEADS, (kv_head + 1) * NUM_GROUPS - first_head), KV_HEADS * NUM_GROUPS,
                first_program.to(tl.int32), num_parts,
                HEADS, VALUE_DIM, VALUE_WIDTH, HEADS_AT_ONCE, PARTS_AT_ONCE,
            )  # fmt: skip


@triton.jit
def _leave_part(
    parts, sums_MV, totals_M, peaks_M, is_row_M, is_first,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Store this program's partial sums of a sequence and its heads: the first part, or a later one."""
    slot = tl.program_id(0) * 2 + is_first
    part_M = parts + (slot * HEADS + tl.arange(0, is_row_M.shape[0])) * (VALUE_DIM + _PART_TAIL)
    tl.store(part_M + VALUE_DIM, totals_M, mask=is_row_M)
    tl.store(part_M + VALUE_DIM + 1, peaks_M, mask=is_row_M)
    store_rows(part_M, sums_MV, is_row_M, VALUE_DIM, VALUE_WIDTH)


@triton.jit
def _put_together(
    out, parts, sinks, token, first_head, num_heads, all_heads, first_program, num_parts,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr, PARTS_AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """Split-K reduction of a sequence and `num_heads` query heads: combine the parts of several programs."""
    columns_V = tl.arange(0, VALUE_WIDTH)
    # One head after the other would wait for memory as often as there are heads.
    for first_row in range(0, num_heads, HEADS_AT_ONCE):
        rows_M = first_row + tl.arange(0, HEADS_AT_ONCE)
        is_row_M = rows_M < num_heads
        sums_MV = tl.zeros([HEADS_AT_ONCE, VALUE_WIDTH], dtype=tl.float32)
        totals_M = tl.zeros([HEADS_AT_ONCE], dtype=tl.float32)
        peaks_M = tl.full([HEADS_AT_ONCE], float("-inf"), dtype=tl.float32)
        # What the compiler would take out of this loop, it would keep in registers while keys are read.
        for first in tl.range(0, num_parts, PARTS_AT_ONCE, disable_licm=True):
            parts_S = first + tl.arange(0, PARTS_AT_ONCE)
            # The first is what its program began, the others are what their programs ended, or are all of it.
            slots_S = (first_program + parts_S) * 2 + (parts_S == 0)
            # Parts stand before heads: so a thread has all parts of its numbers, and adds them by itself.
            part_SM = parts + (slots_S[:, None] * HEADS + rows_M[None, :]) * (VALUE_DIM + _PART_TAIL)
            is_part_SM = (parts_S < num_parts)[:, None] & is_row_M[None, :]
            is_part_SMV = is_part_SM[:, :, None] & (columns_V < VALUE_DIM)[None, None, :]
            # Others have written them: not to be read from the cache of this processor.
            totals_SM = tl.load(part_SM + VALUE_DIM, mask=is_part_SM, other=0.0, cache_modifier=".cg")
            peaks_SM = tl.load(
                part_SM + VALUE_DIM + 1, mask=is_part_SM, other=float("-inf"), cache_modifier=".cg"
            )
            sums_SMV = tl.load(
                part_SM[:, :, None] + columns_V[None, None, :],
                mask=is_part_SMV,
                other=0.0,
                cache_modifier=".cg",
            )
            higher_M = tl.maximum(peaks_M, tl.max(peaks_SM, axis=0))
            base_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)
            weights_SM = tl.exp2(peaks_SM - base_M[None, :])
            shrink_M = tl.exp2(peaks_M - base_M)
            totals_M = totals_M * shrink_M + tl.sum(totals_SM * weights_SM, axis=0)
            sums_MV = sums_MV * shrink_M[:, None] + tl.sum(sums_SMV * weights_SM[:, :, None], axis=0)
            peaks_M = higher_M
        store_attended(
            out, sums_MV, totals_M, peaks_M, sinks, rows_M * 0 + token, first_head + rows_M, all_heads,
            is_row_M, VALUE_DIM, VALUE_WIDTH,
        )  # fmt: skip
