"""Rotary embedding, norms and the write to the KV cache, from a merged product in one kernel.

Source: RoPE, arXiv:2104.09864, rotating the first half of a head with the second.

Shapes: T tokens, Hq and Hk query and KV heads, D key size, V value size, R rotated numbers of a head,
M = (Hq + Hk) * D + Hk * V numbers of a merged row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.attention.kv_cache import LayerCache
from worker.devices.dependent_launch import begin, launch_way, warm_way
from worker.gpu.kernels.kv_write import in_cache
from worker.model.layer_call import HeadShape, Rotation
from worker.model.layer_parts import RmsNorm

# 16 of them for a thread: of heads that are rotated whole, a load of 16 bytes from each half.
_NUMBERS_PER_PROGRAM = 1024
_NUM_WARPS = 2


@triton.jit
def _load_part(heads_ptr, is_row, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """SIZE numbers of each head, from FIRST on: [rows, BLOCK] float32."""
    dims = tl.arange(0, BLOCK)
    mask = is_row[:, None] & (dims < SIZE)[None, :]
    return tl.load(heads_ptr[:, None] + (FIRST + dims)[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_part(
    out_ptr, numbers, factor, is_row, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    dims = tl.arange(0, BLOCK)
    mask = is_row[:, None] & (dims < SIZE)[None, :]
    numbers = in_cache(numbers, factor, out_ptr.dtype.element_ty)
    tl.store(out_ptr[:, None] + (FIRST + dims)[None, :], numbers, mask=mask)


@triton.jit
def _weight_part(weight_ptr, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    dims = tl.arange(0, BLOCK)
    return tl.load(weight_ptr + FIRST + dims, mask=dims < SIZE, other=0.0)[None, :]


@triton.jit
def _rotate_heads(
    heads_ptr, out_ptr, weight_ptr, epsilon, cosines_ptr, sines_ptr, factor, is_row,
    HEAD_DIM: tl.constexpr, ROTATED_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Norm and rotate one head per row, from one place to another. Only the weight is one for all rows.

    A head is two halves that are rotated together, and the rest; any of these may be empty.
    """
    HALF: tl.constexpr = ROTATED_DIM // 2
    REST: tl.constexpr = HEAD_DIM - ROTATED_DIM
    BLOCK_HALF: tl.constexpr = triton.next_power_of_2(HALF)
    BLOCK_REST: tl.constexpr = triton.next_power_of_2(REST)
    if ROTATED_DIM > 0:
        first = _load_part(heads_ptr, is_row, 0, HALF, BLOCK_HALF)
        second = _load_part(heads_ptr, is_row, HALF, HALF, BLOCK_HALF)
        cosines = _load_part(cosines_ptr, is_row, 0, HALF, BLOCK_HALF)
        sines = _load_part(sines_ptr, is_row, 0, HALF, BLOCK_HALF)
    if REST > 0:
        rest = _load_part(heads_ptr, is_row, ROTATED_DIM, REST, BLOCK_REST)
    if HAS_NORM:
        squares = tl.zeros(is_row.shape, tl.float32)
        if ROTATED_DIM > 0:
            squares += tl.sum(first * first + second * second, axis=1)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + epsilon)[:, None]
        if ROTATED_DIM > 0:
            first = first * scale * _weight_part(weight_ptr, 0, HALF, BLOCK_HALF)
            second = second * scale * _weight_part(weight_ptr, HALF, HALF, BLOCK_HALF)
        if REST > 0:
            rest = rest * scale * _weight_part(weight_ptr, ROTATED_DIM, REST, BLOCK_REST)
    if ROTATED_DIM > 0:
        _store_part(out_ptr, first * cosines - second * sines, factor, is_row, 0, HALF, BLOCK_HALF)
        _store_part(out_ptr, second * cosines + first * sines, factor, is_row, HALF, HALF, BLOCK_HALF)
    if REST > 0:
        _store_part(out_ptr, rest, factor, is_row, ROTATED_DIM, REST, BLOCK_REST)


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_and_write_kernel(
    merged_ptr, queries_ptr, key_cache_ptr, value_cache_ptr, slots_ptr, cosines_ptr, sines_ptr,
    query_weight_ptr, key_weight_ptr, query_epsilon, key_epsilon,
    num_tokens, angle_stride, block_stride, key_factor, value_factor,
    NUM_QUERY_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROTATED_DIM: tl.constexpr,
    HAS_QUERY_NORM: tl.constexpr, HAS_KEY_NORM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, warmed_ptr, warmed_bytes, WARMERS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    tile = begin(warmed_ptr, warmed_bytes, WAITS, WARMERS)
    if WARMERS > 0:  # noqa: SIM102 - the compiler decides this one
        if tile < 0:
            return
    # A row is one head of one token: first those of all queries, then of all keys, then of all values.
    num_query_tiles = tl.cdiv(num_tokens * NUM_QUERY_HEADS, ROWS)
    num_kv_tiles = tl.cdiv(num_tokens * NUM_KV_HEADS, ROWS)
    merged_size: tl.constexpr = (NUM_QUERY_HEADS + NUM_KV_HEADS) * KEY_DIM + NUM_KV_HEADS * VALUE_DIM
    if tile < num_query_tiles:
        rows = tile * ROWS + tl.arange(0, ROWS)
        is_row = rows < num_tokens * NUM_QUERY_HEADS
        tokens = (rows // NUM_QUERY_HEADS).to(tl.int64)
        _rotate_heads(
            merged_ptr + tokens * merged_size + (rows % NUM_QUERY_HEADS) * KEY_DIM,
            queries_ptr + rows.to(tl.int64) * KEY_DIM,
            query_weight_ptr, query_epsilon, cosines_ptr + tokens * angle_stride,
            sines_ptr + tokens * angle_stride, 1.0, is_row, KEY_DIM, ROTATED_DIM, HAS_QUERY_NORM,
        )  # fmt: skip
        return
    is_key = tile < num_query_tiles + num_kv_tiles
    rows = tl.where(is_key, tile - num_query_tiles, tile - num_query_tiles - num_kv_tiles) * ROWS
    rows += tl.arange(0, ROWS)
    tokens, heads = (rows // NUM_KV_HEADS).to(tl.int64), rows % NUM_KV_HEADS
    slots = tl.load(slots_ptr + tokens, mask=rows < num_tokens * NUM_KV_HEADS, other=-1)
    is_row = slots >= 0
    # Blocks lie in the pool at one stride, heads of a block page by page, tokens of a page one by one.
    block_starts = (slots // BLOCK_SIZE) * block_stride
    places = heads * BLOCK_SIZE + slots % BLOCK_SIZE
    if is_key:
        _rotate_heads(
            merged_ptr + tokens * merged_size + (NUM_QUERY_HEADS + heads) * KEY_DIM,
            key_cache_ptr + block_starts + places * KEY_DIM,
            key_weight_ptr, key_epsilon, cosines_ptr + tokens * angle_stride,
            sines_ptr + tokens * angle_stride, key_factor, is_row, KEY_DIM, ROTATED_DIM, HAS_KEY_NORM,
        )  # fmt: skip
        return
    values_ptr = merged_ptr + tokens * merged_size + (NUM_QUERY_HEADS + NUM_KV_HEADS) * KEY_DIM
    values_width: tl.constexpr = triton.next_power_of_2(VALUE_DIM)
    values = _load_part(values_ptr + heads * VALUE_DIM, is_row, 0, VALUE_DIM, values_width)
    places_ptr = value_cache_ptr + block_starts + places * VALUE_DIM
    _store_part(places_ptr, values, value_factor, is_row, 0, VALUE_DIM, values_width)


def _lines_of_one_stride(rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Return [T, R] each. Halves of the lines of a table are taken as they are."""
    cosines_TR, sines_TR = rotation[0][0], rotation[1][0]
    if cosines_TR.stride() == sines_TR.stride() and cosines_TR.stride(1) == 1:
        return cosines_TR, sines_TR
    return cosines_TR.contiguous(), sines_TR.contiguous()


def rotate_and_write(
    merged_TM: Tensor,
    heads: HeadShape,
    norms: tuple[RmsNorm | None, RmsNorm | None],
    rotation: Rotation | None,
    cache: LayerCache,
    slots_T: Tensor,
) -> Tensor:
    """Return the queries [T, Hq, D]; keys and values go to their slots, and nowhere for slot -1.

    Rows of merged_TM are contiguous: all queries, then all keys, then all values. `norms` are those of a
    query head and of a key head. R is the last size of the rotation; without one nothing is rotated. The
    second half of a row of it is the first once more (AngleOrder.TWICE), and is not read.
    Raises nothing: a slot out of range corrupts memory, so steps/inputs.py checks on the host.
    """
    num_tokens = merged_TM.shape[0]
    queries_THD = torch.empty(
        (num_tokens, heads.num_query_heads, heads.key_dim), dtype=merged_TM.dtype, device=merged_TM.device
    )
    cosines, sines = (None, None) if rotation is None else _lines_of_one_stride(rotation)
    widest = triton.next_power_of_2(max(heads.key_dim, heads.value_dim))
    rows = max(_NUMBERS_PER_PROGRAM // widest, 1)
    num_tiles = triton.cdiv(num_tokens * heads.num_query_heads, rows)
    num_tiles += 2 * triton.cdiv(num_tokens * heads.num_kv_heads, rows)
    query_norm, key_norm = norms
    keys_NHSD, values_NHSV = cache.keys.blocks_NHSD, cache.values.blocks_NHSD
    warmed = warm_way()
    _rotate_and_write_kernel[(num_tiles + warmed["WARMERS"],)](
        merged_TM, queries_THD, keys_NHSD, values_NHSV, slots_T,
        # Without a rotation nothing is read through these two.
        merged_TM if cosines is None else cosines, merged_TM if sines is None else sines,
        None if query_norm is None else query_norm.weight_H, None if key_norm is None else key_norm.weight_H,
        0.0 if query_norm is None else query_norm.epsilon, 0.0 if key_norm is None else key_norm.epsilon,
        num_tokens, 0 if cosines is None else cosines.stride(0), keys_NHSD.stride(0),
        1 / cache.keys.scale, 1 / cache.values.scale,
        NUM_QUERY_HEADS=heads.num_query_heads, NUM_KV_HEADS=heads.num_kv_heads,
        KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim,
        ROTATED_DIM=0 if cosines is None else cosines.shape[-1],
        HAS_QUERY_NORM=query_norm is not None, HAS_KEY_NORM=key_norm is not None,
        BLOCK_SIZE=keys_NHSD.shape[2], ROWS=rows, num_warps=_NUM_WARPS, **warmed, **launch_way(),
    )  # fmt: skip
    return queries_THD
