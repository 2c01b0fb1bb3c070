"""Convolutions of recurrent layers on a GPU, each channel by itself over its last inputs.

The first part of a share alone reads what the sequence kept, so that it can write as well what is kept from
now on.

Shapes: T tokens, C channels, W width, R sequences, S blocks of a state.
"""

import triton
import triton.language as tl
from torch import Tensor

from worker.devices.dependent_launch import launch_way, wait_first
from worker.gpu.state_kernels.places import LayerPlaces, StateBatch
from worker.states.interface import Convolution

_MOST_CHANNELS = 128
_TOKENS = 16


def convolve(
    given: Convolution, places: LayerPlaces, batch: StateBatch, out_TC: Tensor, *, is_activated: bool
) -> None:
    """Compute all tokens, and keep the last inputs of each sequence. Padding of decodes gets zeros."""
    num_tokens, num_channels = given.input_TC.shape
    channels, num_columns = (
        min(_MOST_CHANNELS, triton.next_power_of_2(num_channels)),
        given.weight_CW.shape[1] - 1,
    )
    tokens = 1 if batch.are_decodes else max(_TOKENS, triton.next_power_of_2(num_columns))
    num_parts = num_tokens if batch.are_decodes else num_tokens // tokens + batch.num_sequences
    convolve_kernel[num_parts, triton.cdiv(num_channels, channels)](
        given.input_TC, given.weight_CW, given.bias_C, out_TC, places.pool, places.table_FX,
        batch.query_starts_R, batch.seq_lens_R, batch.blocks_RS, *given.input_TC.stride(),
        *given.weight_CW.stride(), batch.blocks_RS.shape[1], places.block_stride, batch.num_sequences,
        num_channels, COLUMNS=num_columns, TOKENS=tokens, CHANNELS=channels, IS_ACTIVATED=is_activated,
        SEARCHES=not batch.are_decodes, KEEPS=batch.keeps_states,
        **launch_way(),
    )  # fmt: skip


