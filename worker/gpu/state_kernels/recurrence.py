"""Recurrences on a GPU token by token: those of decodes and of short shares, and of all where chunks fail.

A program holds some rows of one head's state in registers, from the first token of the share to the last, and
brings them back to their block.
Source: Gated Delta Networks, arXiv:2412.06464; the forms are those of worker/states/interface.py.

Sums are in float32, and one program's are in the same order for every company: what a sequence gets does not
depend on how its prompt is cut.

Shapes: T tokens, H heads, G groups of heads, K numbers of a key, V numbers of a value. In a kernel H
is 1, or V where heads have one value.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from worker.devices.dependent_launch import launch_way, wait_first
from worker.gpu.state_kernels.places import LayerPlaces, StateBatch
from worker.states.interface import Recurrence
from worker.states.rules import LENGTH_EPSILON

_MOST_ROWS = 32
_EPSILON = tl.constexpr(LENGTH_EPSILON)


def inputs_of(given: Recurrence, places: LayerPlaces, batch: StateBatch) -> tuple[Any, ...]:
    """List the arguments with which kernels of recurrences begin."""
    strides = given.query_TGK.stride(0), given.key_TGK.stride(0), given.value_THV.stride(0)
    return (
        *given[:4], places.pool, places.table_FX, batch.query_starts_R, batch.seq_lens_R, batch.blocks_RS,
        *strides, batch.blocks_RS.shape[1], places.block_stride, given.scaling,
    )  # fmt: skip


def sizes_of(given: Recurrence) -> dict[str, Any]:
    """Return the constants of kernels of recurrences."""
    (num_heads, value_dim), (num_groups, key_dim) = given.value_THV.shape[1:], given.key_TGK.shape[1:]
    sizes = {"HEADS": num_heads, "SHARING": num_heads // num_groups, "HAS_UNIT_KEYS": given.has_unit_keys}
    return {**sizes, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}


def recur_by_tokens(
    given: Recurrence, places: LayerPlaces, batch: StateBatch, out_THV: Tensor, most_tokens: int
) -> None:
    """Continue sequences with at most that many tokens in the step; others and their outputs stay.

    In a batch of decodes padding gets zeros.
    """
    num_heads, value_dim = given.value_THV.shape[1:]
    rows, together = min(_MOST_ROWS, triton.next_power_of_2(value_dim)), 1
    if value_dim == 1:  # heads are channels
        rows = together = min(_MOST_ROWS, triton.next_power_of_2(num_heads))
    num_parts = triton.cdiv(num_heads, together), triton.cdiv(value_dim, rows)
    recur_kernel[batch.num_sequences, *num_parts](
        *inputs_of(given, places, batch), given.beta_TH, out_THV, most_tokens,
        KEY_WIDTH=triton.next_power_of_2(given.key_TGK.shape[-1]), ROWS=rows, TOGETHER=together,
        BY_CHANNEL=given.log_decay.dim() == 3, ARE_DECODES=batch.are_decodes, KEEPS=batch.keeps_states,
        **sizes_of(given), **launch_way(),
    )  # fmt: skip


@triton.jit
def load_state(
    pool, places, blocks, seq_lens, sequence, num_own, rows_V, is_row_V, columns_K, num_rows, num_stripes,
    block_stride, KEY_DIM: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Point to rows of a sequence's state, load them, and say what is kept: nothing in block 0."""
    stripes_V = tl.load(places + rows_V, mask=is_row_V, other=0)
    offsets_V = tl.load(places + num_rows + rows_V, mask=is_row_V, other=0)
    if KEY_DIM % 4 == 0:  # runs begin at lines of memory: four numbers are loaded at once
        offsets_V = tl.multiple_of(offsets_V, 4)
    blocks_V = tl.load(blocks + sequence * num_stripes + stripes_V, mask=is_row_V, other=0)
    states_VK = (pool + blocks_V.to(tl.int64) * block_stride + offsets_V)[:, None] + columns_K[None, :]
    is_there_VK = (is_row_V & (blocks_V > 0))[:, None] & (columns_K < KEY_DIM)[None, :]
    is_later = tl.load(seq_lens + sequence) > num_own
    state_VK = tl.where(is_later, tl.load(states_VK, mask=is_there_VK, other=0.0), 0.0)
    return states_VK, state_VK, is_there_VK


