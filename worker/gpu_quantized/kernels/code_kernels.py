"""Products by weights that are codes with scales of groups, decoded in registers.

Owns: three kernels: `multiply_codes_kernel` decodes and multiplies, `add_parts_kernel` adds what several
programs have of the same outputs, `write_numbers_kernel` writes what codes stand for.
Never: the choice of tiles or the order of codes in memory (code_products.py), or the router of experts.
Source: mixed-precision products as in Marlin, arXiv:2408.11743, with the weight as the left factor: a tensor
core then takes it from registers, where it was decoded. Unlike there, sums are scaled and not the weight, so
that no number of it is rounded but by `write_numbers_kernel`.

Numbers of a code are whole numbers up to 8 bits or floats of 8 bits or fewer: bfloat16 and float16 hold them
exactly. A tile is INPUTS of one or two ranges of inputs: of codes of four bits, the lower ones are the first
range.

Shapes: T tokens, N outputs, K inputs, G groups of inputs, B bytes of a row of codes, S splits of K.
"""

import triton
import triton.language as tl

NIBBLES_IN_ORDER, NIBBLES_E2M1, NIBBLES_BY_TABLE, INT8, FLOAT8 = range(5)
"""Values of CODES."""
_IN_ORDER = tl.constexpr(NIBBLES_IN_ORDER)
_BY_TABLE = tl.constexpr(NIBBLES_BY_TABLE)
_INT8 = tl.constexpr(INT8)
_FLOAT8 = tl.constexpr(FLOAT8)


