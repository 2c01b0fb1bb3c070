"""Paged attention for sequences with one token in the step, cut into segments of keys.

Owns: the cut into segments, so that few long sequences keep a whole GPU busy, and putting them together.
Never: the walk over keys (attention_tiles.py).
Source: Flash-Decoding (split softmax). Its results are defined by worker/attention/ref_attention.py.

The number of segments is fixed by counts that the host knows, so that a captured graph can be replayed with
sequences of any length; where a segment begins is found on the device. There a sequence is cut only as far as
the device needs for work, or the longest segment allows: a graph has room for the longest sequence that may
come, and most are shorter. Segments that a sequence does not need return at once, and the reduction does not
look at them. One segment, if it is enough for all, is the result.

Shapes: R sequences, Hq query heads, S segments, and those of attention_tiles.py.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.attention.interface import AttentionOptions
from worker.attention.kv_cache import LayerCache
from worker.gpu.device_batch import AttentionBatch
from worker.gpu.kernels.attention_tiles import (
    LOG2_E,
    AttentionTiles,
    HeadGroups,
    attend_tiles,
    first_seen,
    head_groups,
    layer_constants,
    load_queries,
    pick_tiles,
    score_scale,
    side,
    store_attended,
    store_rows,
)

_LOG2_E = tl.constexpr(LOG2_E)
# By the bytes of the widest row, up to and including; a KV head of fewer query heads has fewer rows. Compiled
# within shared memory and registers; speed was estimated, not measured.
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
# Two programs for nearly all of an H100's 132 processors: one computes while the other's keys come.
# A few more would give 32 sequences of 8 KV heads a second segment, and a reduction, for nothing.
_ENOUGH_PROGRAMS = 256
# However many sequences there are, one that is much longer than the others should not be waited for ...
_LONGEST_SEGMENT = 8192
# ... but programs without work cost time as well, and each needs room for its sums.
_MOST_PROGRAMS = 32768
_MOST_SEGMENTS = 128
_SEGMENTS_AT_ONCE = 16


class SegmentLengths(NamedTuple):
    """The constants above, as far as they decide the number of segments."""

    enough_programs: int
    longest_segment: int


class DecodeChoices(NamedTuple):
    """Choices for the speed of decodes, not for their results; campaigns/gpu/tune measures them."""

    tiles: AttentionTiles
    lengths: SegmentLengths


class _Segments(NamedTuple):
    """The sums of each segment, relative to its peak."""

    sums_RHSV: Tensor
    totals_RHS: Tensor
    peaks_RHS: Tensor


def decode_tiles(shape: HeadGroups, dtype: torch.dtype) -> AttentionTiles:
    """See pick_tiles."""
    tiles = pick_tiles(_TILES, _FLOAT32_TILES, shape, dtype)
    return tiles._replace(num_rows=min(side(shape.num_groups), tiles.num_rows))


def decode_choices(shape: HeadGroups, dtype: torch.dtype) -> DecodeChoices:
    """Return the choices for serving."""
    return DecodeChoices(decode_tiles(shape, dtype), _lengths())


def _lengths() -> SegmentLengths:
    return SegmentLengths(_ENOUGH_PROGRAMS, _LONGEST_SEGMENT)


def count_segments(
    num_programs: int, most_keys: int, num_keys: int, lengths: SegmentLengths | None = None
) -> int:
    """Count the segments of each sequence.

    `num_programs` is the number of programs without a cut, `most_keys` the most keys that a token sees,
    `num_keys` the keys of a tile.
    """
    lengths = lengths or _lengths()
    to_fill_device = _count_to_fill_device(num_programs, lengths)
    to_cut_longest = -(-most_keys // lengths.longest_segment)
    most = min(_MOST_SEGMENTS, _MOST_PROGRAMS // num_programs, -(-most_keys // num_keys))
    return max(1, min(max(to_fill_device, to_cut_longest), most))


def tiles_per_segment(num_programs: int, num_segments: int, num_tiles: int) -> int:
    """Count the tiles that the kernel gives to a segment of a sequence of `num_tiles`; counts as above."""
    wanted = -(-num_tiles // _count_to_fill_device(num_programs, _lengths()))
    return max(1, -(-num_tiles // num_segments), wanted)


def _count_to_fill_device(num_programs: int, lengths: SegmentLengths) -> int:
    return -(-lengths.enough_programs // num_programs)


def attend_decodes(
    queries_THD: Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    options: AttentionOptions,
    out_THV: Tensor,
    choices: DecodeChoices | None = None,
) -> None:
    """Attend for the batch's decodes; where the host does not know them, for all sequences with one token.

    Tokens of padding among the first so many get zeros. queries_THD has any strides, but its last is 1;
    out_THV is contiguous.
    """
    num_decodes = batch.num_decodes or batch.num_sequences
    shape = head_groups(queries_THD, cache)
    tiles, lengths = choices or decode_choices(shape, queries_THD.dtype)
    heads_per_program = min(shape.num_groups, tiles.num_rows)
    head_parts = triton.cdiv(shape.num_groups, heads_per_program)
    programs_per_decode = shape.num_kv_heads * head_parts
    most_keys = min(batch.max_seq_len, options.reach.most_tokens or batch.max_seq_len)
    num_segments = count_segments(num_decodes * programs_per_decode, most_keys, tiles.num_keys, lengths)
    segments = _make_segments(num_decodes, num_segments, out_THV) if num_segments > 1 else None
    keys, values = cache.keys.blocks_NHSD, cache.values.blocks_NHSD
    constants = layer_constants(shape, cache, options)
    cut = {
        "WINDOW": constants.pop("WINDOW"),
        "CHUNK": constants.pop("CHUNK"),
        "NUM_KEYS": tiles.num_keys,
        "MOST_TILES": max(1, lengths.longest_segment // tiles.num_keys),
    }
    num_wanted = _count_to_fill_device(num_decodes * programs_per_decode, lengths)
    decode_kernel[num_decodes, programs_per_decode, num_segments](
        queries_THD, out_THV, *(segments or (None, None, None)), keys, values,
        batch.block_tables_RB, batch.query_starts_R, batch.seq_lens_R, options.sinks, batch.num_sequences,
        *queries_THD.stride()[:2], keys.stride(0), batch.block_tables_RB.stride(0), score_scale(options),
        num_wanted, **constants, **cut,
        NUM_ROWS=tiles.num_rows, HEADS=heads_per_program, PARTS=head_parts,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if segments is not None:
        reduce_kernel[num_decodes, out_THV.shape[1]](
            out_THV, *segments,
            batch.query_starts_R, batch.seq_lens_R, options.sinks, batch.num_sequences, num_segments,
            num_wanted, VALUE_DIM=shape.value_dim, VALUE_WIDTH=shape.widths[1], **cut,
            SEGMENTS_WIDTH=side(num_segments), AT_ONCE=_SEGMENTS_AT_ONCE,
        )  # fmt: skip


def _make_segments(num_decodes: int, num_segments: int, out_THV: Tensor) -> _Segments:
    """Allocate segments: in a captured graph from its own memory, which layers use one after another."""
    _, num_heads, value_dim = out_THV.shape
    places = (num_decodes, num_heads, num_segments)
    return _Segments(
        out_THV.new_empty((*places, value_dim), dtype=torch.float32),
        out_THV.new_empty(places, dtype=torch.float32),
        out_THV.new_empty(places, dtype=torch.float32),
    )


@triton.jit(do_not_specialize=["num_sequences", "table_stride", "num_wanted"])
def decode_kernel(
    queries, out, segment_sums, segment_totals, segment_peaks, keys, values, tables, query_starts, seq_lens,
    sinks, num_sequences, query_token_stride, query_head_stride, block_stride, table_stride, scale,
    num_wanted, NUM_GROUPS: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr, MOST_TILES: tl.constexpr,
) -> None:  # fmt: skip
    """One program: one segment of a sequence, and HEADS query heads of one KV head, which has PARTS such."""
    sequence = tl.program_id(0)
    segment = tl.program_id(2)
    token = _find_token(sequence, query_starts, num_sequences)
    seq_len = tl.load(seq_lens + sequence)
    first_tile, end_tile, tiles_per_segment = _cut(
        seq_len, tl.num_programs(2), num_wanted, WINDOW, CHUNK, NUM_KEYS, MOST_TILES
    )
    first_tile += segment * tiles_per_segment
    if (token < 0) | ((segment_sums is not None) & (first_tile >= end_tile)):
        return

    kv_head = tl.program_id(1) // PARTS
    num_heads = tl.num_programs(1) // PARTS * NUM_GROUPS
    rows_M = tl.arange(0, NUM_ROWS)
    groups_M = tl.program_id(1) % PARTS * HEADS + rows_M
    heads_M = kv_head * NUM_GROUPS + groups_M
    is_row_M = (rows_M < HEADS) & (groups_M < NUM_GROUPS)
    tokens_M = rows_M * 0 + token
    queries_MD = load_queries(
        queries, tokens_M, heads_M, is_row_M, query_token_stride, query_head_stride, KEY_DIM, KEY_WIDTH
    )
    sums_MV, totals_M, peaks_M = attend_tiles(
        tl.zeros([NUM_ROWS, VALUE_WIDTH], dtype=tl.float32), tl.zeros([NUM_ROWS], dtype=tl.float32),
        tl.full([NUM_ROWS], float("-inf"), dtype=tl.float32), queries_MD, rows_M * 0 + (seq_len - 1),
        keys + kv_head * (BLOCK_SIZE * KEY_DIM), values + kv_head * (BLOCK_SIZE * VALUE_DIM),
        tables + sequence.to(tl.int64) * table_stride, block_stride, scale,
        first_seen(seq_len - 1, WINDOW, CHUNK), seq_len,
        first_tile, tl.minimum(first_tile + tiles_per_segment, end_tile),
        KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP,
        NUM_KEYS, MASKED=True,
    )  # fmt: skip
    if segment_sums is None:
        store_attended(
            out, sums_MV, totals_M, peaks_M, sinks, tokens_M, heads_M, num_heads, is_row_M,
            VALUE_DIM, VALUE_WIDTH,
        )  # fmt: skip
    else:
        places_M = (sequence.to(tl.int64) * num_heads + heads_M) * tl.num_programs(2) + segment
        tl.store(segment_totals + places_M, totals_M, mask=is_row_M)
        tl.store(segment_peaks + places_M, peaks_M, mask=is_row_M)
        store_rows(segment_sums + places_M * VALUE_DIM, sums_MV, is_row_M, VALUE_DIM, VALUE_WIDTH)


@triton.jit(do_not_specialize=["num_sequences", "most_segments", "num_wanted"])
def reduce_kernel(
    out, segment_sums, segment_totals, segment_peaks, query_starts, seq_lens, sinks,
    num_sequences, most_segments, num_wanted,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    NUM_KEYS: tl.constexpr, MOST_TILES: tl.constexpr, SEGMENTS_WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """One program: put the segments of one sequence and query head together."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    token = _find_token(sequence, query_starts, num_sequences)
    if token < 0:
        return
    seq_len = tl.load(seq_lens + sequence)
    first_tile, end_tile, per_segment = _cut(
        seq_len, most_segments, num_wanted, WINDOW, CHUNK, NUM_KEYS, MOST_TILES
    )
    num_segments = tl.cdiv(end_tile - first_tile, per_segment)

    place = (sequence.to(tl.int64) * tl.num_programs(1) + head) * most_segments
    segments_S = tl.arange(0, SEGMENTS_WIDTH)
    is_there_S = segments_S < num_segments
    peaks_S = tl.load(segment_peaks + place + segments_S, mask=is_there_S, other=float("-inf"))
    totals_S = tl.load(segment_totals + place + segments_S, mask=is_there_S, other=0.0)
    peak = tl.max(peaks_S, axis=0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2_E
        peak = tl.maximum(peak, sink)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(totals_S * tl.exp2(peaks_S - peak), axis=0)
    if sinks is not None:
        total += tl.exp2(sink - peak)

    columns_V = tl.arange(0, VALUE_WIDTH)
    sums_V = tl.zeros([VALUE_WIDTH], dtype=tl.float32)
    for first in range(0, num_segments, AT_ONCE):
        some_S = first + tl.arange(0, AT_ONCE)
        is_one_S = some_S < num_segments
        some_peaks_S = tl.load(segment_peaks + place + some_S, mask=is_one_S, other=float("-inf"))
        sums_SV = tl.load(
            segment_sums + ((place + some_S) * VALUE_DIM)[:, None] + columns_V[None, :],
            mask=is_one_S[:, None] & (columns_V < VALUE_DIM)[None, :],
            other=0.0,
        )
        sums_V += tl.sum(sums_SV * tl.exp2(some_peaks_S - peak)[:, None], axis=0)
    out_V = sums_V / tl.where(total == 0.0, 1.0, total)
    row = out + (token.to(tl.int64) * tl.num_programs(1) + head) * VALUE_DIM
    tl.store(row + columns_V, out_V.to(out.dtype.element_ty), mask=columns_V < VALUE_DIM)


@triton.jit
def _cut(
    seq_len, num_segments, num_wanted, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    NUM_KEYS: tl.constexpr, MOST_TILES: tl.constexpr,
):  # fmt: skip
    """The tiles with keys that the sequence's last token sees, and how many of them a segment takes.

    Into num_wanted segments, or more if these had more than MOST_TILES; at most num_segments in any case.
    """
    first_tile = first_seen(seq_len - 1, WINDOW, CHUNK) // NUM_KEYS
    end_tile = tl.cdiv(seq_len, NUM_KEYS)
    num_tiles = end_tile - first_tile
    wanted = tl.minimum(tl.cdiv(num_tiles, num_wanted), MOST_TILES)
    return first_tile, end_tile, tl.maximum(tl.maximum(tl.cdiv(num_tiles, num_segments), wanted), 1)


@triton.jit
def _find_token(sequence, query_starts, num_sequences):
    """Look up the sequence's token.

    Padding without one has the token of its own number where that is padding too. It is -1 where that token
    belongs to a sequence, and for sequences of several tokens.
    """
    start = tl.load(query_starts + sequence)
    num_tokens = tl.load(query_starts + sequence + 1) - start
    is_padding = (num_tokens == 0) & (sequence >= tl.load(query_starts + num_sequences))
    return tl.where(num_tokens == 1, start, tl.where(is_padding, sequence, -1))