@triton.jit
def of_length_one(rows_LK, HAS_UNIT_KEYS: tl.constexpr) -> tl.tensor:
    """Divide rows by their length, where keys are of length one."""
    if HAS_UNIT_KEYS:
        rows_LK *= tl.rsqrt(tl.sum(rows_LK * rows_LK, axis=1) + _EPSILON)[:, None]
    return rows_LK


@triton.jit(do_not_specialize=["most_tokens"])
def recur_kernel(
    query, key, value, log_decay, pool, places, query_starts, seq_lens, blocks,
    query_stride, key_stride, value_stride, num_stripes, block_stride, scaling, beta, out, most_tokens,
    HEADS: tl.constexpr, SHARING: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr, HAS_UNIT_KEYS: tl.constexpr,
    BY_CHANNEL: tl.constexpr, ARE_DECODES: tl.constexpr, KEEPS: tl.constexpr, WAITS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: some rows of one head's state of one sequence, or of several heads with a row each."""
    wait_first(WAITS)
    sequence = tl.program_id(0)
    heads_H, columns_K = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER), tl.arange(0, KEY_WIDTH)
    values_V = tl.program_id(2) * ROWS + tl.arange(0, ROWS) if TOGETHER == 1 else heads_H * 0
    is_head_H, rows_V = heads_H < HEADS, heads_H * VALUE_DIM + values_V
    is_value_V = (values_V < VALUE_DIM) & is_head_H
    is_there_HK = is_head_H[:, None] & (columns_K < KEY_DIM)[None, :]
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    if ARE_DECODES:  # noqa: SIM102 -- a constant, and a number of the device
        if start == end:  # padding has the token of its own number
            of_padding_V = out + sequence.to(tl.int64) * HEADS * VALUE_DIM + rows_V
            tl.store(of_padding_V, tl.zeros([ROWS], tl.float32), mask=is_value_V)
    if (start == end) | (end - start > most_tokens):
        return
    states_VK, state_VK, is_kept_VK = load_state(
        pool, places, blocks, seq_lens, sequence, end - start, rows_V, is_value_V, columns_K,
        HEADS * VALUE_DIM, num_stripes, block_stride, KEY_DIM,
    )  # fmt: skip
    in_group_HK = (heads_H // SHARING * KEY_DIM)[:, None] + columns_K[None, :]
    for token in range(start, end):
        place = tl.cast(token, tl.int64)
        of_heads_H = place * HEADS + heads_H
        if BY_CHANNEL:
            log_decays_HK = log_decay + of_heads_H[:, None] * KEY_DIM + columns_K[None, :]
            state_VK *= tl.exp(tl.load(log_decays_HK, mask=is_there_HK, other=0.0))
        else:
            state_VK *= tl.exp(tl.load(log_decay + of_heads_H, mask=is_head_H, other=0.0))[:, None]
        query_HK = tl.load(query + place * query_stride + in_group_HK, mask=is_there_HK, other=0.0)
        key_HK = tl.load(key + place * key_stride + in_group_HK, mask=is_there_HK, other=0.0)
        query_HK = of_length_one(query_HK.to(tl.float32), HAS_UNIT_KEYS)
        key_HK = of_length_one(key_HK.to(tl.float32), HAS_UNIT_KEYS)
        added_V = tl.load(value + place * value_stride + rows_V, mask=is_value_V, other=0.0).to(tl.float32)
        if beta is not None:
            strength_H = tl.load(beta + of_heads_H, mask=is_head_H, other=0.0).to(tl.float32)
            added_V = (added_V - tl.sum(state_VK * key_HK, axis=1)) * strength_H
        state_VK += added_V[:, None] * key_HK
        out_V = tl.sum(state_VK * (query_HK * scaling), axis=1)
        tl.store(out + place * HEADS * VALUE_DIM + rows_V, out_V, mask=is_value_V)
    if KEEPS:
        tl.store(states_VK, state_VK, mask=is_kept_VK)
