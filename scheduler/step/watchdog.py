"""Notices when the scheduler has work and plans nothing.

Owns: how often on end that was so. It should never be; if it is, one request fails instead of all hanging.
"""

_MAX_EMPTY_PLANS = 3


class Watchdog:
    """Told of every plan."""

    def __init__(self) -> None:
        self._num_empty_plans = 0

    def sees_a_stall(self, *, has_work: bool) -> bool:
        """Whether somebody must be failed now. `has_work`: and yet the plan was empty."""
        self._num_empty_plans = self._num_empty_plans + 1 if has_work else 0
        if self._num_empty_plans < _MAX_EMPTY_PLANS:
            return False
        self._num_empty_plans = 0
        return True
