"""Viewers: the engine is asked only while there are some, and a slow one holds no more than a few views."""

import asyncio

import pytest

from engine.errors import Overloaded
from engine.frontend.subscribers import MAX_VIEWERS, Subscribers
from engine.process_messages import Watch


async def start(viewers: Subscribers) -> tuple:
    views = viewers.views()
    first = asyncio.create_task(anext(views))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return views, first


async def test_each_viewer_gets_a_view_and_the_engine_is_asked_for_a_lease() -> None:
    asked: list[Watch] = []
    viewers = Subscribers(asked.append)
    viewers.show(b"nobody sees this")
    assert asked == []
    both = [await start(viewers), await start(viewers)]
    assert asked
    viewers.show(b"1")
    assert [await first for _, first in both] == [b"1", b"1"]
    for views, _ in both:
        await views.aclose()


async def test_a_slow_viewer_loses_its_oldest_views() -> None:
    viewers = Subscribers(lambda _: None)
    views, first = await start(viewers)
    viewers.show(b"0")
    assert await first == b"0"
    for number in range(1, 100):
        viewers.show(b"%d" % number)
    assert [await anext(views) for _ in range(4)] == [b"96", b"97", b"98", b"99"]
    await views.aclose()


async def test_one_viewer_too_many_is_refused_until_another_leaves() -> None:
    viewers = Subscribers(lambda _: None)
    all_of_them = [await start(viewers) for _ in range(MAX_VIEWERS)]
    with pytest.raises(Overloaded):
        await anext(viewers.views())
    views, first = all_of_them.pop()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await views.aclose()
    another = await start(viewers)
    viewers.close()
    for views, first in (*all_of_them, another):
        with pytest.raises(StopAsyncIteration):
            await first
        await views.aclose()
