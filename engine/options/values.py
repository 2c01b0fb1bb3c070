"""Kinds of option values: how their text is parsed, bounded and shown."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

_HUMAN_NUMBER = re.compile(r"([0-9][0-9_]{0,30}(?:\.[0-9]{1,15})?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)")
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_YES = ("true", "yes", "on", "1")
_NO = ("false", "no", "off", "0")
# A number without a unit that is smaller was meant in another unit: other servers count some options in GiB.
_FEWEST_BYTES = 1024
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


class ValueKind:
    """A kind of value. `parse` raises ValueError whose text completes the sentence `it must ...`."""

    metavar: Any
    """Placeholder for the value in --help."""

    def parse(self, text: str) -> object:
        raise NotImplementedError

    def show(self, value: object) -> str:
        """Format a value as people write it."""
        return str(value)


@dataclass(frozen=True, kw_only=True)
class Text(ValueKind):
    """Any text that is not blank."""

    metavar: str = "TEXT"

    def parse(self, text: str) -> str:
        if not text.strip():
            raise ValueError("not be empty")
        return text.strip()


@dataclass(frozen=True, kw_only=True)
class Pattern(ValueKind):
    """Text of one form, described for people by `form`."""

    pattern: str
    form: str
    metavar: str

    def parse(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text.strip()):
            raise ValueError(f"be {self.form}")
        return text.strip()


@dataclass(frozen=True, kw_only=True)
class Choice(ValueKind):
    """One of a few words."""

    words: tuple[str, ...]
    synonyms: tuple[tuple[str, str], ...] = ()
    """Words of other servers, each with ours."""
    hint: str = ""
    """Advice behind the words, for any other word."""

    @property
    def metavar(self) -> str:
        return "|".join(self.words)

    def parse(self, text: str) -> str:
        word = text.strip().lower()
        word = dict(self.synonyms).get(word, word)
        if word not in self.words:
            raise ValueError(f"be one of {', '.join(self.words)}{self.hint}")
        return word


@dataclass(frozen=True, kw_only=True)
class Switch(ValueKind):
    """Yes or no; on the command line a flag and its --no- twin."""

    metavar: str = "true|false"

    def parse(self, text: str) -> bool:
        word = text.strip().lower()
        if word not in _YES + _NO:
            raise ValueError("be true or false")
        return word in _YES

    def show(self, value: object) -> str:
        return "on" if value else "off"


@dataclass(frozen=True, kw_only=True)
class Count(ValueKind):
    """A whole number within bounds, both included: 2048, 2_048, 2K (2048), 2k (2000)."""

    low: int
    high: int
    metavar: str = "N"

    def parse(self, text: str) -> int:
        like = "a port such as 8000" if self.metavar == "PORT" else "a whole number such as 2048 or 2K"
        if text.strip().lower().endswith("b"):
            raise ValueError(f"be {like}: it counts no bytes")
        return _within(_whole(text, like=like), self.low, self.high, str)


@dataclass(frozen=True, kw_only=True)
class Bytes(ValueKind):
    """An amount of memory within bounds, both included: 4GiB, 4G (the same), 4GB (4 * 10**9), 4096."""

    low: int
    high: int
    metavar: str = "BYTES"

    def parse(self, text: str) -> int:
        number = _whole(text, like="an amount of memory such as 4GiB")
        if 0 < number < _FEWEST_BYTES and text.strip().isdecimal():
            raise ValueError(
                f"be an amount of memory with a unit, such as {number}GiB: this is {number} bytes"
            )
        return _within(number, self.low, self.high, show_bytes)

    def show(self, value: object) -> str:
        return show_bytes(int(str(value)))


@dataclass(frozen=True, kw_only=True)
class Fraction(ValueKind):
    """A fraction within bounds, both included: 0.9 or 90%."""

    low: float
    high: float
    metavar: str = "SHARE"

    def parse(self, text: str) -> float:
        word = text.strip()
        is_percent = word.endswith("%")
        try:
            number = float(word.removesuffix("%"))
        except ValueError:
            raise ValueError("be a share such as 0.9 or 90%") from None
        return _within(number / 100 if is_percent else number, self.low, self.high, str)


@dataclass(frozen=True, kw_only=True)
class Duration(ValueKind):
    """Seconds within bounds, both included: 30, 30s, 500ms, 2m."""

    low: float
    high: float
    metavar: str = "SECONDS"

    def parse(self, text: str) -> float:
        found = _DURATION.fullmatch(text.strip())
        if found is None:
            raise ValueError("be a duration such as 30, 30s or 2m")
        return _within(float(found[1]) * _SECONDS[found[2]], self.low, self.high, _show_seconds)

    def show(self, value: object) -> str:
        return _show_seconds(float(str(value)))


def show_bytes(amount: int) -> str:
    """Format an amount in the largest binary unit that leaves at least 1, to three digits."""
    for size, unit in _UNITS:
        if amount >= size:
            return f"{amount / size:.3g} {unit}"
    return f"{amount} bytes"


def _show_seconds(seconds: float) -> str:
    return f"{seconds:g} s"


def _whole(text: str, *, like: str) -> int:
    """Parse a whole number. Suffix K or i means 1024; suffix k, or B without i, means 1000."""
    found = _HUMAN_NUMBER.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"be {like}")
    digits, unit, binary, byte = found.groups()
    base = 1024 if binary or (unit.isupper() and not byte) else 1000
    scale: int = base ** _POWER[unit.lower()]
    whole, _, fraction = digits.replace("_", "").partition(".")
    # In integers: a float would round large amounts.
    numerator, denominator = int(whole + fraction) * scale, 10 ** len(fraction)
    if numerator % denominator:
        raise ValueError(f"be {like}")
    return int(numerator // denominator)


_Number = TypeVar("_Number", int, float)


def _within(number: _Number, low: _Number, high: _Number, show: Callable[[Any], str]) -> _Number:
    # A comparison that NaN fails.
    if low <= number <= high:
        return number
    raise ValueError(f"be from {show(low)} to {show(high)}")
