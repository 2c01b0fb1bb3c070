"""The longest prefix that every group can go on from, against all lengths tried one after the other."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from scheduler.cache_groups import ALL_TOKENS, CacheGroup, Lifetime, LifetimeKind
from scheduler.group_places import GroupPlaces, places_of
from scheduler.longest_hit import longest_hit
from tests.properties.lengths import histories
from tests.world import small_config

LIFETIMES = st.one_of(
    st.just(ALL_TOKENS),
    st.builds(Lifetime, st.just(LifetimeKind.WINDOW), st.integers(1, 25)),
    st.builds(Lifetime, st.just(LifetimeKind.CHUNK), st.integers(1, 25)),
    st.just(Lifetime(LifetimeKind.FIXED)),
)
NUM_PLACES = 9


def can_go_on(group: GroupPlaces, found: list[bool], end: int, block_size: int) -> bool:
    if group.is_fixed:
        return end == 0 or found[end - 1]
    return all(found[group.first(end * block_size) : end])


@histories(400)
@given(
    st.integers(1, 5),
    st.lists(st.tuples(LIFETIMES, st.integers(0, 2**NUM_PLACES - 1)), min_size=1, max_size=4),
)
def test_it_is_the_longest_of_all_lengths_that_each_group_can_go_on_from(
    block_size: int, drawn: list[tuple[Lifetime, int]]
) -> None:
    config = small_config(block_size=block_size, max_model_len=1000)
    groups = places_of(replace(config, groups=tuple(CacheGroup(lifetime) for lifetime, _ in drawn)))
    found = [[bool(bits >> place & 1) for place in range(NUM_PLACES)] for _, bits in drawn]
    expected = max(
        end
        for end in range(NUM_PLACES + 1)
        if all(can_go_on(group, each, end, block_size) for group, each in zip(groups, found, strict=True))
    )
    hit = longest_hit(groups, [each.__getitem__ for each in found], NUM_PLACES, block_size)
    assert hit.num_places == expected
    alone = [
        longest_hit((group,), [each.__getitem__], NUM_PLACES, block_size).num_places
        for group, each in zip(groups, found, strict=True)
    ]
    kept = [num for group, num in zip(groups, alone, strict=True) if group.keeps_all]
    if expected == min(kept, default=NUM_PLACES):
        assert hit.bounded_by is None
    else:
        assert hit.bounded_by is not None
        assert not groups[hit.bounded_by].keeps_all
