"""The models that leave so that another one fits: a pure choice.

Owns: the rule that nothing leaves which is used or pinned, and that none leaves in vain.
Never: reads a clock, or starts and ends anything (yard.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    device: str
    num_bytes: int
    budget_bytes: int
    """Memory of the device for all models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest(Reservation):
    """A model as the choice sees it."""

    is_loaded: bool
    is_pinned: bool
    num_leases: int
    """Calls that use it now."""
    last_used_s: float


def idle_victims(wanted: int, guests: Sequence[Guest], idle_since_s: float = inf) -> list[int] | None:
    """Choose models, idle since then, that leave for the one at `wanted`; None if it does not fit even so."""
    return _victims(wanted, guests, lambda each: not each.num_leases and each.last_used_s <= idle_since_s)


def busy_victims(wanted: int, guests: Sequence[Guest]) -> list[int] | None:
    """Choose models, idle ones first, that leave once they are idle; None if that is not enough."""
    return _victims(wanted, guests, lambda _: True)


def _victims(wanted: int, guests: Sequence[Guest], may_leave: Callable[[Guest], bool]) -> list[int] | None:
    """Take the least recently used until there is room, then spare those that are not needed for it."""
    own = guests[wanted]
    here = [place for place, each in enumerate(guests) if each.is_loaded and each.device == own.device]
    missing = own.num_bytes + sum(guests[place].num_bytes for place in here) - own.budget_bytes
    line = [place for place in here if not guests[place].is_pinned and may_leave(guests[place])]
    line.sort(key=lambda place: (guests[place].num_leases > 0, guests[place].last_used_s))
    leaving: list[int] = []
    for place in line:
        if missing <= 0:
            break
        leaving.append(place)
        missing -= guests[place].num_bytes
    if missing > 0:
        return None
    for place in list(reversed(leaving)):
        if missing + guests[place].num_bytes <= 0:
            leaving.remove(place)
            missing += guests[place].num_bytes
    return leaving
