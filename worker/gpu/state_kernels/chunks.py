"""Recurrences on a GPU in chunks of 64 tokens, by products of matrices: those of long shares.

Owns: the two kernels and their launch. What does not need the state is computed for all chunks side by side;
then a program goes through the chunks of one sequence, with a part of one head's state in registers.
Source: the WY form of the delta rule, arXiv:2406.06484, with decays as in Gated Delta Networks,
arXiv:2412.06464.

With D_i the sum of the chunk's log decays up to token i, and S the state before the chunk:

    A_ij = beta_i (k_i . k_j) exp(D_i - D_j)  for i > j     updates = (I + A)^-1 beta V
                                                            shares  = (I + A)^-1 beta exp(D) K
    U = updates - shares S                                  out_i = exp(D_i) S q_i + sum_j<=i (..) U_j
    S <- exp(D_last) S + sum_j exp(D_last - D_j) U_j x k_j

Without the delta rule U is V. The inverse is exact: forward substitution within blocks of 16 tokens, and the
blocks by three products, since what is left of it is 0 to the fourth power.

Shapes: L tokens of a chunk, T of the step, H heads, G groups of heads, K numbers of a key, V of a value.
"""

import triton
import triton.language as tl
from torch import Tensor

from worker.gpu.state_kernels.convolution import find_part
from worker.gpu.state_kernels.places import LayerPlaces, StateBatch
from worker.gpu.state_kernels.recurrence import inputs_of, load_state, of_length_one, sizes_of
from worker.states.interface import Recurrence

_CHUNK = 64
_SUBSTITUTED = 16
_MOST_ROWS = 32
_SMALLEST_DOT = 16


def recur_by_chunks(
    given: Recurrence, places: LayerPlaces, batch: StateBatch, out_THV: Tensor, least_tokens: int
) -> None:
    """Continue sequences with at least that many tokens in the step; others and their outputs stay."""
    num_tokens, num_heads, value_dim = given.value_THV.shape
    key_width = max(triton.next_power_of_2(given.key_TGK.shape[-1]), _SMALLEST_DOT)
    rows = max(min(_MOST_ROWS, triton.next_power_of_2(value_dim)), _SMALLEST_DOT)
    sizes = sizes_of(given) | {"KEY_WIDTH": key_width, "ROWS": rows, "CHUNK": _CHUNK, "num_warps": 8}
    shares_THK = updates_THV = None
    if given.beta_TH is not None:
        shares_THK = out_THV.new_empty((num_tokens, num_heads, given.key_TGK.shape[-1]))
        updates_THV = out_THV.new_empty(out_THV.shape)
        prepare_kernel[num_tokens // _CHUNK + batch.num_sequences, num_heads](
            *given[1:5], shares_THK, updates_THV, batch.query_starts_R,
            given.key_TGK.stride(0), given.value_THV.stride(0), batch.num_sequences, least_tokens,
            SEARCHES=True, BLOCK=_SUBSTITUTED, num_stages=1, **sizes,
        )  # fmt: skip
    chunk_kernel[batch.num_sequences, num_heads, triton.cdiv(value_dim, rows)](
        *inputs_of(given, places, batch),
        shares_THK,
        updates_THV,
        out_THV,
        least_tokens,
        KEEPS=batch.keeps_states,
        num_stages=1,
        **sizes,
    )


