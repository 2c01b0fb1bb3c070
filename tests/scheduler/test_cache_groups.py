"""Lifetimes of layers, and of groups of them."""

import pytest

from scheduler.cache_groups import (
    ALL_TOKENS,
    CacheGroup,
    Lifetime,
    LifetimeKind,
    joint_lifetime,
)
from scheduler.group_places import most_blocks, places_of
from tests.world import small_config

WINDOW = Lifetime(LifetimeKind.WINDOW, 3)
CHUNK = Lifetime(LifetimeKind.CHUNK, 4)
STATE = Lifetime(LifetimeKind.FIXED)


def test_the_first_position_that_is_read_follows_the_lifetime() -> None:
    starts = (0, 2, 3, 4, 7, 8, 9)
    assert [ALL_TOKENS.first_read(start) for start in starts] == [0] * 7
    assert [WINDOW.first_read(start) for start in starts] == [0, 0, 1, 2, 5, 6, 7]
    assert [CHUNK.first_read(start) for start in starts] == [0, 0, 0, 4, 4, 8, 8]
    assert [STATE.first_read(start) for start in starts] == [0] * 7


@pytest.mark.parametrize("kind", [LifetimeKind.WINDOW, LifetimeKind.CHUNK])
def test_a_window_or_a_chunk_of_no_token_is_refused(kind: LifetimeKind) -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        Lifetime(kind)


def test_layers_that_share_blocks_keep_what_one_of_them_still_reads() -> None:
    longer = Lifetime(LifetimeKind.WINDOW, 5)
    assert joint_lifetime([WINDOW, WINDOW]) == WINDOW
    assert joint_lifetime([CHUNK]) == CHUNK
    assert joint_lifetime([WINDOW, longer]) == longer
    assert joint_lifetime([WINDOW, CHUNK]) == Lifetime(LifetimeKind.WINDOW, 4)
    assert joint_lifetime([WINDOW, ALL_TOKENS]) == ALL_TOKENS


def test_blocks_of_a_chunk_are_passed_at_its_end() -> None:
    groups = (CacheGroup(Lifetime(LifetimeKind.CHUNK, 8)),)
    (places,) = places_of(small_config(groups=groups))  # blocks of 4 tokens
    assert [places.first(start) for start in (0, 7, 8, 15, 16)] == [0, 0, 2, 2, 4]
    assert most_blocks((places,), 60) == 7, "7 tokens of the chunk and a step of 16 touch no more"
