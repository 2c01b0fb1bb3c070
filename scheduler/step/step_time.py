"""Model of how long a step takes on this machine, learnt while it runs.

It also answers how many tokens a step may have, so that the time between two tokens of a running sequence
stays near a target.

Owns: a straight line, seconds = base + slope * tokens, fitted to the recent steps; how far pauses exceed it.
Source: headroom as in adaptive conformal inference (arXiv:2106.00170).
"""

from collections.abc import Sequence

_DECAY = 0.98  # of an observation's weight with each later step: a memory of some fifty steps
_MIN_OBSERVATIONS = 8
_MAX_SURPRISE = 2.0
_MOST_UNREAD = 64
_MIN_SPREAD = 4.0  # of the token counts, as a standard deviation; below it there is no slope to be seen
_SLOW_SHARE = 0.01  # of pauses that may be longer than expected with headroom: it grows until no more are
_FIRST_HEADROOM = 1.1
_HEADROOM_GAIN = 0.03


class StepTimeModel:
    """Weighted least squares with forgetting; five sums and the headroom, updated in constant time."""

    def __init__(self) -> None:
        self._unread: list[tuple[int, float, float]] = []
        """Tokens, seconds and pause of the latest steps."""
        self._num_observations = 0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        """Weights, tokens, seconds, tokens squared, tokens by seconds."""
        self._slope_s: float | None = None
        self._headroom = _FIRST_HEADROOM
        self._last_prefill_token_s = 0.0
        self.last_prefill_s = 0.0
        """Duration of the latest step with a prefill chunk."""

    def observe(
        self, num_tokens: int, seconds: float, *, has_prefill: bool = False, pause_s: float = 0.0
    ) -> None:
        """Observe a step.

        `pause_s` is the time between two tokens of those that decoded in a step with prefill; 0 if none did.
        """
        if has_prefill:
            self.last_prefill_s = seconds
            self._last_prefill_token_s = seconds / num_tokens
        self._unread.append((num_tokens, seconds, pause_s))
        if len(self._unread) >= _MOST_UNREAD:
            self._learn()

    def observe_all(self, num_tokens: int, durations_s: Sequence[float]) -> None:
        """Observe steps of `num_tokens` each, without a prefill."""
        self._unread += [(num_tokens, seconds, 0.0) for seconds in durations_s]
        if len(self._unread) >= _MOST_UNREAD:
            self._learn()

    def _learn(self) -> None:
        """Take in, in order, the steps since the line was last asked for: most plans do not ask."""
        num, slope_s = self._num_observations, self._slope_s
        weight, tokens, total_s, tokens_squared, tokens_seconds = self._sums
        for num_tokens, measured_s, pause_s in self._unread:
            seconds = measured_s
            if slope_s is not None and num >= _MIN_OBSERVATIONS:
                # A step much slower than expected counts as somewhat slower: one page-in must not bend the
                # line. A machine that has really become slower is believed all the same, after a few steps.
                base_s = max(total_s / weight - slope_s * (tokens / weight), 0.0)
                expected_s = base_s + slope_s * num_tokens
                seconds = min(seconds, _MAX_SURPRISE * expected_s)
                if pause_s:
                    self._adapt_headroom(is_slow=pause_s > self._headroom * expected_s)
            num += 1
            weight = weight * _DECAY + 1.0
            tokens = tokens * _DECAY + num_tokens
            total_s = total_s * _DECAY + seconds
            tokens_squared = tokens_squared * _DECAY + num_tokens * num_tokens
            tokens_seconds = tokens_seconds * _DECAY + num_tokens * seconds
            mean = tokens / weight
            variance = tokens_squared / weight - mean * mean
            if variance > _MIN_SPREAD * _MIN_SPREAD:  # otherwise the slope that was seen before still holds
                covariance = tokens_seconds / weight - mean * total_s / weight
                slope_s = max(covariance / variance, 0.0)
            if slope_s is not None and num_tokens:
                # No step may have taken less than its tokens alone: so a slope that one slow step spoilt, and
                # that small steps cannot correct, comes down again.
                slope_s = min(slope_s, seconds / num_tokens)
        self._num_observations, self._slope_s = num, slope_s
        self._sums = (weight, tokens, total_s, tokens_squared, tokens_seconds)
        self._unread.clear()

    def _adapt_headroom(self, *, is_slow: bool) -> None:
        """Move the headroom so that in the long run the share of slow pauses is as it should be."""
        change = _HEADROOM_GAIN * (is_slow - _SLOW_SHARE)
        self._headroom = min(max(self._headroom + change, 1.0), _MAX_SURPRISE)

    @property
    def headroom(self) -> float:
        """Factor by which pauses in steps with prefill exceed the expected time: about one in 100 by more.

        It covers what the straight line does not: steps that vary, and the time between two steps.
        """
        if self._unread:
            self._learn()
        return self._headroom

    @property
    def slope_s(self) -> float | None:
        """Seconds for one more token; None until it was seen."""
        if self._unread:
            self._learn()
        return self._slope_s if self._num_observations >= _MIN_OBSERVATIONS else None

    @property
    def base_s(self) -> float:
        """Seconds of a step without tokens."""
        if self._unread:
            self._learn()
        weight, tokens, total_s, *_ = self._sums
        return max(total_s / weight - (self._slope_s or 0.0) * (tokens / weight), 0.0) if weight else 0.0

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
