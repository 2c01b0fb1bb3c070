"""Length of the longest prefix of which every group has what the next token reads.

Owns: that rule, without any state: a group that lacks something only ever shortens the prefix, and what it
then lacks of a shorter one is asked again, until no group does.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from scheduler.group_places import GroupPlaces

IsFound = Callable[[int], bool]
"""Whether a place is found; of a group with a state: whether one is found that stands at the place's end."""


class LongestHit(NamedTuple):
    """Prefix of which every group has what is read behind it."""

    num_places: int
    bounded_by: int | None
    """Group that lacked what a longer one needs, though those that keep all had that; None: no such group."""


def longest_hit(
    groups: tuple[GroupPlaces, ...], found: Sequence[IsFound], num_places: int, block_size: int
) -> LongestHit:
    """Longest prefix, of at most `num_places`. O(places) calls: no place of a group is asked twice."""
    end, before, bounded_by = num_places, -1, None
    for group, is_found in zip(groups, found, strict=True):
        if group.keeps_all:
            end = next((place for place in range(end) if not is_found(place)), end)
    others = [index for index, group in enumerate(groups) if not group.keeps_all]
    # Places from here on to the end that was reached are known to be found, for each of the others.
    found_from = dict.fromkeys(others, end)
    while end != before:
        before = end
        for index in others:
            group, is_found, longest = groups[index], found[index], end
            if group.is_fixed:
                end = next((place for place in range(end, 0, -1) if is_found(place - 1)), 0)
            else:
                end, found_from[index] = _end_of_run(group, is_found, (end, found_from[index]), block_size)
            if end < longest:
                bounded_by = index
    return LongestHit(end, bounded_by)


def _end_of_run(
    group: GroupPlaces, is_found: IsFound, known: tuple[int, int], block_size: int
) -> tuple[int, int]:
    """Longest end, at most that of `known`, before which all is found that is read behind it.

    Returned with the first place of the run that was looked at; `known` is of an earlier call.
    """
    end, first_known = known
    first_known = min(first_known, end)
    while end:
        first = group.first(end * block_size)
        while first_known > first and is_found(first_known - 1):
            first_known -= 1
        if first_known <= first:
            break
        # Nothing that ends behind the gap will do, since the first place that is read never falls.
        end = first_known = first_known - 1
    return end, first_known
