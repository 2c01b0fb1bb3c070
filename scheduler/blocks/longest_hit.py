"""Length of the longest prefix of which every group has what the next token reads.

Owns: that rule, without any state: a group that lacks something only ever shortens the prefix, and what it
then lacks of a shorter one is asked again, until no group does.
Never: knows where something is found (prefix_index.py).
"""

from collections.abc import Callable, Sequence

from scheduler.blocks.group_places import GroupPlaces

IsFound = Callable[[int], bool]
"""Whether a place is found; of a group with a state: whether one is found that stands at the place's end."""


def longest_hit(
    groups: tuple[GroupPlaces, ...], found: Sequence[IsFound], num_places: int, block_size: int
) -> int:
    """Places of the prefix, at most `num_places`. O(places) calls: no place of a group is asked twice."""
    end, before = num_places, -1
    for group, is_found in zip(groups, found, strict=True):
        if group.keeps_all:
            end = next((place for place in range(end) if not is_found(place)), end)
    others = [pair for pair in zip(groups, found, strict=True) if not pair[0].keeps_all]
    # Places from here on to the end that was reached are known to be found, for each of the others.
    found_from = [end] * len(others)
    while end != before:
        before = end
        for index, (group, is_found) in enumerate(others):
            if group.is_fixed:
                end = next((place for place in range(end, 0, -1) if is_found(place - 1)), 0)
            else:
                end, found_from[index] = _end_of_run(group, is_found, (end, found_from[index]), block_size)
    return end


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
