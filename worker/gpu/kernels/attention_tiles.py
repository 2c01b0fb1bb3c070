"""The common part of the attention kernels: a walk over tiles of paged keys with a running softmax.

Owns: which keys a query sees, reading them through the block table, and the softmax over them.
Source: FlashAttention-2, arXiv:2307.08691, over PagedAttention's blocks, arXiv:2309.06180. What it computes
is defined by worker/attention/ref_attention.py.

A row is one query head of one token. Rows of one KV head stand together, so that all of them use a key
while it is at hand and fill a tensor core's tile. Exponents are to base 2: a GPU has an instruction for it.

Shapes: M rows of a program, K keys of a tile, D key size, V value size; sizes that are no power of two are
filled up to the next with zeros, which are read from nowhere.

Triton compiles a kernel anew for an argument of 1, and for one that is a multiple of 16. Counts that differ
from step to step are kept out of that: no request should wait for a compiler in the middle of service.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.attention.interface import AttentionOptions
from worker.attention.kv_cache import FLOAT8 as FLOAT8_DTYPE
from worker.attention.kv_cache import LayerCache
from worker.gpu.quantized.kernels.numbers import FLOAT8, decode_by_bits, decode_range, goes_by_bits

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
_FLOAT8 = tl.constexpr(FLOAT8)
_ONE_BY_ONE, BY_BITS = 1, 2
"""Values of WORDS, which is 0 where a cache has no words of two numbers."""
_BY_BITS = tl.constexpr(BY_BITS)
# A tensor core's tile has no smaller side.
SMALLEST_SIDE = 16


class AttentionTiles(NamedTuple):
    """The work that one program takes at a time."""

    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int


class HeadGroups(NamedTuple):
    """The heads of one layer, in groups of one key."""

    num_kv_heads: int
    num_groups: int
    """Query heads of one KV head."""
    key_dim: int
    value_dim: int

    @property
    def widths(self) -> tuple[int, int]:
        """Key and value sizes as tiles have them."""
        return side(self.key_dim), side(self.value_dim)


def side(size: int) -> int:
    """The smallest side of a tile that has room for `size`."""
    return max(SMALLEST_SIDE, 1 << (size - 1).bit_length())


def head_groups(queries_THD: Tensor, cache: LayerCache) -> HeadGroups:
    num_kv_heads, _, key_dim = cache.keys.blocks_NHSD.shape[1:]
    return HeadGroups(
        num_kv_heads, queries_THD.shape[1] // num_kv_heads, key_dim, cache.values.blocks_NHSD.shape[-1]
    )


def pick_tiles(
    tiles: dict[int, AttentionTiles],
    float32_tiles: dict[int, AttentionTiles],
    shape: HeadGroups,
    dtype: torch.dtype,
) -> AttentionTiles:
    """Pick the tiles of the smallest limit that the wider of a key and a value row fits into.

    Limits are in bytes. Raises ValueError where even the last one is exceeded.
    """
    row_bytes = max(shape.widths) * dtype.itemsize
    table = float32_tiles if dtype == torch.float32 else tiles
    return table[min(limit for limit in table if row_bytes <= limit)]


def score_scale(options: AttentionOptions) -> float:
    """Return the factor of a product of query and key, see `_squeeze`.

    It is positive: the highest score is found before it is scaled.
    """
    assert options.scaling > 0
    if options.softcap is None:
        return options.scaling * LOG2_E
    return options.scaling * 2 * LOG2_E / options.softcap


def layer_constants(
    shape: HeadGroups, keys: Tensor, options: AttentionOptions, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the constants that kernels are compiled for, by the names of their parameters."""
    return {
        "NUM_GROUPS": shape.num_groups,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "KEY_WIDTH": shape.widths[0],
        "VALUE_WIDTH": shape.widths[1],
        "BLOCK_SIZE": keys.shape[2],
        "WINDOW": options.lifetime.window,
        "CHUNK": options.lifetime.chunk,
        "SOFTCAP": options.softcap or 0.0,
        "WORDS": 0 if keys.dtype is not torch.int16 else BY_BITS if goes_by_bits(dtype) else _ONE_BY_ONE,
    }