@triton.jit
def _decode(
    raw, table_ptr, half: tl.constexpr, CODES: tl.constexpr, FIRST: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Return the numbers of codes."""
    if CODES == _INT8:
        return raw.to(tl.int8, bitcast=True).to(tl.float32).to(DTYPE)
    if CODES == _FLOAT8:
        return raw.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(DTYPE)
    if (CODES == _IN_ORDER) and (tl.float32 != DTYPE):
        # Behind the bits of 128, or of 1024 in float16, codes are what they are more than it: no conversion.
        BITS: tl.constexpr = 0x4300 if tl.bfloat16 == DTYPE else 0x6400
        BASE: tl.constexpr = (128.0 if tl.bfloat16 == DTYPE else 1024.0) - FIRST
        bits = ((raw >> (4 * half)) & 15).to(tl.uint16) | BITS
        return bits.to(DTYPE, bitcast=True) - BASE
    codes = (raw >> (4 * half)).to(tl.int32) & 15
    if CODES == _IN_ORDER:
        return (codes + FIRST).to(DTYPE)
    if CODES == _BY_TABLE:
        return tl.load(table_ptr + codes).to(DTYPE)
    # Two bits of exponent and one of mantissa move to their places in a float; below 1 numbers are halves.
    size = codes & 7
    normal = ((size << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(size < 2, size.to(tl.float32) * 0.5, normal)
    return tl.where(codes < 8, number, -number).to(DTYPE)


@triton.jit
def _load_scales(
    scales_ptr, offsets_ptr, first, outputs, is_output, num_outputs, num_groups, GROUP: tl.constexpr
) -> tl.tuple:  # fmt: skip
    """Load scales and offsets of the group of an input; beyond the last input, of the last group."""
    group = 0 if GROUP == 0 else tl.minimum(first // GROUP, num_groups - 1)
    place = group * num_outputs + outputs
    scales = tl.load(scales_ptr + place, mask=is_output, other=0.0).to(tl.float32)
    offsets = scales  # nobody looks at these
    if offsets_ptr is not None:
        offsets = tl.load(offsets_ptr + place, mask=is_output, other=0.0).to(tl.float32)
    return scales, offsets


@triton.jit
def _load_tile_scales(
    scales_ptr, offsets_ptr, first, outputs, is_output, num_outputs, num_groups,
    GROUP: tl.constexpr, UPPER: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Load those of a tile's first input, and of the input UPPER behind it if that is of another group."""
    scales, offsets = _load_scales(
        scales_ptr, offsets_ptr, first, outputs, is_output, num_outputs, num_groups, GROUP
    )
    upper_scales, upper_offsets = scales, offsets
    if UPPER > 0:
        upper_scales, upper_offsets = _load_scales(
            scales_ptr, offsets_ptr, first + UPPER, outputs, is_output, num_outputs, num_groups, GROUP
        )
    return scales, offsets, upper_scales, upper_offsets


@triton.jit
def _scaled(sums, input_sums, scales, offsets, HAS_OFFSETS: tl.constexpr):
    """Return the sums of one group times its scales, less its offsets times the sums of inputs."""
    scaled = sums * scales[:, None]
    if HAS_OFFSETS:
        scaled -= offsets[:, None] * input_sums[None, :]
    return scaled


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
    x_ptrs, code_ptrs, table_ptr, scales_ptr, offsets_ptr, outputs, is_output, is_row,
    num_outputs, num_inputs, num_groups, first_tile, end_tile,
    CODES: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Return the scaled sums over some tiles of inputs: [OUTPUTS, TOKENS]. A GROUP of 0 is all inputs."""
    HALVES: tl.constexpr = 1 if CODES >= _INT8 else 2
    SHARES_GROUP: tl.constexpr = (HALVES == 1) or (GROUP == 0) or (GROUP % (2 * INPUTS) == 0)
    HAS_OFFSETS: tl.constexpr = offsets_ptr is not None
    inputs = tl.arange(0, INPUTS)
    totals = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    sums = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    input_sums = tl.zeros([TOKENS], tl.float32)
    # Scales are on their way a tile ahead: a product that is done would wait for them once for each group.
    TILE: tl.constexpr = HALVES * INPUTS
    UPPER: tl.constexpr = 0 if SHARES_GROUP else INPUTS
    scales, offsets, upper_scales, upper_offsets = _load_tile_scales(
        scales_ptr, offsets_ptr, first_tile * TILE, outputs, is_output, num_outputs, num_groups, GROUP, UPPER
    )
    for tile in range(first_tile, end_tile):
        following = scales, offsets, upper_scales, upper_offsets
        if GROUP > 0:
            following = _load_tile_scales(
                scales_ptr, offsets_ptr, (tile + 1) * TILE, outputs, is_output, num_outputs, num_groups,
                GROUP, UPPER,
            )  # fmt: skip
        raw = tl.load(code_ptrs + tile * INPUTS, mask=is_output[:, None], other=0)
        for half in tl.static_range(HALVES):
            first = (tile * HALVES + half) * INPUTS
            is_there = (inputs < num_inputs - first)[:, None] & is_row[None, :]
            x = tl.load(x_ptrs + first, mask=is_there, other=0.0)
            weight = _decode(raw, table_ptr, half, CODES, FIRST, x.dtype)
            sums = tl.dot(weight, x, sums, input_precision=PRECISION)
            if HAS_OFFSETS:
                input_sums += tl.sum(x.to(tl.float32), axis=0)
            if (GROUP > 0) and ((not SHARES_GROUP) or (half == HALVES - 1)):
                if (half == 0) or SHARES_GROUP:
                    totals += _scaled(sums, input_sums, scales, offsets, HAS_OFFSETS)
                else:
                    totals += _scaled(sums, input_sums, upper_scales, upper_offsets, HAS_OFFSETS)
                sums = tl.zeros([OUTPUTS, TOKENS], tl.float32)
                input_sums = tl.zeros([TOKENS], tl.float32)
        scales, offsets, upper_scales, upper_offsets = following
    if GROUP == 0:
        totals = _scaled(sums, input_sums, scales, offsets, HAS_OFFSETS)
    return totals


@triton.jit(do_not_specialize=["num_tokens", "tiles_per_split"])
def multiply_codes_kernel(
    x_ptr, codes_ptr, table_ptr, scales_ptr, offsets_ptr, bias_ptr, target_ptr, parts_ptr,
    pairs_ptr, expert_of_tile_ptr, start_of_tile_ptr, end_of_tile_ptr,
    num_tokens, num_outputs, num_inputs, num_groups, row_bytes, token_stride, tiles_per_split, multiplier,
    CODES: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    ADDS: tl.constexpr, PRECISION: tl.constexpr,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: some outputs of some tokens, over its share of the tiles of inputs.

    With `parts_ptr`, the sums of this share go there, and nothing else is done.
    """
    expert, source_rows, target_rows, is_row = _find_rows(
        tl.program_id(1), pairs_ptr, expert_of_tile_ptr, start_of_tile_ptr, end_of_tile_ptr, num_tokens,
        NUM_CHOSEN, TOKENS,
    )  # fmt: skip
    if expert < 0:
        return
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_outputs
    inputs = tl.arange(0, INPUTS)
    of_expert = expert * num_outputs
    scales_ptr += of_expert * num_groups
    if offsets_ptr is not None:
        offsets_ptr += of_expert * num_groups
    first_tile = tl.program_id(2) * tiles_per_split
    num_tiles = tl.cdiv(num_inputs, INPUTS if CODES >= _INT8 else 2 * INPUTS)
    totals = _multiply_tiles(
        x_ptr + (source_rows * token_stride)[None, :] + inputs[:, None],
        codes_ptr + (of_expert + outputs)[:, None] * row_bytes + inputs[None, :],
        table_ptr, scales_ptr, offsets_ptr, outputs, is_output, is_row, num_outputs, num_inputs, num_groups,
        first_tile, tl.minimum(first_tile + tiles_per_split, num_tiles),
        CODES, FIRST, GROUP, PRECISION, OUTPUTS, TOKENS, INPUTS,
    )  # fmt: skip
    mask = is_row[:, None] & is_output[None, :]
    targets = target_rows[:, None] * num_outputs + outputs[None, :]
    results = tl.trans(totals)
    if parts_ptr is not None:
        tl.store(
            parts_ptr + tl.program_id(2).to(tl.int64) * num_tokens * num_outputs + targets, results, mask
        )
    else:
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + of_expert + outputs, mask=is_output, other=0.0)
            results += bias.to(tl.float32)[None, :]
        _store(target_ptr + targets, results, multiplier, mask, ADDS)


