"""Top-k and top-p on the device, exact for any number of tokens: no row is ever sorted.

Owns: the search for the least weight that is kept, and sampling among the tokens that are kept.
Source: radix selection: the bits of non-negative floats sort like the floats.

A cut is a weight, as its bits, and a place: heavier tokens are kept, and those of just this weight up to the
place. "Enough" is a number of tokens for top-k and a mass for top-p; both are searched for alike. Of a whole
row only a bracket of weights is searched to the end, once it is so narrow that its tokens can be listed:

    weights     least |-------------[ low -- bracket -- high )---------------| one
    amount                                            [      above           ]    never enough by itself
"""

import triton
import triton.language as tl

from worker.gpu.sampling_kernels.token_weights import (
    AT_TOP_K,
    AT_TOP_P,
    ONE_BITS,
    bits_of,
    least_bits,
    mass_before,
    mass_of,
    temperature_of,
    weigh,
)

CAPACITY = tl.constexpr(4096)
"""Tokens of one row that can be listed."""
_CHUNK = tl.constexpr(2048)
"""Values that a search reads at a time: for each of them it has an amount for each pivot in registers."""
_NUM_PIVOTS = tl.constexpr(8)


@triton.jit
def _chunk(values, start, count, peak, temperature):
    """Weights of some of `count` values in a row, and where they stand."""
    places = start + tl.arange(0, _CHUNK)
    x = tl.load(values + places, mask=places < count, other=-float("inf")).to(tl.float32)
    return weigh(x, peak, temperature), places


@triton.jit
def _narrow(values, count, peak, temperature, low, high, above, enough, BY_MASS: tl.constexpr):
    """A bracket of a ninth of the width, by one pass over the values."""
    pivots = tl.arange(0, _NUM_PIVOTS)
    step = (high - low + _NUM_PIVOTS) // (_NUM_PIVOTS + 1)
    bounds = low + step * (pivots + 1)
    amounts = tl.zeros((_NUM_PIVOTS,), tl.int64) + above
    for start in range(0, count, _CHUNK):
        weights, _places = _chunk(values, start, count, peak, temperature)
        bits = bits_of(weights)
        amount = mass_of(weights) if BY_MASS else (bits > 0).to(tl.int64)
        reaches = (bits[:, None] >= bounds[None, :]) & (bits < high)[:, None]
        amounts += tl.sum(tl.where(reaches, amount[:, None], 0), axis=0)
    num_enough = tl.sum((amounts >= enough).to(tl.int32), axis=0)
    new_high = low + step * (num_enough + 1)
    if (num_enough < _NUM_PIVOTS) & (new_high < high):
        high = new_high
        above = tl.sum(tl.where(pivots == num_enough, amounts, 0), axis=0)
    return low + step * num_enough, high, above


@triton.jit
def _find_cut(values, count, peak, temperature, low, high, above, enough, BY_MASS: tl.constexpr):
    """The cut by which just enough is kept, or all if there is less; the place is `count` or more then.

    The values are those in the bracket, and maybe others.
    """
    while high - low > 1:
        low, high, above = _narrow(values, count, peak, temperature, low, high, above, enough, BY_MASS)
    num_equals = enough - above
    if BY_MASS:
        each = mass_of(low.to(tl.float32, bitcast=True))
        num_equals = (num_equals + each - 1) // each
    last = tl.full((), 0, tl.int32) + count
    num_before = tl.full((), 0, tl.int64)
    for start in range(0, count, _CHUNK):
        weights, places = _chunk(values, start, count, peak, temperature)
        is_equal = bits_of(weights) == low
        nth = num_before + tl.cumsum(is_equal.to(tl.int64), axis=0)
        last = tl.minimum(last, tl.min(tl.where(is_equal & (nth == num_equals), places, count), axis=0))
        num_before += tl.sum(is_equal.to(tl.int64), axis=0)
    return low, last


@triton.jit
def _list_bracket(values, count, peak, temperature, low, high, listed, listed_places):
    """Write the values in the bracket and their places, in order; returns how many there are."""
    num = tl.full((), 0, tl.int32)
    for start in range(0, count, _CHUNK):
        weights, places = _chunk(values, start, count, peak, temperature)
        bits = bits_of(weights)
        is_listed = (bits >= low) & (bits < high)
        targets = num + tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
        fits = is_listed & (targets < CAPACITY)
        x = tl.load(values + places, mask=fits, other=0.0).to(tl.float32)
        tl.store(listed + targets, x, mask=fits)
        tl.store(listed_places + targets, places, mask=fits)
        num += tl.sum(is_listed.to(tl.int32), axis=0)
    # The other threads of the program read what this one has written.
    tl.debug_barrier()
    return num