@triton.jit
def _load_rows(source, tokens_L, stride, is_there_L, columns_D, DIM: tl.constexpr) -> tl.tensor:
    """Load rows [L, D] in float32."""
    places_LD = source + tokens_L.to(tl.int64)[:, None] * stride + columns_D[None, :]
    is_there_LD = is_there_L[:, None] & (columns_D < DIM)[None, :]
    return tl.load(places_LD, mask=is_there_LD, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(target, tokens_L, stride, is_there_L, columns_D, rows_LD, DIM: tl.constexpr) -> None:
    places_LD = target + tokens_L.to(tl.int64)[:, None] * stride + columns_D[None, :]
    tl.store(places_LD, rows_LD, mask=is_there_L[:, None] & (columns_D < DIM)[None, :])


@triton.jit
def _sum_of_decays(log_decay, tokens_L, is_there_L, head, HEADS: tl.constexpr) -> tl.tensor:
    """Add up the log decays of a chunk [L]; behind its last token they stay as they are."""
    places_L = log_decay + tokens_L.to(tl.int64) * HEADS + head
    return tl.cumsum(tl.load(places_L, mask=is_there_L, other=0.0), axis=0)


@triton.jit
def _decays_between(decay_L, is_seen_LL) -> tl.tensor:
    """Return the decay of what token j leaves for token i, where i sees it; nothing overflows elsewhere."""
    return tl.where(is_seen_LL, tl.exp(tl.where(is_seen_LL, decay_L[:, None] - decay_L[None, :], 0.0)), 0.0)


@triton.jit
def _inverse_of(a_LL, tokens_L, BLOCK: tl.constexpr) -> tl.tensor:
    """Invert I + A, with A below the diagonal."""
    in_block_LL = tokens_L[:, None] // BLOCK == tokens_L[None, :] // BLOCK
    inner_LL = tl.where(in_block_LL, a_LL, 0.0)
    inverse_LL = (tokens_L[:, None] == tokens_L[None, :]).to(tl.float32)
    for number in range(1, BLOCK):  # this row of all blocks
        is_row_L1 = (tokens_L % BLOCK == number)[:, None]
        factors_L = tl.sum(tl.where(is_row_L1, inner_LL, 0.0), axis=0)
        row_L = tl.sum(factors_L[:, None] * inverse_LL, axis=0)
        inverse_LL -= tl.where(is_row_L1 & in_block_LL, row_L[None, :], 0.0)
    n_LL = tl.dot(inverse_LL, a_LL - inner_LL, input_precision="tf32")
    squared_LL = tl.dot(n_LL, n_LL, input_precision="tf32")
    series_LL = squared_LL - n_LL - tl.dot(n_LL, squared_LL, input_precision="tf32")
    return inverse_LL + tl.dot(series_LL, inverse_LL, input_precision="tf32")


@triton.jit(do_not_specialize=["num_sequences", "least_tokens"])
def prepare_kernel(
    key, value, log_decay, beta, shares, updates, query_starts, key_stride, value_stride,
    num_sequences, least_tokens,
    HEADS: tl.constexpr, SHARING: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr, ROWS: tl.constexpr, HAS_UNIT_KEYS: tl.constexpr, CHUNK: tl.constexpr,
    SEARCHES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One program: one chunk of one head."""
    number, head = tl.program_id(0), tl.program_id(1)
    _, first, start, end = find_part(query_starts, number, num_sequences, CHUNK, SEARCHES)
    if (end - start < least_tokens) | (first >= end):
        return
    tokens_L, columns_K = tl.arange(0, CHUNK), tl.arange(0, KEY_WIDTH)
    at_L, is_there_L = first + tokens_L, first + tokens_L < end
    key_LK = _load_rows(key + head // SHARING * KEY_DIM, at_L, key_stride, is_there_L, columns_K, KEY_DIM)
    key_LK = of_length_one(key_LK, HAS_UNIT_KEYS)
    decay_L = _sum_of_decays(log_decay, at_L, is_there_L, head, HEADS)
    beta_L = tl.load(beta + at_L.to(tl.int64) * HEADS + head, mask=is_there_L, other=0.0).to(tl.float32)
    a_LL = tl.dot(key_LK, tl.trans(key_LK), input_precision="tf32") * beta_L[:, None]
    a_LL *= _decays_between(decay_L, tokens_L[:, None] > tokens_L[None, :])
    inverse_LL = _inverse_of(a_LL, tokens_L, BLOCK)
    share_LK = tl.dot(inverse_LL, key_LK * (beta_L * tl.exp(decay_L))[:, None], input_precision="tf32")
    _store_rows(shares + head * KEY_DIM, at_L, HEADS * KEY_DIM, is_there_L, columns_K, share_LK, KEY_DIM)
    for some in range(0, VALUE_DIM, ROWS):
        rows_V, columns_V = head * VALUE_DIM, some + tl.arange(0, ROWS)
        value_LV = _load_rows(value + rows_V, at_L, value_stride, is_there_L, columns_V, VALUE_DIM)
        update_LV = tl.dot(inverse_LL, value_LV * beta_L[:, None], input_precision="tf32")
        _store_rows(updates + rows_V, at_L, HEADS * VALUE_DIM, is_there_L, columns_V, update_LV, VALUE_DIM)


@triton.jit(do_not_specialize=["least_tokens"])
def chunk_kernel(
    query, key, value, log_decay, pool, places, query_starts, seq_lens, blocks,
    query_stride, key_stride, value_stride, num_stripes, block_stride, scaling,
    shares, updates, out, least_tokens,
    HEADS: tl.constexpr, SHARING: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr, ROWS: tl.constexpr, HAS_UNIT_KEYS: tl.constexpr, CHUNK: tl.constexpr,
    KEEPS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: some rows of one head's state of one sequence."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    values_V, columns_K = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, KEY_WIDTH)
    tokens_L, rows, group = tl.arange(0, CHUNK), head * VALUE_DIM, head // SHARING * KEY_DIM
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    if (start == end) | (end - start < least_tokens):
        return
    states_VK, state_VK, is_kept_VK = load_state(
        pool, places, blocks, seq_lens, sequence, end - start, rows + values_V, values_V < VALUE_DIM,
        columns_K, HEADS * VALUE_DIM, num_stripes, block_stride, KEY_DIM,
    )  # fmt: skip
    for first in range(start, end, CHUNK):
        at_L, is_there_L = first + tokens_L, first + tokens_L < end
        query_LK = _load_rows(query + group, at_L, query_stride, is_there_L, columns_K, KEY_DIM)
        query_LK = of_length_one(query_LK, HAS_UNIT_KEYS) * scaling
        key_LK = _load_rows(key + group, at_L, key_stride, is_there_L, columns_K, KEY_DIM)
        key_LK = of_length_one(key_LK, HAS_UNIT_KEYS)
        decay_L = _sum_of_decays(log_decay, at_L, is_there_L, head, HEADS)
        last = tl.sum(tl.where(tokens_L == CHUNK - 1, decay_L, 0.0), axis=0)
        if updates is None:
            update_LV = _load_rows(value + rows, at_L, value_stride, is_there_L, values_V, VALUE_DIM)
        else:
            of_head, stride = shares + head * KEY_DIM, HEADS * KEY_DIM
            share_LK = _load_rows(of_head, at_L, stride, is_there_L, columns_K, KEY_DIM)
            update_LV = _load_rows(updates + rows, at_L, HEADS * VALUE_DIM, is_there_L, values_V, VALUE_DIM)
            update_LV -= tl.dot(share_LK, tl.trans(state_VK), input_precision="tf32")
        out_LV = tl.dot(query_LK * tl.exp(decay_L)[:, None], tl.trans(state_VK), input_precision="tf32")
        seen_LL = tl.dot(query_LK, tl.trans(key_LK), input_precision="tf32")
        seen_LL *= _decays_between(decay_L, tokens_L[:, None] >= tokens_L[None, :])
        out_LV += tl.dot(seen_LL, update_LV, input_precision="tf32")
        _store_rows(out + rows, at_L, HEADS * VALUE_DIM, is_there_L, values_V, out_LV, VALUE_DIM)
        left_LK = key_LK * tl.exp(last - decay_L)[:, None]
        state_VK = state_VK * tl.exp(last) + tl.dot(tl.trans(update_LV), left_LK, input_precision="tf32")
    if KEEPS:
        tl.store(states_VK, state_VK, mask=is_kept_VK)
