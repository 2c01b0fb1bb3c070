"""Times that drafts cost: of steps and of passes of a draft model by their tokens, and of waits."""

_FIXED_ROWS = 12
"""Rows that take as long as the fixed part of a step: assumed until sizes are measured."""
_COST_LEARNING = 0.1
_MAX_SURPRISE = 2.0  # a step that took longer than this many times the usual counts as that; so does a wait
_MAX_SURPRISE_AT_FIRST = 1.3  # a disturbance only ever adds
_NUM_SETTLED = 10  # observations of a size, from which on it shows a trend
_TREND_LEARNING = 0.05
_LEAST_TREND, _MAX_TREND = 0.04, 0.1  # less is noise
_LEAST_LEFT = 0.95
_EXACT_SIZES = 16
_WAIT_MEMORY = 0.95


class StepCosts:
    """Measured seconds of steps without prompts, by their number of tokens; straight lines between.

    Growing contexts add time to steps of all sizes. So where settled sizes take more than they did, or less,
    for a while, those not seen meanwhile follow: otherwise they would look cheap.
    """

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._nums: dict[int, int] = {}  # of observations, of each size
        self._trend = 0.0  # of late: time beyond the expected, as a part of it
        self._sizes: list[int] = []  # in order; some two hundred at most

    def observe(self, num_tokens: int, seconds: float) -> None:
        size = _rounded(num_tokens)
        mean = self._means.get(size)
        self._nums[size] = num = self._nums.get(size, 0) + 1
        if mean is None:
            self._means[size] = seconds
            self._sizes = sorted(self._means)
            return
        surprise = min(seconds / mean, _MAX_SURPRISE if num >= _NUM_SETTLED else _MAX_SURPRISE_AT_FIRST) - 1.0
        if num >= _NUM_SETTLED:
            self._trend += _TREND_LEARNING * (surprise - self._trend)
            if abs(self._trend) > _LEAST_TREND:
                self._shift(_COST_LEARNING * max(-_MAX_TREND, min(self._trend, _MAX_TREND)) * mean)
        # A size that was seen seldom must not look cheaper than one that is seen always: both are means.
        self._means[size] = mean * (1.0 + max(_COST_LEARNING, 1.0 / num) * surprise)

    def _shift(self, seconds: float) -> None:
        """Add so much to the time of all sizes; they keep most of it if that is less than nothing."""
        for size, mean in self._means.items():
            self._means[size] = max(mean + seconds, _LEAST_LEFT * mean)

    def knows(self, num_tokens: int) -> bool:
        """Tell whether a size was measured, or smaller and larger ones were."""
        return bool(self._sizes) and self._sizes[0] <= _rounded(num_tokens) <= self._sizes[-1]

    @property
    def largest(self) -> int:
        """Most tokens of a step that was measured; 0 before any."""
        return self._sizes[-1] if self._sizes else 0

    def seconds(self, num_tokens: int) -> float:
        """Expected time of a step.

        Beyond the largest measurement it grows on like between the ends, if these lie apart.
        """
        sizes, means = self._sizes, self._means
        if not sizes:
            return 1.0
        above = next((size for size in sizes if size >= num_tokens), None)
        first, last = sizes[0], sizes[-1]
        if num_tokens <= first:
            return means[first] * (_FIXED_ROWS + num_tokens) / (_FIXED_ROWS + first)
        if above is None:
            slope = means[last] / (_FIXED_ROWS + last)
            if last >= 2 * first:
                slope = max(means[last] - means[first], 0.0) / (last - first)
            return means[last] + slope * (num_tokens - last)
        below = sizes[sizes.index(above) - 1]
        share = (num_tokens - below) / (above - below)
        return means[below] + share * (means[above] - means[below])


class DraftWaits:
    """Time that the worker stands still for one step with drafts, where plans are made ahead.

    Such a step waits until the last token is known and its plan is made, and so does the step behind it.
    Other steps count as time that passes: the next wait then counts for more.
    """

    def __init__(self) -> None:
        self._all_s = self._num_drafted = 0.0
        self._is_behind = False

    def observe(self, seconds: float, step_s: float, *, has_drafts: bool) -> None:
        """Take in how long the worker waited for a step.

        A wait far beyond the usual, and beyond the time of a step, has causes that no draft brings.
        """
        most_s = max(step_s, _MAX_SURPRISE * self.seconds)
        self._all_s *= _WAIT_MEMORY
        self._num_drafted = self._num_drafted * _WAIT_MEMORY + has_drafts
        if has_drafts or self._is_behind:
            self._all_s += min(seconds, most_s)
        self._is_behind = has_drafts

    @property
    def seconds(self) -> float:
        return self._all_s / self._num_drafted if self._num_drafted else 0.0


def _rounded(num_tokens: int) -> int:
    """Round larger sizes to an eighth of themselves, so that there are few."""
    if num_tokens <= _EXACT_SIZES:
        return num_tokens
    unit = 1 << (num_tokens.bit_length() - 4)
    return -(-num_tokens // unit) * unit
