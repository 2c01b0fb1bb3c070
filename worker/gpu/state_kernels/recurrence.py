"""Recurrences on a GPU token by token: those of decodes and of short shares, and of all where chunks fail.

Owns: the kernel and its launch. A program holds some rows of one head's state in registers, from the first
token of the share to the last, and brings them back to their block.
Never: knows a family, or chooses between this way and chunks (executor.py).
Source: Gated Delta Networks, arXiv:2412.06464; the forms are those of worker/states/interface.py.

Sums are in float32, and one program's are in the same order for every company: what a sequence gets does not
depend on how its prompt is cut.

Shapes: T tokens, H heads, G groups of heads, K numbers of a key, V numbers of a value. In a kernel H
is 1, or V where heads have one value.
"""

import triton
import triton.language as tl
from torch import Tensor

from worker.devices.dependent_launch import launch_way, wait_first
from worker.gpu.state_kernels.places import LayerPlaces, StateBatch
from worker.states.interface import Recurrence
from worker.states.rules import LENGTH_EPSILON

_MOST_ROWS = 32


def recur_by_tokens(
    given: Recurrence, places: LayerPlaces, batch: StateBatch, out_THV: Tensor, most_tokens: int
) -> None:
    """Continue sequences with at most that many tokens in the step; others and their outputs stay.

    In a batch of decodes padding gets zeros.
    """
    num_heads, value_dim = given.value_THV.shape[1:]
    num_groups, key_dim = given.key_TGK.shape[1:]
    rows, together = min(_MOST_ROWS, triton.next_power_of_2(value_dim)), 1
    if value_dim == 1:  # heads are channels
        rows = together = min(_MOST_ROWS, triton.next_power_of_2(num_heads))
    num_parts = triton.cdiv(num_heads, together), triton.cdiv(value_dim, rows)
    recur_kernel[batch.num_sequences, *num_parts](
        given.query_TGK, given.key_TGK, given.value_THV, given.log_decay, given.beta_TH, out_THV,
        places.pool, places.table_FX, batch.query_starts_R, batch.seq_lens_R, batch.blocks_RS,
        *given.query_TGK.stride()[:2], *given.key_TGK.stride()[:2], *given.value_THV.stride()[:2],
        batch.blocks_RS.shape[1], places.block_stride, most_tokens, given.scaling, LENGTH_EPSILON,
        HEADS=num_heads, SHARING=num_heads // num_groups, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        KEY_WIDTH=triton.next_power_of_2(key_dim), ROWS=rows, TOGETHER=together,
        HAS_UNIT_KEYS=given.has_unit_keys, BY_CHANNEL=given.log_decay.dim() == 3,
        ARE_DECODES=batch.are_decodes, KEEPS=batch.keeps_states, **launch_way(),
    )  # fmt: skip


