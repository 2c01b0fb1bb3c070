"""From a merged query, key and value product to what attention reads, in one kernel.

Owns: the norms of queries and keys, their rotation by position, and the write of keys and values into the
paged cache.
Never: attends (attention.py), or makes cosines and sines: models do, once per step.
Source: RoPE, arXiv:2104.09864, turning the first half of a head with the second.

Shapes: T tokens, Hq and Hk query and KV heads, D key size, V value size, R turned numbers of a head,
M = (Hq + Hk) * D + Hk * V numbers of a merged row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kv_cache import LayerCache
from worker.layer_call import HeadShape, Rotation
from worker.layer_parts import RmsNorm

_NUMBERS_PER_PROGRAM = 1024


@triton.jit
def _turned_heads(
    heads_ptr, weight_ptr, epsilon, cosines_ptr, sines_ptr, is_row,
    HEAD_DIM: tl.constexpr, ROTATED_DIM: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One head per row, [rows, BLOCK_D] float32, normed and turned. The weight alone is one for all rows."""
    dims = tl.arange(0, BLOCK_D)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    x = tl.load(heads_ptr[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + epsilon)[:, None]
        x = x * scale * tl.load(weight_ptr + dims, mask=dims < HEAD_DIM, other=0.0)[None, :]
    if ROTATED_DIM > 0:
        # The other number of a pair is loaded again, from the first-level cache.
        is_first = dims < ROTATED_DIM // 2
        partners = tl.where(is_first, dims + ROTATED_DIM // 2, dims - ROTATED_DIM // 2)
        is_turned = dims < ROTATED_DIM
        mask = is_row[:, None] & is_turned[None, :]
        partner = tl.load(heads_ptr[:, None] + partners[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            partner = partner * scale * tl.load(weight_ptr + partners, mask=is_turned, other=0.0)[None, :]
        cosines = tl.load(cosines_ptr[:, None] + dims[None, :], mask=mask, other=1.0).to(tl.float32)
        sines = tl.load(sines_ptr[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        x = x * cosines + partner * tl.where(is_first[None, :], -sines, sines)
    return x


@triton.jit
def _store_heads(out_ptr, starts, heads, is_row, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """One head per row, [rows, BLOCK_D], to where each starts."""
    dims = tl.arange(0, BLOCK_D)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_ptr + starts[:, None] + dims[None, :], heads.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _turn_and_write_kernel(
    merged_ptr, queries_ptr, key_cache_ptr, value_cache_ptr, slots_ptr, cosines_ptr, sines_ptr,
    query_weight_ptr, key_weight_ptr, query_epsilon, key_epsilon,
    num_tokens, angle_stride, block_stride,
    NUM_QUERY_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROTATED_DIM: tl.constexpr,
    HAS_QUERY_NORM: tl.constexpr, HAS_KEY_NORM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # A row is one head of one token: first those of all queries, then of all keys, then of all values.
    tile = tl.program_id(0)
    num_query_tiles = tl.cdiv(num_tokens * NUM_QUERY_HEADS, ROWS)
    num_kv_tiles = tl.cdiv(num_tokens * NUM_KV_HEADS, ROWS)
    merged_size: tl.constexpr = (NUM_QUERY_HEADS + NUM_KV_HEADS) * KEY_DIM + NUM_KV_HEADS * VALUE_DIM
    if tile < num_query_tiles:
        rows = tile * ROWS + tl.arange(0, ROWS)
        is_row = rows < num_tokens * NUM_QUERY_HEADS
        tokens = (rows // NUM_QUERY_HEADS).to(tl.int64)
        queries = _turned_heads(
            merged_ptr + tokens * merged_size + (rows % NUM_QUERY_HEADS) * KEY_DIM,
            query_weight_ptr, query_epsilon, cosines_ptr + tokens * angle_stride,
            sines_ptr + tokens * angle_stride, is_row, KEY_DIM, ROTATED_DIM, HAS_QUERY_NORM, BLOCK_D,
        )  # fmt: skip
        _store_heads(queries_ptr, rows.to(tl.int64) * KEY_DIM, queries, is_row, KEY_DIM, BLOCK_D)
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
        keys = _turned_heads(
            merged_ptr + tokens * merged_size + (NUM_QUERY_HEADS + heads) * KEY_DIM,
            key_weight_ptr, key_epsilon, cosines_ptr + tokens * angle_stride,
            sines_ptr + tokens * angle_stride, is_row, KEY_DIM, ROTATED_DIM, HAS_KEY_NORM, BLOCK_D,
        )  # fmt: skip
        _store_heads(key_cache_ptr, block_starts + places * KEY_DIM, keys, is_row, KEY_DIM, BLOCK_D)
        return
    starts = tokens * merged_size + (NUM_QUERY_HEADS + NUM_KV_HEADS) * KEY_DIM + heads * VALUE_DIM
    dims = tl.arange(0, BLOCK_V)
    mask = is_row[:, None] & (dims < VALUE_DIM)[None, :]
    values = tl.load(merged_ptr + starts[:, None] + dims[None, :], mask=mask, other=0.0)
    _store_heads(value_cache_ptr, block_starts + places * VALUE_DIM, values, is_row, VALUE_DIM, BLOCK_V)


def turn_and_write(
    merged_TM: Tensor,
    heads: HeadShape,
    norms: tuple[RmsNorm | None, RmsNorm | None],
    rotation: Rotation | None,
    cache: LayerCache,
    slots_T: Tensor,
) -> Tensor:
    """Return the queries [T, Hq, D]; keys and values go to their slots, those of -1 nowhere.

    Rows of merged_TM are contiguous: all queries, then all keys, then all values. `norms` are those of a
    query head and of a key head. R is the last size of the rotation; None turns nothing.
    Raises nothing: a slot out of range corrupts memory, so inputs.py checks on the host.
    """
    num_tokens = merged_TM.shape[0]
    queries_THD = torch.empty(
        (num_tokens, heads.num_query_heads, heads.key_dim), dtype=merged_TM.dtype, device=merged_TM.device
    )
    cosines, sines = (None, None) if rotation is None else (angles[0].contiguous() for angles in rotation)
    widest = triton.next_power_of_2(max(heads.key_dim, heads.value_dim))
    rows = max(_NUMBERS_PER_PROGRAM // widest, 1)
    num_tiles = triton.cdiv(num_tokens * heads.num_query_heads, rows)
    num_tiles += 2 * triton.cdiv(num_tokens * heads.num_kv_heads, rows)
    query_norm, key_norm = norms
    keys_NHSD, values_NHSV = cache.keys.blocks_NHSD, cache.values.blocks_NHSD
    _turn_and_write_kernel[(num_tiles,)](
        merged_TM, queries_THD, keys_NHSD, values_NHSV, slots_T,
        # Without a rotation nothing is read through these two.
        merged_TM if cosines is None else cosines, merged_TM if sines is None else sines,
        None if query_norm is None else query_norm.weight_H, None if key_norm is None else key_norm.weight_H,
        0.0 if query_norm is None else query_norm.epsilon, 0.0 if key_norm is None else key_norm.epsilon,
        num_tokens, 0 if cosines is None else cosines.stride(0), keys_NHSD.stride(0),
        NUM_QUERY_HEADS=heads.num_query_heads, NUM_KV_HEADS=heads.num_kv_heads,
        KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim,
        ROTATED_DIM=0 if cosines is None else cosines.shape[-1],
        HAS_QUERY_NORM=query_norm is not None, HAS_KEY_NORM=key_norm is not None,
        BLOCK_SIZE=keys_NHSD.shape[2], ROWS=rows,
        BLOCK_D=triton.next_power_of_2(heads.key_dim), BLOCK_V=triton.next_power_of_2(heads.value_dim),
        num_warps=4,
    )  # fmt: skip
    return queries_THD
