"""Requests and tokens of each key in the last minute.

Owns: the counts, the part that one HTTP request takes of them, and the headers in which OpenAI tells them.
Source: the sliding window counter of the package limits: this minute's count, and that part of the last
minute's which its end still overlaps.

A request counts when it comes, its prompt before it is admitted, its output at its end, since its length is
not known before. A long output so stands against the requests after it.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING

from engine.errors import RequestRejected
from engine.options.api_keys import ApiKey
from server.edge.error_replies import RateLimited

if TYPE_CHECKING:
    from limits.storage import MemoryStorage

_WINDOW_S = 60
_NO_LIMIT = 2**62
RATE_HEADERS = tuple(
    f"x-ratelimit-{part}-{noun}"
    for part in ("limit", "remaining", "reset")
    for noun in ("requests", "tokens")
)
_BATCH_SHARE = 0.5


class Caller(Enum):
    CLIENT = 1.0
    BATCH = _BATCH_SHARE
    """A line of a batch, which leaves half of each limit to the clients of its key."""


@dataclass(frozen=True, slots=True)
class _Limit:
    noun: str
    most: int
    counter: str


@dataclass(frozen=True, slots=True)
class _Use:
    before: int
    """Count of the last minute."""
    before_left_s: float
    """Seconds in which that minute still counts."""
    current: int
    ends_in_s: float
    """Seconds to the end of this minute."""

    @property
    def num_used(self) -> int:
        return ceil(self.before * self.before_left_s / _WINDOW_S + self.current)

    @property
    def reset_s(self) -> float:
        """Seconds until no use counts any more, if none is added."""
        if self.current > 0:
            return self.ends_in_s + _WINDOW_S
        return self.before_left_s

    def wait_s(self, room: int) -> float:
        """Seconds until no more than `room` is in use, if nothing is added."""
        if room >= self.current and self.before:
            return max(0.0, self.before_left_s - (room - self.current) * _WINDOW_S / self.before)
        if room >= self.current:
            return 0.0
        return self.ends_in_s + _WINDOW_S * (1 - max(room, 0) / self.current)


class RateLimits:
    """The counts of all keys. A reload of the keys does not reset them."""

    @cached_property
    def _storage(self) -> "MemoryStorage":
        # Not at the top: most servers have no such limit, and it takes a tenth of a second.
        from limits.storage import MemoryStorage

        return MemoryStorage()

    def use(self, limit: _Limit) -> _Use:
        before, before_left_s, current, left_s = self._storage.get_sliding_window(limit.counter, _WINDOW_S)
        return _Use(before, before_left_s, current, max(left_s - _WINDOW_S, 0.0))

    def count(self, limit: _Limit, num: int) -> None:
        """Add to a count, even beyond the limit: the tokens are used already."""
        if num:
            self._storage.acquire_sliding_window_entry(limit.counter, _NO_LIMIT, _WINDOW_S, num)


class Allowance:
    """The requests and tokens that one request counts against the limits of its key."""

    def __init__(self, rates: RateLimits, key: ApiKey | None, caller: Caller) -> None:
        self._rates = rates
        self._caller = caller
        self._requests = self._tokens = None
        if key is not None and key.max_requests_per_minute is not None:
            self._requests = _Limit("requests", key.max_requests_per_minute, f"requests/{key.name}")
        if key is not None and key.max_tokens_per_minute is not None:
            self._tokens = _Limit("tokens", key.max_tokens_per_minute, f"tokens/{key.name}")
        self._is_counted = False
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    def take_request(self) -> None:
        """Count the request. Raises RateLimited if there are too many, or no tokens left for one more."""
        if self._tokens is not None:
            self._require(self._tokens, 1)
        if self._requests is not None:
            self._require(self._requests, 1)
            self._rates.count(self._requests, 1)
            self._is_counted = True

    def take_prompt(self, num_tokens: int) -> None:
        """Count its prompt, in place of one that was counted before.

        Raises RequestRejected for more tokens than a minute has, else RateLimited; then the request does not
        count either, so that one which is sent again counts once.
        """
        if self._tokens is None or num_tokens == self._num_prompt_tokens:
            return
        num_new = num_tokens - self._num_prompt_tokens
        most = int(self._tokens.most * self._caller.value)
        if num_tokens > most:
            raise RequestRejected(
                f"the prompt has {num_tokens} tokens; this key may use {most} a minute"
                + (" for batches" if self._caller is Caller.BATCH else "")
            )
        try:
            self._require(self._tokens, num_new)
        except RateLimited:
            if self._requests is not None and self._is_counted:  # not in a run before this one
                self._rates.count(self._requests, -1)
            raise
        self._rates.count(self._tokens, num_new)
        self._num_prompt_tokens = num_tokens

    def settle(self, num_output_tokens: int) -> None:
        """Count its output so far. What counts already stays: a response may outlast its HTTP request."""
        if self._tokens is not None and num_output_tokens > self._num_output_tokens:
            self._rates.count(self._tokens, num_output_tokens - self._num_output_tokens)
            self._num_output_tokens = num_output_tokens

    def headers(self) -> dict[str, str]:
        """OpenAI's headers, for the limits that there are."""
        headers: dict[str, str] = {}
        for limit in (self._requests, self._tokens):
            if limit is not None:
                use = self._rates.use(limit)
                headers[f"x-ratelimit-limit-{limit.noun}"] = str(limit.most)
                headers[f"x-ratelimit-remaining-{limit.noun}"] = str(max(0, limit.most - use.num_used))
                headers[f"x-ratelimit-reset-{limit.noun}"] = f"{use.reset_s:.3f}s"
        return headers

    def _require(self, limit: _Limit, num: int) -> None:
        use = self._rates.use(limit)
        most = int(limit.most * self._caller.value)
        if use.num_used + num > most:
            raise RateLimited(
                f"this key may use {limit.most} {limit.noun} a minute: {use.num_used} are used, and this one"
                f" needs {num}",
                retry_after_s=max(use.wait_s(most - num), 0.001),
            )


def no_limits() -> Allowance:
    """The part of a request without a key."""
    return Allowance(RateLimits(), None, Caller.CLIENT)
