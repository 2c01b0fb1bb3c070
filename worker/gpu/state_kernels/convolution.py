"""Convolutions of recurrent layers on a GPU, each channel by itself over its last inputs.

Owns: the kernels and their launch; a step of decodes takes one, others two: outputs of all tokens first, then
the inputs that each sequence keeps, since several programs read those that were kept before.
Never: functions of the outputs but SiLU (executor.py).

Shapes: T tokens, C channels, W width, J = W - 1 inputs that are kept, R sequences, S blocks of a state.
"""

import triton
import triton.language as tl
from torch import Tensor

from worker.devices.dependent_launch import launch_way, wait_first
from worker.gpu.state_kernels.places import LayerPlaces, StateBatch
from worker.states.interface import Convolution

_MOST_CHANNELS = 128
_TOKENS, _DECODES = 16, 1


def convolve(
    given: Convolution, places: LayerPlaces, batch: StateBatch, out_TC: Tensor, *, is_activated: bool
) -> None:
    """Compute all tokens, and keep the last inputs of each sequence. Rows of out_TC lie side by side."""
    num_tokens, num_channels = given.input_TC.shape
    channels = min(_MOST_CHANNELS, triton.next_power_of_2(num_channels))
    num_parts, num_columns = triton.cdiv(num_channels, channels), given.weight_CW.shape[1] - 1
    tokens = _DECODES if batch.are_decodes else _TOKENS
    of_states = (
        given.input_TC, places.pool, places.table_FX, batch.query_starts_R, batch.seq_lens_R,
        batch.blocks_RS, *given.input_TC.stride(), batch.blocks_RS.shape[1], places.block_stride,
        num_channels,
    )  # fmt: skip
    convolve_kernel[triton.cdiv(num_tokens, tokens), num_parts](
        *of_states, given.weight_CW, given.bias_C, out_TC, *given.weight_CW.stride(), num_tokens,
        batch.num_sequences,
        COLUMNS=num_columns, TOKENS=tokens, CHANNELS=channels, IS_ACTIVATED=is_activated,
        SEARCHES=batch.num_sequences.bit_length(), ARE_DECODES=batch.are_decodes,
        KEEPS=batch.keeps_states, **launch_way(),
    )  # fmt: skip
    if batch.keeps_states and not batch.are_decodes:
        keep_inputs_kernel[batch.num_sequences, num_parts](
            *of_states, COLUMNS=num_columns, CHANNELS=channels, **launch_way()
        )


@triton.jit
def _kept_inputs(
    pool, places, blocks, sequences_T, is_there_T, channels_C, num_channels, num_stripes, block_stride
) -> tl.tuple:  # fmt: skip
    """Point to the first inputs that sequences keep [T, C]; with the way to the next, and what is kept."""
    is_channel_C = channels_C < num_channels
    stripes_C = tl.load(places + channels_C, mask=is_channel_C, other=0)
    offsets_C = tl.load(places + num_channels + channels_C, mask=is_channel_C, other=0)
    strides_C = tl.load(places + 2 * num_channels + channels_C, mask=is_channel_C, other=0)
    is_there_TC = is_there_T[:, None] & is_channel_C[None, :]
    blocks_TC = tl.load(
        blocks + sequences_T[:, None] * num_stripes + stripes_C[None, :], mask=is_there_TC, other=0
    )
    kept_TC = pool + blocks_TC.to(tl.int64) * block_stride + offsets_C[None, :]
    return kept_TC, strides_C, is_there_TC & (blocks_TC > 0)


@triton.jit
def _keep_inputs(
    inputs_C, kept_TC, strides_C, is_kept_TC, is_later, num_tokens, token_stride, COLUMNS: tl.constexpr
) -> None:
    """Let the last of the kept inputs and of a share's be those that are kept; all programs have read."""
    for column in tl.static_range(COLUMNS):
        place = num_tokens - COLUMNS + column
        own_TC = tl.load(inputs_C[None, :] + tl.maximum(place, 0) * token_stride, mask=is_kept_TC, other=0.0)
        before = tl.minimum(column + num_tokens, COLUMNS - 1)
        earlier_TC = tl.load(kept_TC + before * strides_C[None, :], mask=is_kept_TC, other=0.0)
        last_TC = tl.where(place >= 0, own_TC, tl.where(is_later, earlier_TC, 0.0))
        tl.debug_barrier()
        tl.store(kept_TC + column * strides_C[None, :], last_TC, mask=is_kept_TC)
        tl.debug_barrier()


