"""Model of how long a step takes on this machine, learnt while it runs.

It also answers how many tokens a step may have, so that the time between two tokens of a running sequence
stays near a target.

Owns: a straight line, seconds = base + slope * tokens, fitted to the recent steps.
Never: a clock; the engine's loop measures.
"""

_DECAY = 0.98  # of an observation's weight with each later step: a memory of some fifty steps
_MIN_OBSERVATIONS = 8
_MAX_SURPRISE = 2.0
_MIN_SPREAD = 4.0  # of the token counts, as a standard deviation; below it there is no slope to be seen


class StepTimeModel:
    """Weighted least squares with forgetting; five sums, updated in constant time."""

    def __init__(self) -> None:
        self._num_observations = 0
        self._weight = self._tokens = self._seconds = self._tokens_squared = self._tokens_seconds = 0.0
        self._slope_s: float | None = None
        self._last_prefill_token_s = 0.0
        self.last_prefill_s = 0.0
        """Duration of the latest step with a prefill chunk."""

    def observe(self, num_tokens: int, seconds: float, *, has_prefill: bool = False) -> None:
        if has_prefill:
            self.last_prefill_s = seconds
            self._last_prefill_token_s = seconds / num_tokens
        seconds = self._without_hiccup(num_tokens, seconds)
        self._num_observations += 1
        self._weight = self._weight * _DECAY + 1.0
        self._tokens = self._tokens * _DECAY + num_tokens
        self._seconds = self._seconds * _DECAY + seconds
        self._tokens_squared = self._tokens_squared * _DECAY + num_tokens * num_tokens
        self._tokens_seconds = self._tokens_seconds * _DECAY + num_tokens * seconds
        mean = self._tokens / self._weight
        variance = self._tokens_squared / self._weight - mean * mean
        if variance > _MIN_SPREAD * _MIN_SPREAD:  # else the slope that was seen before still holds
            covariance = self._tokens_seconds / self._weight - mean * self._seconds / self._weight
            self._slope_s = max(covariance / variance, 0.0)
        if self._slope_s is not None and num_tokens:
            # No step may have taken less than its tokens alone: so a slope that one slow step spoilt, and
            # that small steps cannot correct, comes down again.
            self._slope_s = min(self._slope_s, seconds / num_tokens)

    def _without_hiccup(self, num_tokens: int, seconds: float) -> float:
        """Duration to learn from. A step much slower than expected counts as somewhat slower.

        One page-in must not bend the line. A machine that has really become slower is believed all the same,
        after a few steps.
        """
        if self.slope_s is None:
            return seconds
        return min(seconds, _MAX_SURPRISE * (self.base_s + self.slope_s * num_tokens))

    @property
    def slope_s(self) -> float | None:
        """Seconds for one more token; None until it was seen."""
        return self._slope_s if self._num_observations >= _MIN_OBSERVATIONS else None

    @property
    def base_s(self) -> float:
        """Seconds of a step without tokens."""
        mean_s = self._seconds / self._weight if self._weight else 0.0
        mean_tokens = self._tokens / self._weight if self._weight else 0.0
        return max(mean_s - (self._slope_s or 0.0) * mean_tokens, 0.0)

    def seconds(self, num_tokens: int) -> float:
        """Expected duration of a step; 0 before it is known."""
        return 0.0 if self.slope_s is None else self.base_s + self.slope_s * num_tokens

    def tokens_within(self, seconds: float) -> int | None:
        """Tokens of a step that takes `seconds`; None if that is not known, or not limited.

        After too few steps for a line, the last prefill tells how long a token takes at most.
        """
        slope_s = self.slope_s
        if slope_s is None and self._last_prefill_token_s:
            return int(seconds / self._last_prefill_token_s)
        if not slope_s:
            return None
        return max(int((seconds - self.base_s) / slope_s), 0)