@triton.jit
def _find_cut_of_row(
    values, count, peak, temperature, least, enough, listed, listed_places, BY_MASS: tl.constexpr
):
    """Find the cut as `_find_cut` does, among values enough that listing the bracket pays."""
    high = tl.full((), ONE_BITS + 1, tl.int32)
    above = tl.full((), 0, tl.int64)
    low, high, above = _narrow(values, count, peak, temperature, least, high, above, enough, BY_MASS)
    num = tl.full((), CAPACITY + 1, tl.int32)
    while (num > CAPACITY) & (high - low > 1):
        # All threads have read the list before.
        tl.debug_barrier()
        low, high, above = _narrow(values, count, peak, temperature, low, high, above, enough, BY_MASS)
        num = _list_bracket(values, count, peak, temperature, low, high, listed, listed_places)
    if num > CAPACITY:  # equals, all of them
        threshold, last = _find_cut(values, count, peak, temperature, low, high, above, enough, BY_MASS)
    else:
        threshold, nth = _find_cut(listed, num, peak, temperature, low, high, above, enough, BY_MASS)
        last = tl.load(listed_places + nth, mask=nth < num, other=0)
        last = tl.where(nth < num, last, count)
    return threshold, last


@triton.jit
def _cut(
    values,
    count,
    peak,
    temperature,
    least,
    enough,
    listed,
    listed_places,
    IS_ROW: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    if IS_ROW:
        return _find_cut_of_row(
            values, count, peak, temperature, least, enough, listed, listed_places, BY_MASS
        )
    else:
        high = tl.full((), ONE_BITS + 1, tl.int32)
        above = tl.full((), 0, tl.int64)
        return _find_cut(values, count, peak, temperature, least, high, above, enough, BY_MASS)


@triton.jit
def _kept_mass(weights, places, threshold, last):
    bits = bits_of(weights)
    return tl.where((bits > threshold) | ((bits == threshold) & (places <= last)), mass_of(weights), 0)


@triton.jit
def _sum_kept(values, count, peak, temperature, threshold, last):
    total = tl.full((), 0, tl.int64)
    for start in range(0, count, _CHUNK):
        weights, places = _chunk(values, start, count, peak, temperature)
        total += tl.sum(_kept_mass(weights, places, threshold, last), axis=0)
    return total


@triton.jit
def _draw_kept(values, count, fields, peak, threshold, last):
    """Return the place of a token among the kept ones."""
    temperature = temperature_of(fields)
    target = mass_before(fields, _sum_kept(values, count, peak, temperature, threshold, last))
    place = tl.full((), 0, tl.int32) + count
    before = tl.full((), 0, tl.int64)
    for start in range(0, count, _CHUNK):
        weights, places = _chunk(values, start, count, peak, temperature)
        mass = _kept_mass(weights, places, threshold, last)
        is_beyond = before + tl.cumsum(mass, axis=0) > target
        place = tl.minimum(place, tl.min(tl.where(is_beyond, places, count), axis=0))
        before += tl.sum(mass, axis=0)
    return place


@triton.jit
def draw_truncated(  # noqa: ANN201 - a pair of numbers
    values, count, fields, peak, total, listed, listed_places, IS_ROW: tl.constexpr
):
    """The place of a token among `count` values, and the bits of the least weight that was kept.

    total is the mass of the whole row that min-p keeps; it is not read if top-k truncates. Without IS_ROW the
    values are the candidates of a row, which may be too few, and nothing is listed.
    """
    temperature = temperature_of(fields)
    threshold = least_bits(fields)
    top_k = tl.load(fields + AT_TOP_K).to(tl.int64)
    top_p = tl.load(fields + AT_TOP_P)
    last = tl.full((), 0, tl.int32) + count
    if top_k > 0:
        threshold, last = _cut(
            values, count, peak, temperature, threshold, top_k, listed, listed_places, IS_ROW, BY_MASS=False
        )
        total = _sum_kept(values, count, peak, temperature, threshold, last)
    if top_p < 1.0:
        mass = top_p * total.to(tl.float64)
        enough = mass.to(tl.int64)
        enough += (enough.to(tl.float64) < mass).to(tl.int64)
        new_threshold, new_last = _cut(
            values, count, peak, temperature, threshold, enough, listed, listed_places, IS_ROW, BY_MASS=True
        )
        # Of the equals that top-k left, top-p keeps the first; it never brings others back.
        last = tl.where(new_threshold == threshold, tl.minimum(last, new_last), new_last)
        threshold = new_threshold
    return _draw_kept(values, count, fields, peak, threshold, last), threshold
