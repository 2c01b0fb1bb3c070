"""Words of the command line to values, each with an error that says what was expected."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from bench.simulate.lengths import LengthDistribution
from bench.simulate.setup import parse_rates, parse_value


def count(least: int, most: int = 2**31 - 2) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return parse


def number(least: float, *, most: float = 1e300) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected a number of at least {least:g}, got {text!r}")
        return value

    return parse


def length(text: str) -> LengthDistribution:
    try:
        return LengthDistribution.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def setting(kind: type[Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return parse_value(text, kind)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def draft_rates(text: str) -> tuple[float, ...]:
    try:
        return parse_rates(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def priority_mix(text: str) -> tuple[tuple[int, float], ...]:
    """Read a mix: `0:1,10:4` is one of priority 0 for each four of priority 10."""
    try:
        return tuple((int(name), weight) for name, weight in tenant_mix(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected PRIORITY:WEIGHT,..., got {text!r}") from None


def tenant_mix(text: str) -> tuple[tuple[str, float], ...]:
    """Read a mix: `acme:1,other:4` is one of acme for each four of other."""
    pairs = []
    for entry in text.split(","):
        name, _, weight = entry.partition(":")
        try:
            pairs.append((name, float(weight or 1)))
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected NAME:WEIGHT, got {entry!r}") from None
    if not all(math.isfinite(weight) and weight > 0 for _, weight in pairs):
        raise argparse.ArgumentTypeError("weights must be positive")
    return tuple(pairs)