def pages(cache: LayerCache, shape: HeadGroups) -> tuple[Tensor, Tensor]:
    """Return keys and values as kernels read them: floats of 8 bits as words of two, if rows allow."""
    keys, values = cache.keys.blocks_NHSD, cache.values.blocks_NHSD
    if keys.dtype is not FLOAT8_DTYPE or min(shape.widths) < 2 * SMALLEST_SIDE:
        return keys, values
    # Behind a layer of odd sizes, in blocks of odd ones, a word would not begin at an even place.
    places = [shape.key_dim, shape.value_dim, *keys.stride()[:3], *values.stride()[:3]]
    places += [int(keys.storage_offset()), int(values.storage_offset())]
    if any(place % 2 for place in places):
        return keys, values
    return keys.view(torch.int16), values.view(torch.int16)


@triton.jit
def first_seen(positions, WINDOW: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """Return the first position that is seen, as Lifetime.first_read; a WINDOW or CHUNK of 0 is none."""
    if CHUNK > 0:
        return tl.maximum(positions, 0) // CHUNK * CHUNK
    elif WINDOW > 0:
        return tl.maximum(positions - (WINDOW - 1), 0)
    else:
        return positions * 0


@triton.jit
def find_line(table_rows, sequence) -> tl.tensor:
    """Find a sequence's line in the block tables: one of its own, unless lines are by rows of the worker."""
    if table_rows is None:
        return sequence.to(tl.int64)
    else:
        return tl.load(table_rows + sequence).to(tl.int64)


@triton.jit
def attend_tiles(
    sums_MV, totals_M, peaks_M, queries, positions_M, lasts_M,
    keys, values, table, block_stride, scale, first_key, end_key, first_tile, end_tile,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_ROW: tl.constexpr, KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr, WORDS: tl.constexpr, NUM_KEYS: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Take the keys of some tiles into a running softmax, and return it.

    It has each row's sum of weighted values, its sum of weights, and its highest score so far, to which they
    are relative. A row sees keys up to lasts_M. `keys` and `values` point to the head's page of block 0. With
    MASKED, nothing outside of first_key to end_key is read, also of the table; without, rows see all keys.
    """
    earliest_M = first_seen(positions_M, WINDOW, CHUNK)
    NUM: tl.constexpr = 2 if WORDS else 1
    sums = _parted(sums_MV, NUM)
    for tile in range(first_tile, end_tile):
        places_K = tile * NUM_KEYS + tl.arange(0, NUM_KEYS)
        is_there_K = (places_K >= first_key) & (places_K < end_key)
        entries_K, offsets_K = _find_in_blocks(tile, NUM_KEYS, BLOCK_SIZE)
        if MASKED:
            blocks_K = tl.load(table + entries_K, mask=is_there_K, other=0)
        else:
            blocks_K = tl.load(table + entries_K)
        starts_K = blocks_K.to(tl.int64) * block_stride
        keys_K = keys + starts_K + offsets_K * (KEY_DIM // NUM)
        scores_MK = _score(queries, keys_K, is_there_K, KEY_DIM, KEY_WIDTH, WORDS, MASKED)
        if SOFTCAP > 0:
            scores_MK = _squeeze(scores_MK * scale, SOFTCAP)
        if MASKED:
            is_seen_MK = is_there_K[None, :] & (places_K[None, :] <= lasts_M[:, None])
            if (WINDOW > 0) or (CHUNK > 0):
                is_seen_MK = is_seen_MK & (places_K[None, :] >= earliest_M[:, None])
            scores_MK = tl.where(is_seen_MK, scores_MK, float("-inf"))

        # Only the highest score is scaled here: for each score that is a part of the subtraction below.
        unit = 1.0 if SOFTCAP > 0 else scale
        higher_M = tl.maximum(peaks_M, tl.max(scores_MK, axis=1) * unit)
        # A row that has seen nothing yet has no peak, and -inf less -inf is no number.
        base_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)
        weights_MK = tl.exp2(scores_MK * unit - base_M[:, None])
        shrink_M = tl.exp2(peaks_M - base_M)
        totals_M = totals_M * shrink_M + tl.sum(weights_MK, axis=1)
        peaks_M = higher_M
        values_K = values + starts_K + offsets_K * (VALUE_ROW // NUM)
        weights_MK = weights_MK.to(queries[0].dtype)
        sums = _add_values(
            sums, shrink_M, weights_MK, values_K, is_there_K, VALUE_DIM, VALUE_WIDTH, WORDS, MASKED
        )
    return _whole(sums, NUM), totals_M, peaks_M


@triton.jit
def _score(
    queries, keys_K, is_there_K, DIM: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Multiply queries and keys: [M, K]."""
    DTYPE: tl.constexpr = queries[0].dtype
    if WORDS:
        words = _load_rows(keys_K, is_there_K, DIM // 2, WIDTH // 2, MASKED)
        even, odd = _numbers_of_words(words, DTYPE, WORDS)
        scores_MK = tl.dot(queries[0], tl.trans(even), input_precision="ieee")
        return tl.dot(queries[1], tl.trans(odd), scores_MK, input_precision="ieee")
    else:
        keys_KD = _load_rows(keys_K, is_there_K, DIM, WIDTH, MASKED)
        return tl.dot(queries[0], tl.trans(keys_KD.to(DTYPE)), input_precision="ieee")


@triton.jit
def _add_values(
    sums, shrink_M, weights_MK, values_K, is_there_K, DIM: tl.constexpr, WIDTH: tl.constexpr,
    WORDS: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Shrink sums, and add weighted values."""
    DTYPE: tl.constexpr = weights_MK.dtype
    if WORDS:
        words = _load_rows(values_K, is_there_K, DIM // 2, WIDTH // 2, MASKED)
        even, odd = _numbers_of_words(words, DTYPE, WORDS)
        first = tl.dot(weights_MK, even, sums[0] * shrink_M[:, None], input_precision="ieee")
        second = tl.dot(weights_MK, odd, sums[1] * shrink_M[:, None], input_precision="ieee")
        return first, second
    else:
        values_KV = _load_rows(values_K, is_there_K, DIM, WIDTH, MASKED).to(DTYPE)  # maybe of one byte
        return (tl.dot(weights_MK, values_KV, sums[0] * shrink_M[:, None], input_precision="ieee"),)


@triton.jit
def _numbers_of_words(words, DTYPE: tl.constexpr, WORDS: tl.constexpr) -> tl.tuple:
    """Return the numbers with even places in a row, and those with odd ones.

    A cache has no NaN: larger numbers are written as the largest.
    """
    if WORDS == _BY_BITS:
        return decode_by_bits(words, _FLOAT8, DTYPE)
    else:
        return decode_range(words, None, 0, _FLOAT8, DTYPE), decode_range(words, None, 1, _FLOAT8, DTYPE)


@triton.jit
def _parted(sums_MV, NUM: tl.constexpr) -> tl.tuple:
    """Split sums into even and odd columns, as words of two numbers hold values."""
    if NUM == 2:
        return tl.split(tl.reshape(sums_MV, [sums_MV.shape[0], sums_MV.shape[1] // 2, 2]))
    else:
        return (sums_MV,)


@triton.jit
def _whole(sums, NUM: tl.constexpr) -> tl.tensor:
    """Join the sums of even and odd columns, which `_parted` split."""
    if NUM == 2:
        return tl.reshape(tl.join(sums[0], sums[1]), [sums[0].shape[0], sums[0].shape[1] * 2])
    else:
        return sums[0]


@triton.jit
def _find_in_blocks(tile, NUM_KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Find the entry of each key's block in the table, and its place in the block."""
    keys_K = tl.arange(0, NUM_KEYS)
    if NUM_KEYS % BLOCK_SIZE == 0:
        # The compiler knows the divisor; a division by an unknown number takes five instructions.
        return tile * (NUM_KEYS // BLOCK_SIZE) + keys_K // BLOCK_SIZE, keys_K % BLOCK_SIZE
    else:
        places_K = tile * NUM_KEYS + keys_K
        return places_K // BLOCK_SIZE, places_K % BLOCK_SIZE


@triton.jit
def load_queries(
    queries, tokens_M, heads_M, is_row_M, token_stride, head_stride,
    KEY_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, NUM: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """[M, D], zero where there is no row; in as many parts as keys have numbers in a word."""
    rows_M = queries + tokens_M.to(tl.int64) * token_stride + heads_M * head_stride
    columns_D = tl.arange(0, KEY_WIDTH // NUM) * NUM
    is_there_MD = is_row_M[:, None] & (columns_D < KEY_DIM)[None, :]
    first = tl.load(rows_M[:, None] + columns_D[None, :], mask=is_there_MD, other=0.0)
    if NUM == 2:
        return first, tl.load(rows_M[:, None] + columns_D[None, :] + 1, mask=is_there_MD, other=0.0)
    else:
        return (first,)


@triton.jit
def store_attended(
    out, sums_MV, totals_M, peaks_M, sinks, tokens_M, heads_M, num_heads, is_row_M,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Divide by the sum of weights, in which a sink has its part, and store; zero where nothing was seen."""
    if sinks is not None:
        sinks_M = tl.load(sinks + heads_M, mask=is_row_M, other=0.0).to(tl.float32) * _LOG2_E
        higher_M = tl.maximum(peaks_M, sinks_M)
        shrink_M = tl.exp2(peaks_M - higher_M)
        sums_MV = sums_MV * shrink_M[:, None]
        totals_M = totals_M * shrink_M + tl.exp2(sinks_M - higher_M)
    out_MV = sums_MV / tl.where(totals_M == 0.0, 1.0, totals_M)[:, None]
    rows_M = out + (tokens_M.to(tl.int64) * num_heads + heads_M) * VALUE_DIM
    store_rows(rows_M, out_MV.to(out.dtype.element_ty), is_row_M, VALUE_DIM, VALUE_WIDTH)


@triton.jit
def store_rows(rows_M, numbers_MV, is_row_M, DIM: tl.constexpr, WIDTH: tl.constexpr) -> None:
    """Store the first DIM numbers of each row where a pointer says."""
    columns_V = tl.arange(0, WIDTH)
    is_there_MV = is_row_M[:, None] & (columns_V < DIM)[None, :]
    tl.store(rows_M[:, None] + columns_V[None, :], numbers_MV, mask=is_there_MV)


@triton.jit
def _load_rows(rows_K, is_there_K, DIM: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Load [K, WIDTH] from pointers to rows of DIM numbers."""
    columns_W = tl.arange(0, WIDTH)
    pointers_KW = rows_K[:, None] + columns_W[None, :]
    if MASKED:
        if WIDTH > DIM:
            return tl.load(pointers_KW, mask=is_there_K[:, None] & (columns_W < DIM)[None, :], other=0.0)
        else:
            return tl.load(pointers_KW, mask=is_there_K[:, None], other=0.0)
    elif WIDTH > DIM:
        return tl.load(pointers_KW, mask=(columns_W < DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers_KW)


@triton.jit
def _squeeze(doubled, SOFTCAP: tl.constexpr):
    """Squeeze scores into (-SOFTCAP, SOFTCAP) by tanh, from 2 / SOFTCAP times the scores; all to base 2."""
    return (SOFTCAP * _LOG2_E) * (1.0 - 2.0 / (1.0 + tl.exp2(doubled)))
