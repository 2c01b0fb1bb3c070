"""Products by weights that are codes with scales of groups, decoded in registers.

Owns: two kernels: `multiply_codes_kernel` decodes and multiplies, `write_numbers_kernel` writes what codes
stand for.
Source: mixed-precision products as in Marlin, arXiv:2408.11743, with the weight as the left factor: a tensor
core then takes it from registers, where it was decoded. Unlike there, sums are scaled and not the weight, so
that no number of it is rounded but by `write_numbers_kernel`. Split-K as in Stream-K, arXiv:2301.03598.

A tile has one range of INPUTS inputs for each code in a word of 16 bits. A group is one or more ranges of a
tile, or whole tiles.

Shapes: T tokens, N outputs, K inputs, G groups of inputs, S splits of K.
"""

import triton
import triton.language as tl

from worker.devices.dependent_launch import wait_first
from worker.devices.last_arrival import is_last_arrival
from worker.gpu.quantized.kernels.numbers import INT8, decode_by_bits, decode_range
from worker.gpu.quantized.kernels.scales import as_numbers, begin_of_expert, count_rows, load_of_tile

_INT8 = tl.constexpr(INT8)


@triton.jit
def _add_scaled(
    totals, sums, input_sums, scales, group: tl.constexpr, SHORT: tl.constexpr, HAS_OFFSETS: tl.constexpr
):  # fmt: skip
    """Add the sums of a tile's group times its scales, less its offsets times the sums of inputs."""
    totals += sums * as_numbers(scales[0], group, SHORT)[:, None]
    if HAS_OFFSETS:
        totals -= input_sums * as_numbers(scales[1], group, SHORT)[:, None]
    return totals


