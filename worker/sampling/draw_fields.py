"""The sampling parameters of a row, as the host writes them and the kernels read them.

Owns: the order of the fields, and their values for given parameters.
Never: imports Triton: the buffers of a step need no more than this.

    line  place  temperature  min_p  top_k  top_p  uniform  -        float64, one line for each row

Shapes: N rows, F fields.
"""

import numpy as np
from numpy.typing import NDArray

from scheduler.messages import SamplingParams
from worker.sampling.draw import LEAST_TOP_P

NUM_FIELDS = 8
LINE = 0
"""The row's line in the logits; NOBODY for padding, which is neither read nor sampled."""
PLACE = 1
"""The row's place in the outcome."""
TEMPERATURE = 2
MIN_P = 3
TOP_K = 4
"""0 for all, 1 for greedy."""
TOP_P = 5
"""Above 0."""
UNIFORM = 6

NOBODY = -1


def no_draws(num: int) -> NDArray[np.float64]:
    """Return the fields [N, F] of positions that are not sampled."""
    draws_NF = np.zeros((num, NUM_FIELDS))
    draws_NF[:, LINE], draws_NF[:, PLACE] = NOBODY, np.arange(num)
    return draws_NF


def draw_fields(params: SamplingParams, vocab_size: int) -> NDArray[np.float64]:
    """Return the fields that stay from step to step: all but line, place and uniform number."""
    fields_F = np.zeros(NUM_FIELDS)
    if params.temperature == 0.0 or params.top_k == 1:
        fields_F[TOP_K] = 1
        return fields_F
    fields_F[TEMPERATURE] = params.temperature
    fields_F[MIN_P] = params.min_p
    # As many as there are is no truncation.
    fields_F[TOP_K] = params.top_k if 0 < params.top_k < vocab_size else 0
    fields_F[TOP_P] = max(params.top_p, LEAST_TOP_P)
    return fields_F
