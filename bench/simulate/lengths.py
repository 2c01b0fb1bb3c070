"""Lengths of prompts and answers in tokens: a distribution by its name.

128                          always
uniform:LOW:HIGH             both ends included
exponential:MEAN[:MAX]
lognormal:MEDIAN:SIGMA[:MAX] sigma of the logarithm; 1 is a long tail
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

_NUM_ARGUMENTS = {"uniform": (2, 2), "exponential": (1, 2), "lognormal": (2, 3)}


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A distribution of lengths, from 1 to the most that its name allows."""

    text: str
    draw: Callable[[random.Random], int]

    @classmethod
    def parse(cls, text: str) -> "LengthDistribution":
        """Read a distribution by its name. Raises ValueError, fit for a person."""
        name, *words = text.split(":")
        if not words:
            length = _number(name, text)
            return cls(text, lambda _: round(length))
        least, most = _NUM_ARGUMENTS.get(name, (0, -1))
        if not least <= len(words) <= most:
            raise ValueError(
                f"expected a number, uniform:LOW:HIGH, exponential:MEAN[:MAX] or "
                f"lognormal:MEDIAN:SIGMA[:MAX], got {text!r}"
            )
        numbers = [_number(word, text, least=0.0 if index else 1.0) for index, word in enumerate(words)]
        return cls(text, _draw_of(name, numbers, text))


def _draw_of(name: str, numbers: list[float], text: str) -> Callable[[random.Random], int]:
    if name == "uniform":
        low, high = round(numbers[0]), round(numbers[1])
        if low > high:
            raise ValueError(f"the low end is above the high end in {text!r}")
        return lambda rng: rng.randint(low, high)
    cut = round(numbers.pop()) if len(numbers) == _NUM_ARGUMENTS[name][1] else 2**31
    if cut < 1:
        raise ValueError(f"the largest length must be at least 1 in {text!r}")
    if name == "exponential":
        rate = 1 / numbers[0]
        return lambda rng: min(cut, max(1, round(rng.expovariate(rate))))
    mu, sigma = math.log(numbers[0]), numbers[1]
    return lambda rng: min(cut, max(1, round(math.exp(mu + sigma * rng.gauss(0.0, 1.0)))))


def _number(word: str, text: str, *, least: float = 1.0) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{word!r} is not a number of at least {least:g}, in {text!r}")
    return value
