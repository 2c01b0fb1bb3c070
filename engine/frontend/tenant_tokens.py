"""How many prompt tokens of each tenant wait, for those that may not have as many as the queue holds.

Owns: the count, which goes on while limits change, and the refusal.
Never: where a limit comes from (engine/options/api_keys.py), or the queue as a whole (queue_limits.py).
"""

from collections import Counter

from engine.errors import TenantOverloaded


class TenantTokens:
    """Counted from admission to the first output, as the tokens of the whole queue are."""

    def __init__(self) -> None:
        self._num_queued: Counter[str] = Counter()

    def require_room(self, tenant: str, num_tokens: int, limit: int | None, *, retry_after_s: float) -> None:
        """Raises TenantOverloaded. None is no limit.

        A request that is larger than its tenant's limit may still have it to itself: it would never fit else.
        """
        num_queued = self._num_queued[tenant]
        if limit is None or not num_queued or num_queued + num_tokens <= limit:
            return
        raise TenantOverloaded(
            f"this key has {num_queued} prompt tokens waiting, and may have {limit}; try again when some of"
            " its requests have begun",
            retry_after_s=retry_after_s,
        )

    def admit(self, tenant: str, num_tokens: int) -> None:
        """They wait now."""
        self._num_queued[tenant] += num_tokens

    def leave(self, tenant: str, num_tokens: int) -> None:
        """They have started, or ended before."""
        self._num_queued[tenant] -= num_tokens
        if self._num_queued[tenant] <= 0:  # names come from clients: those who left must not pile up
            del self._num_queued[tenant]