@triton.jit
def find_part(query_starts, number, num_sequences, SIZE: tl.constexpr, SEARCHES: tl.constexpr) -> tl.tuple:
    """Find the sequence that part `number` of the step belongs to, the part's first token, and its share.

    Sequence r has numbers for its parts of SIZE tokens from start // SIZE + r on; some are behind its end.
    Without searches the step is of decodes: part and token have the sequence's number, those of padding too.
    """
    sequence = number * 0 if SEARCHES else number
    if SEARCHES:
        above = number * 0 + num_sequences
        while above - sequence > 1:
            middle = (sequence + above) // 2
            is_before = tl.load(query_starts + middle) // SIZE + middle <= number
            sequence, above = tl.where(is_before, middle, sequence), tl.where(is_before, above, middle)
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    first = start + (number - start // SIZE - sequence) * SIZE if SEARCHES else number
    return sequence, first, start, end


@triton.jit(do_not_specialize=["num_sequences"])
def convolve_kernel(
    inputs, weight, bias, out, pool, places, query_starts, seq_lens, blocks, token_stride, channel_stride,
    weight_stride, column_stride, num_stripes, block_stride, num_sequences, num_channels,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, IS_ACTIVATED: tl.constexpr,
    SEARCHES: tl.constexpr, KEEPS: tl.constexpr, WAITS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: some channels of some tokens of one sequence."""
    wait_first(WAITS)
    number = tl.program_id(0)
    sequence, first, start, end = find_part(query_starts, number, num_sequences, TOKENS, SEARCHES)
    if SEARCHES:  # noqa: SIM102 -- a constant, and a number of the device
        if first >= end:
            return
    tokens_T, channels_C = first + tl.arange(0, TOKENS), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_there_T, is_channel_C = tokens_T < end, channels_C < num_channels
    stripes_C = tl.load(places + channels_C, mask=is_channel_C, other=0)
    offsets_C = tl.load(places + num_channels + channels_C, mask=is_channel_C, other=0)
    strides_C = tl.load(places + 2 * num_channels + channels_C, mask=is_channel_C, other=0)
    blocks_C = tl.load(blocks + sequence * num_stripes + stripes_C, mask=is_channel_C, other=0)
    kept_C, is_kept_C = pool + blocks_C.to(tl.int64) * block_stride + offsets_C, is_channel_C & (blocks_C > 0)
    is_later = tl.load(seq_lens + sequence) > end - start
    inputs_C = inputs + start.to(tl.int64) * token_stride + channels_C.to(tl.int64) * channel_stride
    sums_TC = tl.zeros([TOKENS, CHANNELS], tl.float32)
    if bias is not None:
        sums_TC += tl.load(bias + channels_C, mask=is_channel_C, other=0.0).to(tl.float32)[None, :]
    for column in tl.static_range(COLUMNS + 1):
        places_T = tokens_T - start + column - COLUMNS  # in the share; before it is what was kept
        is_own_T = places_T >= 0
        own_TC = tl.load(
            inputs_C[None, :] + places_T.to(tl.int64)[:, None] * token_stride,
            mask=(is_there_T & is_own_T)[:, None] & is_channel_C[None, :], other=0.0,
        )  # fmt: skip
        kept_TC = tl.load(
            kept_C[None, :] + (places_T + COLUMNS)[:, None] * strides_C[None, :],
            mask=(is_there_T & (places_T < 0))[:, None] & is_kept_C[None, :], other=0.0,
        )  # fmt: skip
        input_TC = tl.where(is_own_T[:, None], own_TC, tl.where(is_later, kept_TC, 0.0)).to(tl.float32)
        weights = weight + channels_C * weight_stride + column * column_stride
        sums_TC += input_TC * tl.load(weights, mask=is_channel_C, other=0.0).to(tl.float32)[None, :]
    _store_outputs(
        sums_TC, out, weight, tokens_T, is_there_T, channels_C, num_channels, SEARCHES, IS_ACTIVATED
    )
    if KEEPS:  # noqa: SIM102
        if (first == start) & (start < end):
            _keep_inputs(inputs_C, kept_C, strides_C, is_kept_C, is_later, end - start, token_stride, COLUMNS)


@triton.jit
def _store_outputs(
    sums_TC, out, weight, tokens_T, is_there_T, channels_C, num_channels,
    SEARCHES: tl.constexpr, IS_ACTIVATED: tl.constexpr,
) -> None:  # fmt: skip
    rounded_TC = sums_TC.to(weight.dtype.element_ty)
    if IS_ACTIVATED:
        sums_TC = rounded_TC.to(tl.float32)
        rounded_TC = (sums_TC / (1 + tl.exp(-sums_TC))).to(weight.dtype.element_ty)
    rounded_TC = tl.where(is_there_T[:, None], rounded_TC, 0.0).to(out.dtype.element_ty)
    is_stored_T = is_there_T if SEARCHES else tokens_T >= 0
    out_TC = out + tokens_T.to(tl.int64)[:, None] * num_channels + channels_C[None, :]
    tl.store(out_TC, rounded_TC, mask=is_stored_T[:, None] & (channels_C < num_channels)[None, :])


@triton.jit
def _keep_inputs(
    inputs_C, kept_C, strides_C, is_kept_C, is_later, num_own, token_stride, COLUMNS: tl.constexpr
) -> None:
    """Keep the last of what was kept and of the share; all threads have read by then."""
    for column in tl.static_range(COLUMNS):
        place = (num_own - COLUMNS + column).to(tl.int64)
        own_C = tl.load(inputs_C + tl.maximum(place, 0) * token_stride, mask=is_kept_C, other=0.0)
        before = tl.minimum(column + num_own, COLUMNS - 1)
        earlier_C = tl.load(kept_C + before * strides_C, mask=is_kept_C, other=0.0)
        last_C = tl.where(place >= 0, own_C, tl.where(is_later, earlier_C, 0.0))
        tl.debug_barrier()
        tl.store(kept_C + column * strides_C, last_C, mask=is_kept_C)
        tl.debug_barrier()
