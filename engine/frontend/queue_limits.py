"""Whether one more request may wait.

Owns: how many sequences and prompt tokens were accepted and have not started, and how fast they start.
Never: a clock of its own; time is an argument.
"""

from collections import deque

from engine.errors import Overloaded, OverloadReason

_RATE_WINDOW_S = 10.0
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


class Admission:
    """A bound on the queue: beyond it a client is told when to come back, rather than left to wait.

    A sequence has started when its first output has come; so those whose prompt is being computed count.
    """

    def __init__(self, *, max_queued: int, max_queued_tokens: int) -> None:
        self._max_queued = max_queued
        self._max_queued_tokens = max_queued_tokens
        self._starts_s: deque[float] = deque()
        self.num_queued = 0
        self.num_queued_tokens = 0

    def admit(self, num_sequences: int, num_tokens: int, *, now_s: float) -> None:
        """All of them or none. Raises Overloaded.

        A request that is larger than the queue may still have it to itself: it would never fit else.
        """
        if not self.has_room(num_sequences, num_tokens):
            raise self.refusal(num_sequences, now_s=now_s)
        self.num_queued += num_sequences
        self.num_queued_tokens += num_tokens

    def refusal(self, num_sequences: int, *, now_s: float) -> Overloaded:
        """What those are told for whom there is no room."""
        has_place = self.num_queued + num_sequences <= self._max_queued
        return Overloaded(
            f"{self.num_queued} sequences with {self.num_queued_tokens} prompt tokens have not started; "
            f"at most {self._max_queued} and {self._max_queued_tokens} may wait; try again later",
            retry_after_s=self.retry_after_s(now_s=now_s),
            reason=OverloadReason.TOKENS if has_place else OverloadReason.REQUESTS,
        )

    def has_room(
        self, num_sequences: int, num_tokens: int, *, freed_sequences: int = 0, freed_tokens: int = 0
    ) -> bool:
        """Whether they may wait, if so many others left before."""
        num_left = self.num_queued - freed_sequences
        num_left_tokens = self.num_queued_tokens - freed_tokens
        fits = num_left + num_sequences <= self._max_queued
        return not num_left or (fits and num_left_tokens + num_tokens <= self._max_queued_tokens)

    def leave(self, num_sequences: int, num_tokens: int) -> None:
        """Ended before they started."""
        self.num_queued -= num_sequences
        self.num_queued_tokens -= num_tokens

    def start(self, num_tokens: int, *, now_s: float) -> None:
        """One of them has started; `num_tokens` of the queue's go with it."""
        self.leave(1, num_tokens)
        self._starts_s.append(now_s)
        self._forget_old(now_s)

    def retry_after_s(self, *, now_s: float) -> float:
        """How long the queue takes to empty at the rate of the last seconds."""
        self._forget_old(now_s)
        rate_hz = max(len(self._starts_s), 1) / _RATE_WINDOW_S
        return min(max(self.num_queued / rate_hz, _MIN_RETRY_S), _MAX_RETRY_S)

    def _forget_old(self, now_s: float) -> None:
        while self._starts_s and self._starts_s[0] < now_s - _RATE_WINDOW_S:
            self._starts_s.popleft()