@triton.jit
def rows_of_state(
    pool, places, blocks, sequence, rows_V, is_there_V, num_rows, num_stripes, block_stride,
    KEY_DIM: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Point to rows of a sequence's state; and say which of them are kept: none of block 0."""
    stripes_V = tl.load(places + rows_V, mask=is_there_V, other=0)
    offsets_V = tl.load(places + num_rows + rows_V, mask=is_there_V, other=0)
    if KEY_DIM % 4 == 0:  # runs begin at lines of memory: four numbers are loaded at once
        offsets_V = tl.multiple_of(offsets_V, 4)
    blocks_V = tl.load(blocks + sequence * num_stripes + stripes_V, mask=is_there_V, other=0)
    return pool + blocks_V.to(tl.int64) * block_stride + offsets_V, blocks_V > 0


@triton.jit
def of_length_one(rows_LK, epsilon) -> tl.tensor:
    """Divide rows by their length."""
    return rows_LK * tl.rsqrt(tl.sum(rows_LK * rows_LK, axis=1) + epsilon)[:, None]


@triton.jit(do_not_specialize=["most_tokens"])
def recur_kernel(
    query, key, value, log_decay, beta, out, pool, places, query_starts, seq_lens, blocks,
    query_stride, query_group_stride, key_stride, key_group_stride, value_stride, value_head_stride,
    num_stripes, block_stride, most_tokens, scaling, epsilon,
    HEADS: tl.constexpr, SHARING: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr,
    HAS_UNIT_KEYS: tl.constexpr, BY_CHANNEL: tl.constexpr, ARE_DECODES: tl.constexpr, KEEPS: tl.constexpr,
    WAITS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: some rows of one head's state of one sequence, or of several heads with a row each."""
    wait_first(WAITS)
    sequence = tl.program_id(0)
    heads_H, columns_K = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER), tl.arange(0, KEY_WIDTH)
    values_V = tl.program_id(2) * ROWS + tl.arange(0, ROWS) if TOGETHER == 1 else heads_H * 0
    is_head_H, is_key_K = heads_H < HEADS, columns_K < KEY_DIM
    is_value_V, is_there_HK = (values_V < VALUE_DIM) & is_head_H, is_head_H[:, None] & is_key_K[None, :]
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    if ARE_DECODES:  # noqa: SIM102 -- a constant, and a number of the device
        if start == end:  # padding has the token of its own number
            of_padding_V = (sequence.to(tl.int64) * HEADS + heads_H) * VALUE_DIM + values_V
            tl.store(out + of_padding_V, tl.zeros([ROWS], tl.float32), mask=is_value_V)
    if (start == end) | (end - start > most_tokens):
        return
    states_V, is_kept_V = rows_of_state(
        pool, places, blocks, sequence, heads_H * VALUE_DIM + values_V, is_value_V, HEADS * VALUE_DIM,
        num_stripes, block_stride, KEY_DIM,
    )  # fmt: skip
    states_VK, is_there_VK = states_V[:, None] + columns_K[None, :], is_value_V[:, None] & is_key_K[None, :]
    is_later = tl.load(seq_lens + sequence) > end - start
    state_VK = tl.where(is_later, tl.load(states_VK, mask=is_there_VK, other=0.0), 0.0)
    groups_H1 = (heads_H // SHARING)[:, None]
    queries_HK = query + groups_H1 * query_group_stride + columns_K[None, :]
    keys_HK = key + groups_H1 * key_group_stride + columns_K[None, :]
    for token in range(start, end):
        place = tl.cast(token, tl.int64)
        of_heads_H = place * HEADS + heads_H
        if BY_CHANNEL:
            log_decays_HK = log_decay + of_heads_H[:, None] * KEY_DIM + columns_K[None, :]
            state_VK *= tl.exp(tl.load(log_decays_HK, mask=is_there_HK, other=0.0))
        else:
            state_VK *= tl.exp(tl.load(log_decay + of_heads_H, mask=is_head_H, other=0.0))[:, None]
        query_HK = tl.load(queries_HK + place * query_stride, mask=is_there_HK, other=0.0).to(tl.float32)
        key_HK = tl.load(keys_HK + place * key_stride, mask=is_there_HK, other=0.0).to(tl.float32)
        if HAS_UNIT_KEYS:
            query_HK, key_HK = of_length_one(query_HK, epsilon), of_length_one(key_HK, epsilon)
        values = value + place * value_stride + heads_H * value_head_stride + values_V
        added_V = tl.load(values, mask=is_value_V, other=0.0).to(tl.float32)
        if beta is not None:
            strength_H = tl.load(beta + of_heads_H, mask=is_head_H, other=0.0).to(tl.float32)
            added_V = (added_V - tl.sum(state_VK * key_HK, axis=1)) * strength_H
        state_VK += added_V[:, None] * key_HK
        out_V = tl.sum(state_VK * (query_HK * scaling), axis=1)
        tl.store(out + of_heads_H * VALUE_DIM + values_V, out_V, mask=is_value_V)
    if KEEPS:
        tl.store(states_VK, state_VK, mask=is_there_VK & is_kept_V[:, None])