@triton.jit
def keep_inputs_kernel(
    inputs, pool, places, query_starts, seq_lens, blocks, token_stride, channel_stride, num_stripes,
    block_stride, num_channels,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, WAITS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: some channels of one sequence."""
    wait_first(WAITS)
    sequence, channels_C = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    if start == end:
        return
    sequences_1 = sequence + tl.arange(0, 1)
    kept_1C, strides_C, is_kept_1C = _kept_inputs(
        pool, places, blocks, sequences_1, sequences_1 >= 0, channels_C, num_channels, num_stripes,
        block_stride,
    )  # fmt: skip
    inputs_C = inputs + start.to(tl.int64) * token_stride + channels_C * channel_stride
    is_later = tl.load(seq_lens + sequence) > end - start
    _keep_inputs(inputs_C, kept_1C, strides_C, is_kept_1C, is_later, end - start, token_stride, COLUMNS)


@triton.jit(do_not_specialize=["num_sequences", "num_tokens"])
def convolve_kernel(
    inputs, pool, places, query_starts, seq_lens, blocks, token_stride, channel_stride, num_stripes,
    block_stride, num_channels, weight, bias, out, weight_stride, column_stride, num_tokens, num_sequences,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, IS_ACTIVATED: tl.constexpr,
    SEARCHES: tl.constexpr, ARE_DECODES: tl.constexpr, KEEPS: tl.constexpr, WAITS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: some channels of some tokens. Padding gets zeros."""
    wait_first(WAITS)
    tokens_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channels_C = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel_C, is_token_T = channels_C < num_channels, tokens_T < num_tokens
    sequences_T = tokens_T
    if not ARE_DECODES:
        sequences_T, above_T = tokens_T * 0, tokens_T * 0 + num_sequences
        for _ in tl.static_range(SEARCHES):  # the last sequence that does not begin behind the token
            middle_T = (sequences_T + above_T) // 2
            is_before_T = tl.load(query_starts + middle_T) <= tokens_T
            sequences_T = tl.where(is_before_T, middle_T, sequences_T)
            above_T = tl.where(is_before_T, above_T, middle_T)
    starts_T = tl.load(query_starts + sequences_T, mask=is_token_T, other=0)
    ends_T = tl.load(query_starts + sequences_T + 1, mask=is_token_T, other=0)
    places_T = tokens_T - starts_T
    is_there_T = is_token_T & (tokens_T < ends_T)
    is_later_T = tl.load(seq_lens + sequences_T, mask=is_token_T, other=0) > ends_T - starts_T
    kept_TC, strides_C, is_kept_TC = _kept_inputs(
        pool, places, blocks, sequences_T, is_there_T, channels_C, num_channels, num_stripes, block_stride
    )
    inputs_TC = inputs + tokens_T.to(tl.int64)[:, None] * token_stride + channels_C[None, :] * channel_stride
    sums_TC = tl.zeros([TOKENS, CHANNELS], tl.float32)
    if bias is not None:
        sums_TC += tl.load(bias + channels_C, mask=is_channel_C, other=0.0).to(tl.float32)[None, :]
    for column in tl.static_range(COLUMNS + 1):
        is_own_T = is_there_T & (places_T + column >= COLUMNS)
        input_TC = tl.load(
            inputs_TC + (column - COLUMNS) * token_stride, mask=is_own_T[:, None] & is_channel_C[None, :],
            other=0.0,
        )  # fmt: skip
        is_earlier_T = is_later_T & (places_T + column < COLUMNS)
        earlier_TC = tl.load(
            kept_TC + (places_T + column)[:, None] * strides_C[None, :],
            mask=is_kept_TC & is_earlier_T[:, None], other=0.0,
        )  # fmt: skip
        weights_C = tl.load(
            weight + channels_C * weight_stride + column * column_stride, mask=is_channel_C, other=0.0
        )
        sums_TC += tl.where(is_own_T[:, None], input_TC, earlier_TC).to(tl.float32) * weights_C.to(tl.float32)
    rounded_TC = sums_TC.to(weight.dtype.element_ty)
    if IS_ACTIVATED:
        sums_TC = rounded_TC.to(tl.float32)
        rounded_TC = (sums_TC / (1 + tl.exp(-sums_TC))).to(weight.dtype.element_ty)
    rounded_TC = tl.where(is_there_T[:, None], rounded_TC, 0.0).to(out.dtype.element_ty)
    tl.store(
        out + tokens_T.to(tl.int64)[:, None] * num_channels + channels_C[None, :], rounded_TC,
        mask=is_token_T[:, None] & is_channel_C[None, :],
    )  # fmt: skip
    if ARE_DECODES and KEEPS:
        tl.debug_barrier()
        # One program has one sequence, or padding.
        is_later, num_own = tl.sum(is_later_T.to(tl.int32)) > 0, tl.sum(is_there_T.to(tl.int32))
        inputs_C = inputs + tl.program_id(0).to(tl.int64) * token_stride + channels_C * channel_stride
        _keep_inputs(inputs_C, kept_TC, strides_C, is_kept_TC, is_later, num_own, token_stride, COLUMNS)
