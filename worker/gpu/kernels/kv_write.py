"""Put keys and values of a step's tokens into the paged cache.

Owns: this one scatter. It computes the same as RefAttention.write (worker/attention/ref_attention.py).

Shapes: T tokens, H KV heads, D key size, V value size.
"""

import triton
import triton.language as tl
from torch import Tensor

from worker.attention.kv_cache import LayerCache
from worker.gpu.quantized.kernels.row_kernels import to_float8

# Eight rows of 128 numbers give each thread of four warps one load of 16 bytes.
_TOKENS_PER_PROGRAM = 8


def write_kv(key_HTD: Tensor, value_HTV: Tensor, cache: LayerCache, slots_T: Tensor) -> None:
    """Write in place; any strides. slots_T is int64, block * block_size + offset; -1 writes nothing.

    Raises nothing: a slot out of range corrupts memory, so `inputs.py` checks on the host.
    """
    keys, values = cache.keys.blocks_NHSD, cache.values.blocks_NHSD
    num_heads, num_tokens, key_dim = key_HTD.shape
    value_dim = value_HTV.shape[-1]
    write_kernel[triton.cdiv(num_tokens, _TOKENS_PER_PROGRAM), num_heads](
        key_HTD, value_HTV, keys, values, slots_T, num_tokens,
        *key_HTD.stride(), *value_HTV.stride(), keys.stride(0),
        1 / cache.keys.scale, 1 / cache.values.scale,
        KEY_DIM=key_dim, VALUE_DIM=value_dim, VALUE_ROW=values.stride(2),
        KEY_WIDTH=triton.next_power_of_2(key_dim), VALUE_WIDTH=triton.next_power_of_2(value_dim),
        BLOCK_SIZE=keys.shape[2], TOKENS=_TOKENS_PER_PROGRAM,
    )  # fmt: skip


@triton.jit
def in_cache(numbers, factor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return numbers in the dtype of the cache; those of 8 bits are multiplied by `factor` first."""
    if tl.float8e4nv == DTYPE:
        return to_float8(numbers.to(tl.float32) * factor)
    else:
        return numbers.to(DTYPE)


@triton.jit(do_not_specialize=["num_tokens"])
def write_kernel(
    key, value, cached_keys, cached_values, slots, num_tokens,
    key_head_stride, key_token_stride, key_dim_stride,
    value_head_stride, value_token_stride, value_dim_stride, block_stride, key_factor, value_factor,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_ROW: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: some tokens of one KV head. Values that lie in keys are written twice, alike."""
    head = tl.program_id(1)
    tokens_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slots_T = tl.load(slots + tokens_T, mask=tokens_T < num_tokens, other=-1)
    is_there_T = slots_T >= 0
    starts_T = slots_T // BLOCK_SIZE * block_stride
    rows_T = head * BLOCK_SIZE + slots_T % BLOCK_SIZE
    _copy_rows(
        key + tokens_T.to(tl.int64) * key_token_stride + head * key_head_stride, key_dim_stride,
        cached_keys + starts_T + rows_T * KEY_DIM, is_there_T, key_factor, KEY_DIM, KEY_WIDTH,
    )  # fmt: skip
    _copy_rows(
        value + tokens_T.to(tl.int64) * value_token_stride + head * value_head_stride, value_dim_stride,
        cached_values + starts_T + rows_T * VALUE_ROW, is_there_T, value_factor, VALUE_DIM, VALUE_WIDTH,
    )  # fmt: skip


@triton.jit
def _copy_rows(
    sources_T, source_stride, targets_T, is_there_T, factor, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Copy rows of DIM numbers, from any stride to one after another; see `in_cache`."""
    columns_D = tl.arange(0, WIDTH)
    is_there_TD = is_there_T[:, None] & (columns_D < DIM)[None, :]
    numbers_TD = tl.load(sources_T[:, None] + columns_D[None, :] * source_stride, mask=is_there_TD)
    numbers_TD = in_cache(numbers_TD, factor, targets_T.dtype.element_ty)
    tl.store(targets_T[:, None] + columns_D[None, :], numbers_TD, mask=is_there_TD)