@triton.jit
def _find_rows(
    tile, pairs_ptr, expert_of_tile_ptr, start_of_tile_ptr, end_of_tile_ptr, num_tokens,
    NUM_CHOSEN: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Return the expert of a tile, its rows of input, its rows of output, and which of them there are.

    Without a router all rows are of one weight. With NUM_CHOSEN, input rows are tokens, of which each pair
    has one, and output rows stand in the order of experts; with NUM_CHOSEN of 0 it is the other way about.
    """
    rows = tile * TOKENS + tl.arange(0, TOKENS)
    if pairs_ptr is None:
        return tile.to(tl.int64) * 0, rows.to(tl.int64), rows.to(tl.int64), rows < num_tokens
    else:
        expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64)
        places = tl.load(start_of_tile_ptr + tile) + tl.arange(0, TOKENS)
        is_pair = places < tl.load(end_of_tile_ptr + tile)
        pairs = tl.load(pairs_ptr + places, mask=is_pair, other=0).to(tl.int64)
        if NUM_CHOSEN > 0:
            return expert, pairs // NUM_CHOSEN, places.to(tl.int64), is_pair
        else:
            return expert, places.to(tl.int64), pairs, is_pair


@triton.jit
def _multiply_tiles(
    x_ptrs, word_ptrs, table_ptr, scales_ptr, offsets_ptr, outputs, is_output, is_row,
    num_outputs, num_inputs, num_rows, tile_stride, first_tile, end_tile,
    CODES: tl.constexpr, BY_BITS: tl.constexpr, GROUP: tl.constexpr, SHORT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Return the scaled sums over some tiles of inputs: [OUTPUTS, TOKENS]. A GROUP of 0 is all inputs."""
    NUM_RANGES: tl.constexpr = 2 if CODES >= _INT8 else 4
    TILE: tl.constexpr = NUM_RANGES * INPUTS
    NUM_GROUPS: tl.constexpr = TILE // GROUP if (GROUP > 0) and (GROUP < TILE) else 1
    SPAN: tl.constexpr = NUM_RANGES // NUM_GROUPS
    HAS_OFFSETS: tl.constexpr = offsets_ptr is not None
    DTYPE: tl.constexpr = x_ptrs.dtype.element_ty
    ones = tl.full([OUTPUTS, INPUTS], 1.0, DTYPE)  # sums of inputs come out where those of products are
    totals = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    sums = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    input_sums = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    scales = load_of_tile(
        scales_ptr, offsets_ptr, first_tile, outputs, is_output, num_outputs, num_rows, GROUP, TILE
    )
    for tile in range(first_tile, end_tile):
        following = scales
        if GROUP > 0:
            following = load_of_tile(
                scales_ptr, offsets_ptr, tile + 1, outputs, is_output, num_outputs, num_rows, GROUP, TILE
            )
        words = tl.load(word_ptrs + tile * tile_stride.to(tl.int64), mask=is_output[:, None], other=0)
        if BY_BITS:
            numbers = decode_by_bits(words, CODES, DTYPE)
        for place in tl.static_range(NUM_RANGES):
            first = tile * TILE + place * INPUTS
            is_there = is_row[None, :]
            if not IS_WHOLE:
                is_there = is_there & (tl.arange(0, INPUTS) < num_inputs - first)[:, None]
            x = tl.load(x_ptrs + first, mask=is_there, other=0.0)
            weight = numbers[place] if BY_BITS else decode_range(words, table_ptr, place, CODES, DTYPE)
            sums = tl.dot(weight, x, sums, input_precision=PRECISION)
            if HAS_OFFSETS:
                input_sums = tl.dot(ones, x, input_sums, input_precision=PRECISION)
            if (GROUP > 0) and ((place + 1) % SPAN == 0):
                totals = _add_scaled(totals, sums, input_sums, scales, place // SPAN, SHORT, HAS_OFFSETS)
                sums = tl.zeros([OUTPUTS, TOKENS], tl.float32)
                input_sums = tl.zeros([OUTPUTS, TOKENS], tl.float32)
        scales = following
    if GROUP == 0:
        totals = _add_scaled(totals, sums, input_sums, scales, 0, SHORT, HAS_OFFSETS)
    return totals


@triton.jit(do_not_specialize=["num_tokens", "tiles_per_split", "num_splits"])
def multiply_codes_kernel(
    x_ptr, row_scales_ptr, words_ptr, table_ptr, scales_ptr, offsets_ptr, bias_ptr, target_ptr,
    parts_ptr, arrivals_ptr, pairs_ptr, expert_of_tile_ptr, start_of_tile_ptr, end_of_tile_ptr,
    num_tokens, num_outputs, num_inputs, expert_stride, row_stride, tile_stride, token_stride,
    tiles_per_split, num_splits, multiplier,
    CODES: tl.constexpr, BY_BITS: tl.constexpr, GROUP: tl.constexpr, SHORT: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, IS_WHOLE: tl.constexpr, ADDS: tl.constexpr, PRECISION: tl.constexpr,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr, WAITS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: some outputs of some tokens, over its share of the tiles of inputs.

    With `parts_ptr` each leaves its sums there, and the last of those that share outputs adds them up, always
    in the same order. `arrivals_ptr` are zeros, and are zero again when the launch ends.
    """
    wait_first(WAITS)
    expert, source_rows, target_rows, is_row = _find_rows(
        tl.program_id(1), pairs_ptr, expert_of_tile_ptr, start_of_tile_ptr, end_of_tile_ptr, num_tokens,
        NUM_CHOSEN, TOKENS,
    )  # fmt: skip
    if expert < 0:
        return
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_outputs
    inputs = tl.arange(0, INPUTS)
    TILE: tl.constexpr = INPUTS * (2 if CODES >= _INT8 else 4)
    num_rows = count_rows(num_inputs, GROUP, TILE)
    scales_ptr = begin_of_expert(scales_ptr, expert, num_outputs, num_rows)
    if offsets_ptr is not None:
        offsets_ptr = begin_of_expert(offsets_ptr, expert, num_outputs, num_rows)
    first_tile = tl.program_id(2) * tiles_per_split
    totals = _multiply_tiles(
        x_ptr + (source_rows * token_stride)[None, :] + inputs[:, None],
        words_ptr + expert * expert_stride + (outputs.to(tl.int64) * row_stride)[:, None] + inputs[None, :],
        table_ptr, scales_ptr, offsets_ptr, outputs, is_output, is_row, num_outputs, num_inputs, num_rows,
        tile_stride, first_tile, tl.minimum(first_tile + tiles_per_split, tl.cdiv(num_inputs, TILE)),
        CODES, BY_BITS, GROUP, SHORT, IS_WHOLE, PRECISION, OUTPUTS, TOKENS, INPUTS,
    )  # fmt: skip
    is_last = True
    if parts_ptr is not None:
        totals, is_last = _add_parts(totals, parts_ptr, arrivals_ptr, num_splits, OUTPUTS, TOKENS)
    if is_last:
        if row_scales_ptr is not None:
            totals *= tl.load(row_scales_ptr + source_rows, mask=is_row, other=0.0)[None, :]
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert * num_outputs + outputs, mask=is_output, other=0.0)
            totals += bias.to(tl.float32)[:, None]
        targets = target_ptr + target_rows[None, :] * num_outputs + outputs[:, None]
        _store(targets, totals, multiplier, is_row[None, :] & is_output[:, None], ADDS)


@triton.jit
def _store(target_ptrs, results, multiplier, mask, ADDS: tl.constexpr) -> None:
    """Store results, or add them, times a factor, to the target."""
    if ADDS:
        results = results * multiplier + tl.load(target_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(target_ptrs, results.to(target_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _add_parts(
    totals, parts_ptr, arrivals_ptr, num_splits, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr
) -> tl.tuple:  # fmt: skip
    """Store a part [OUTPUTS, TOKENS]; the last program returns the sum of all parts and True."""
    outputs = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    places = tl.arange(0, OUTPUTS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    parts = parts_ptr + outputs.to(tl.int64) * num_splits * (OUTPUTS * TOKENS) + places
    tl.store(parts + tl.program_id(2) * (OUTPUTS * TOKENS), totals)
    is_last = is_last_arrival(arrivals_ptr + outputs, num_splits)
    if is_last:
        totals = tl.zeros([OUTPUTS, TOKENS], tl.float32)
        for split in range(0, num_splits):
            # Others have written them: not to be read from the cache of this processor.
            totals += tl.load(parts + split * (OUTPUTS * TOKENS), cache_modifier=".cg")
    return totals, is_last


@triton.jit
def write_numbers_kernel(
    words_ptr, table_ptr, scales_ptr, offsets_ptr, numbers_ptr,
    num_outputs, num_inputs, row_stride, tile_stride,
    CODES: tl.constexpr, BY_BITS: tl.constexpr, GROUP: tl.constexpr, SHORT: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: the numbers of a tile of inputs for some outputs, in float32, rounded once."""
    NUM_RANGES: tl.constexpr = 2 if CODES >= _INT8 else 4
    TILE: tl.constexpr = NUM_RANGES * INPUTS
    SPAN: tl.constexpr = GROUP // INPUTS if (GROUP > 0) and (GROUP < TILE) else NUM_RANGES
    tile = tl.program_id(0)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_outputs
    inputs = tl.arange(0, INPUTS)
    rows = outputs.to(tl.int64)[:, None]
    words = tl.load(
        words_ptr + rows * row_stride + tile * tile_stride.to(tl.int64) + inputs[None, :],
        mask=is_output[:, None],
        other=0,
    )
    num_rows = count_rows(num_inputs, GROUP, TILE)
    scales, offsets = load_of_tile(
        scales_ptr, offsets_ptr, tile, outputs, is_output, num_outputs, num_rows, GROUP, TILE
    )
    if BY_BITS:
        decoded = decode_by_bits(words, CODES, numbers_ptr.dtype.element_ty)
    for place in tl.static_range(NUM_RANGES):
        first = tile * TILE + place * INPUTS
        numbers = decoded[place] if BY_BITS else decode_range(words, table_ptr, place, CODES, tl.float32)
        numbers = numbers.to(tl.float32) * as_numbers(scales, place // SPAN, SHORT)[:, None]
        if offsets_ptr is not None:
            numbers -= as_numbers(offsets, place // SPAN, SHORT)[:, None]
        is_there = is_output[:, None] & (inputs < num_inputs - first)[None, :]
        places = rows * num_inputs + (first + inputs)[None, :]
        tl.store(numbers_ptr + places, numbers.to(numbers_ptr.dtype.element_ty), mask=is_there)
