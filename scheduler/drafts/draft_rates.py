"""Rates at which drafts are right: for each source, sequence and place among its drafts."""

from enum import StrEnum

_WEIGHT_OF_BASE = 4.0
"""Outcomes that the rates of others count as."""
_MEMORY, _MEMORY_OF_ALL = 24.0, 400.0
"""Outcomes until the weight of one has gone down to a third."""
_MOST_RATE = 0.99


class DraftSource(StrEnum):
    """Source of a sequence's drafts. Each is right at rates of its own."""

    PREDICTION = "prediction"
    TEXT = "text"
    MODEL = "model"


FIRST_RATES = {DraftSource.PREDICTION: 0.8, DraftSource.TEXT: 0.6, DraftSource.MODEL: 0.6}
"""Rates before anything is known."""


class Rates:
    """Rates at which drafts at each place are right, if all before them are.

    Where little is known of a place, the other places count, and before these the rates of others.
    """

    def __init__(self, max_drafts: int, base: "Rates | float") -> None:
        """Take in the rates of all sequences, or the rate before anything is known of any."""
        self._base = base
        self._keep = 1.0 - 1.0 / (_MEMORY if isinstance(base, Rates) else _MEMORY_OF_ALL)
        self._right = [0.0] * max_drafts
        self._nums = [0.0] * max_drafts
        self._all_right = self.num_outcomes = 0.0
        self._rates: list[float] = []

    def learn(self, place: int, *, is_right: bool) -> None:
        self._right[place] = self._right[place] * self._keep + is_right
        self._nums[place] = self._nums[place] * self._keep + 1.0
        self._all_right = self._all_right * self._keep + is_right
        self.num_outcomes = self.num_outcomes * self._keep + 1.0
        self._rates = []

    @property
    def overall(self) -> float:
        """Rate of all places together."""
        base = self._base.overall if isinstance(self._base, Rates) else self._base
        return (_WEIGHT_OF_BASE * base + self._all_right) / (_WEIGHT_OF_BASE + self.num_outcomes)

    def of_places(self) -> list[float]:
        """Rates of all places. Those of a sequence follow the others' when its own next outcome comes."""
        if not self._rates:
            overall = self.overall
            expected = [overall] * len(self._nums)
            if isinstance(self._base, Rates):
                relative = overall / self._base.overall
                expected = [min(rate * relative, _MOST_RATE) for rate in self._base.of_places()]
            self._rates = [
                (_WEIGHT_OF_BASE * each + right) / (_WEIGHT_OF_BASE + num)
                for each, right, num in zip(expected, self._right, self._nums, strict=True)
            ]
        return self._rates
