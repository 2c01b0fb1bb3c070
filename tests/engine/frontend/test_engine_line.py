"""The line before the engines counts the KV blocks that a request takes as the engine itself does."""

from typing import Any

from engine.frontend.engine_line import EngineLine
from scheduler.cache_groups import ALL_TOKENS, CacheGroup, Lifetime, LifetimeKind
from scheduler.group_places import most_blocks, places_of
from scheduler.routing.dispatcher import CallNeeds
from tests.world import small_config

GROUPS = (CacheGroup(ALL_TOKENS, 1), CacheGroup(Lifetime(LifetimeKind.WINDOW, 64), 5))


def test_requests_that_wait_at_an_engine_take_the_blocks_that_each_will_hold() -> None:
    """A window holds all of a step; a long prompt and a short one are not two of half the length."""
    config = small_config(groups=GROUPS, max_model_len=4000, max_num_batched_tokens=500, num_blocks=1000)
    needed = [most_blocks(places_of(config), length) for length in (2000, 3)]
    assert 500 + 5 * 140 < needed[0] < 500 + 5 * 145
    line = EngineLine(2, config)
    sizes = {"block_size": config.block_size, "max_model_len": config.max_model_len}
    line.begin(0, num_blocks=config.num_blocks, groups=GROUPS, **sizes)
    owner: Any = object()
    tickets = [line.add(owner, CallNeeds((), 0, "", 1, length)) for length in (2000, 3)]
    assert [line.next(), line.next()] == tickets
    view = line.views[0]
    assert view.num_unbegun_blocks == sum(needed)
    line.note_start(tickets[0])
    assert view.num_unbegun_blocks == needed[1]
    view.num_free_blocks = needed[1] + view.num_blocks(2000)
    cost_with_room = view.cost(2000)
    view.num_free_blocks -= 1
    assert view.cost(2000) - cost_with_room == config.num_blocks * config.block_size
