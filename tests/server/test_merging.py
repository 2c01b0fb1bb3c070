"""Several generations become one stream, and end together if one of them fails."""

import asyncio
from contextlib import aclosing

import pytest

from server.merging import merged

closed: list[str] = []


async def generation(name, *, outputs=3, error=None, pause_s=0.0):
    try:
        for place in range(outputs):
            await asyncio.sleep(pause_s)
            yield f"{name}{place}"
        if error is not None:
            raise error
    finally:
        await asyncio.sleep(0)  # as an abort does
        closed.append(name)


@pytest.fixture(autouse=True)
def nothing_closed():
    closed.clear()


@pytest.mark.parametrize("num_generations", [0, 1, 2, 7])
async def test_every_output_comes_once_and_in_its_order(num_generations):
    seen = [item async for item in merged([generation(str(i)) for i in range(num_generations)])]
    for i in range(num_generations):
        assert [output for place, output in seen if place == i] == [f"{i}{n}" for n in range(3)]
    assert sorted(closed) == [str(i) for i in range(num_generations)]


async def test_the_first_error_closes_all():
    async def read() -> None:
        async for _ in merged([generation("slow", pause_s=10), generation("bad", error=KeyError("x"))]):
            pass

    with pytest.raises(KeyError):
        await asyncio.wait_for(read(), timeout=1)
    assert sorted(closed) == ["bad", "slow"]


@pytest.mark.parametrize("num_generations", [1, 3])
async def test_leaving_closes_all(num_generations):
    async with aclosing(merged([generation(str(i), outputs=100) for i in range(num_generations)])) as outputs:
        async for _ in outputs:
            break
    assert len(closed) == num_generations


async def test_a_slow_reader_holds_the_generations_back():
    made = []

    async def eager(name):
        for place in range(100):
            made.append(name)
            yield place

    async with aclosing(merged([eager("a"), eager("b")])) as outputs:
        async for _ in outputs:
            await asyncio.sleep(0.01)
            break
    assert len(made) < 10
