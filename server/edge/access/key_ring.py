"""The keys that are valid now, how many requests each of them has under way, and its rates.

Owns: the comparison, in constant time, and the limit of concurrent requests, which a reload does not reset.
"""

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from engine.options.api_keys import ApiKey, digest_of
from server.edge.access.rate_limits import RateLimits
from server.edge.error_replies import TooManyOfOneKey

_RETRY_AFTER_S = 1.0


class KeyRing:
    """The valid keys. Without keys the server is open, but one that ever had keys stays locked."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys = tuple(keys)
        self._under_way: Counter[str] = Counter()
        self.rates = RateLimits()
        self._is_locked = bool(self._keys)

    @property
    def is_locked(self) -> bool:
        """True if a key is needed."""
        return self._is_locked

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Replace the keys. Requests under way go on."""
        self._keys = tuple(keys)
        self._is_locked = self._is_locked or bool(self._keys)

    def find(self, given: bytes) -> ApiKey | None:
        """The key that the client sent, if it is one of ours."""
        digest = digest_of(given)
        keys = self._keys  # a reload, in a thread of its own, must not shift them between here and the end
        # All keys are compared, whether or not one has matched: the time must not reveal which.
        matches = [secrets.compare_digest(digest, key.digest) for key in keys]
        return keys[matches.index(True)] if any(matches) else None

    def named(self, name: str) -> ApiKey | None:
        return next((key for key in self._keys if key.name == name), None)

    @contextmanager
    def under_way(self, key: ApiKey) -> Iterator[None]:
        """Count one more request of this key, until the end of the block. Raises TooManyOfOneKey."""
        limit = key.max_concurrent_requests
        if limit is not None and self._under_way[key.name] >= limit:
            raise TooManyOfOneKey(limit=limit, retry_after_s=_RETRY_AFTER_S)
        self._under_way[key.name] += 1
        try:
            yield
        finally:
            self._under_way[key.name] -= 1
            if not self._under_way[key.name]:
                del self._under_way[key.name]
