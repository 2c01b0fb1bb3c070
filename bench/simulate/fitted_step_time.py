"""Step time fitted to a trace: t = base + token * tokens + decode * decodes + context * context tokens.

Owns: the model and its fit to the steps of a real engine.
Never: a clock.

Context tokens are the keys that attention reads: for each share the position after its last token. The
base is reading the weights and starting the step, `per_token` the arithmetic, `per_decode` what each
sequence costs beside it (sampling, bookkeeping), `per_context_token` reading the KV cache.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.trace.trace_reading import TracedStep

Floats = NDArray[np.floating[Any]]

# A step that took so many times what the model says (the first one, which compiles; a machine that slept)
# is an accident and not what the model is about.
_ACCIDENT = 10.0
_NUM_ROUNDS = 4
_MIN_STEPS = 8


class FitError(Exception):
    """The trace says too little about step times; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearStepTime:
    """Coefficients of the step time, in seconds."""

    base_s: float
    per_token_s: float
    per_decode_s: float
    per_context_token_s: float

    def seconds(self, num_tokens: int, num_decodes: int, num_context_tokens: int) -> float:
        return (
            self.base_s
            + self.per_token_s * num_tokens
            + self.per_decode_s * num_decodes
            + self.per_context_token_s * num_context_tokens
        )

    def decode_steps(self, num_decodes: int, num_context_tokens: int, num_steps: int) -> Iterator[float]:
        """Yield what `seconds` returns for steps of the same decodes, one token later each time."""
        beside_context_s = self.base_s + self.per_token_s * num_decodes + self.per_decode_s * num_decodes
        for step in range(num_steps):
            yield beside_context_s + self.per_context_token_s * (num_context_tokens + step * num_decodes)

    def __str__(self) -> str:
        return (
            f"{self.base_s * 1e3:.4g} ms + {self.per_token_s * 1e6:.4g} us a token "
            f"+ {self.per_decode_s * 1e6:.4g} us a decode "
            f"+ {self.per_context_token_s * 1e9:.4g} ns a context token"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedStepTime:
    """A step time, and how well it agrees with the trace."""

    model: LinearStepTime
    num_steps: int
    num_accidents: int
    """Steps that were left out: they took far longer or shorter than steps of their size."""
    median_error: float
    """Error of the predicted step time, relative to the measured one."""

    def __str__(self) -> str:
        return (
            f"{self.model}, fitted to {self.num_steps} steps ({self.num_accidents} left out); "
            f"the median step is off by {self.median_error:.1%}"
        )


def fit(steps: Iterable[TracedStep]) -> FittedStepTime:
    """Least squares of the relative error, with no coefficient below 0. Raises FitError.

    Relative, because a step of 5 ms matters as much to those who wait for its tokens as one of 500 ms.
    Steps that copied blocks from or to the host are left out: what a copy costs is told elsewhere.
    """
    rows = [
        (1.0, step.num_tokens, step.num_decodes, step.num_context_tokens, step.duration_s)
        for step in steps
        if step.duration_s > 0 and step.num_tokens > 0 and not step.num_swapped_blocks
    ]
    if len(rows) < _MIN_STEPS:
        raise FitError(f"a fit needs at least {_MIN_STEPS} steps that took time, and there are {len(rows)}")
    table: Floats = np.array(rows)
    sizes, measured_s = table[:, :-1], table[:, -1]
    # Relative to the measured time at first: long accidents then count for little, but so do all steps
    # that are longer than usual. So from then on relative to the predicted time, without the accidents.
    found = _non_negative(sizes, measured_s, measured_s)
    for _ in range(_NUM_ROUNDS):
        predicted_s: Floats = sizes @ found
        is_kept = (measured_s < _ACCIDENT * predicted_s) & (predicted_s < _ACCIDENT * measured_s)
        found = _non_negative(sizes[is_kept], measured_s[is_kept], predicted_s[is_kept])
    errors = np.abs(sizes[is_kept] @ found / measured_s[is_kept] - 1)
    base, token, decode, context = (float(each) for each in found)
    return FittedStepTime(
        model=LinearStepTime(
            base_s=base, per_token_s=token, per_decode_s=decode, per_context_token_s=context
        ),
        num_steps=int(is_kept.sum()),
        num_accidents=int((~is_kept).sum()),
        median_error=float(np.median(errors)),
    )


def _non_negative(sizes: Floats, measured_s: Floats, unit_s: Floats) -> Floats:
    """Least squares of errors in units of `unit_s`, one a step.

    While a coefficient is below 0, the lowest is set to 0 and the rest fitted again.
    """
    scales = np.maximum(sizes.max(axis=0), 1e-12)
    rows = sizes / scales / unit_s[:, None]
    free = list(range(sizes.shape[1]))
    found = np.zeros(sizes.shape[1])
    while free:
        solved: Floats = np.linalg.lstsq(rows[:, free], measured_s / unit_s, rcond=None)[0]
        worst = int(solved.argmin())
        if solved[worst] >= 0:
            found[free] = solved
            break
        free.pop(worst)
    coefficients: Floats = found / scales
    return coefficients