@triton.jit
def _store(target_ptrs, results, multiplier, mask, ADDS: tl.constexpr):
    """Store results, or add them, times a factor, to what is there."""
    if ADDS:
        results = results * multiplier + tl.load(target_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(target_ptrs, results.to(target_ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_numbers", "num_splits"])
def add_parts_kernel(
    parts_ptr, bias_ptr, target_ptr, num_numbers, num_outputs, num_splits, multiplier,
    ADDS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One program: some outputs, whose parts are added in the order of the splits."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = places < num_numbers
    totals = tl.zeros([BLOCK], tl.float32)
    for _ in range(0, num_splits):
        totals += tl.load(parts_ptr + places, mask=is_there, other=0.0)
        parts_ptr += num_numbers
    if bias_ptr is not None:
        totals += tl.load(bias_ptr + places % num_outputs, mask=is_there, other=0.0).to(tl.float32)
    _store(target_ptr + places, totals, multiplier, is_there, ADDS)


@triton.jit
def write_numbers_kernel(
    codes_ptr, table_ptr, scales_ptr, offsets_ptr, numbers_ptr,
    num_outputs, num_inputs, num_groups, row_bytes,
    CODES: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: the numbers of a tile of inputs for some outputs, in float32, rounded once."""
    HALVES: tl.constexpr = 1 if CODES >= _INT8 else 2
    tile = tl.program_id(0)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_outputs
    inputs = tl.arange(0, INPUTS)
    rows = outputs.to(tl.int64)[:, None]
    raw = tl.load(
        codes_ptr + rows * row_bytes + (tile * INPUTS + inputs)[None, :],
        mask=is_output[:, None] & (tile * INPUTS + inputs < row_bytes)[None, :],
        other=0,
    )
    for half in tl.static_range(HALVES):
        first = (tile * HALVES + half) * INPUTS
        scales, offsets = _load_scales(
            scales_ptr, offsets_ptr, first, outputs, is_output, num_outputs, num_groups, GROUP
        )
        numbers = _decode(raw, table_ptr, half, CODES, FIRST, tl.float32) * scales[:, None]
        if offsets_ptr is not None:
            numbers -= offsets[:, None]
        is_there = is_output[:, None] & (inputs < num_inputs - first)[None, :]
        places = rows * num_inputs + (first + inputs)[None, :]
        tl.store(numbers_ptr + places, numbers.to(numbers_ptr.dtype.element_ty), mask=is_there)
