"""The sampling parameters of a row on the device (draw_fields.py), and the weights of its tokens.

Owns: the arithmetic that all kernels of sampling must do alike.

Weights are exp((logit - peak) / temperature), in float32. They are added as integers, multiples of 2**-42:
such sums do not depend on the order of addition, so a row's token does not depend on how the row was divided.
A lighter token is never sampled. worker/sampling/draw.py adds in float64: it gives another token only where
a uniform number hits the border between two tokens to about one part in 10**7.
"""

import triton
import triton.language as tl

from worker.sampling.draw_fields import LINE, MIN_P, NUM_FIELDS, PLACE, TEMPERATURE, TOP_K, TOP_P, UNIFORM

# A kernel may read a global number only if it is one of these.
FIELDS_PER_ROW = tl.constexpr(NUM_FIELDS)
AT_LINE = tl.constexpr(LINE)
AT_PLACE = tl.constexpr(PLACE)
AT_TEMPERATURE = tl.constexpr(TEMPERATURE)
AT_MIN_P = tl.constexpr(MIN_P)
AT_TOP_K = tl.constexpr(TOP_K)
AT_TOP_P = tl.constexpr(TOP_P)
AT_UNIFORM = tl.constexpr(UNIFORM)

_UNIT = tl.constexpr(float(1 << 42))
"""The weight of the most likely token. 2**20 of them still fit into 62 bits."""
_LEAST_BITS = tl.constexpr((127 - 42) << 23)
"""The bits of 2**-42 as float32: lighter tokens count as nothing."""
LEAST_LOG = tl.constexpr(30.0)
"""exp(-30) is less than 2**-42."""
ONE_BITS = tl.constexpr(127 << 23)
"""The bits of 1 as float32, the weight of the most likely token."""


@triton.jit
def weigh(x, peak, temperature):  # noqa: ANN201 - a number or a block of them, as x is
    """float32, from 0 to 1, in the order of the logits."""
    return tl.exp((x - peak) / temperature)


@triton.jit
def bits_of(weights):  # noqa: ANN201
    """Non-negative floats sort like their bits."""
    return weights.to(tl.int32, bitcast=True)


@triton.jit
def mass_of(weights):  # noqa: ANN201
    """int64."""
    return (weights * _UNIT).to(tl.int64)


@triton.jit
def least_bits(fields):  # noqa: ANN201
    """Return the bits of the least weight that may be sampled: that of min-p, or next to nothing."""
    return tl.maximum(bits_of(tl.load(fields + AT_MIN_P).to(tl.float32)), _LEAST_BITS)


@triton.jit
def temperature_of(fields):  # noqa: ANN201
    """float32."""
    # Keeps 0 / temperature from being NaN.
    return tl.maximum(tl.load(fields + AT_TEMPERATURE).to(tl.float32), 1e-30)


@triton.jit
def mass_before(fields, total):  # noqa: ANN201
    """Return the most mass before the token to be sampled: the uniform number's part of `total`."""
    share = (tl.load(fields + AT_UNIFORM) * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(share, total - 1)
