"""Callers of scarce places are served by turns of their keys, and none of them fills the line."""

import asyncio

import pytest

from engine.errors import Overloaded, OverloadReason
from engine.processes.turns import TurnsByKey


def opened(num_places: int = 1, max_waiting: int = 4) -> tuple[TurnsByKey, list[str]]:
    return TurnsByKey(num_places, max_waiting, OverloadReason.GRAMMARS), []


async def begun(turns: TurnsByKey, served: list[str], names: str) -> list["asyncio.Task[None]"]:
    """Let callers wait, each by a letter, which is its key."""

    async def serve(name: str) -> None:
        await turns.acquire(name)
        served.append(name)
        turns.release()

    tasks = [asyncio.create_task(serve(name)) for name in names]
    await asyncio.sleep(0)
    return tasks


async def test_keys_take_turns_and_each_is_served_in_its_own_order() -> None:
    turns, served = opened(max_waiting=10)
    await turns.acquire("a")
    tasks = await begun(turns, served, "aaabbc")
    turns.release()
    await asyncio.gather(*tasks)
    assert "".join(served) == "abcaba"
    await asyncio.gather(*await begun(turns, served, "a"))


async def test_a_full_line_takes_the_last_caller_of_the_key_that_fills_it() -> None:
    turns, served = opened()
    await turns.acquire("a")
    many = await begun(turns, served, "aaaa")
    [other] = await begun(turns, served, "b")
    with pytest.raises(Overloaded):
        await many[-1]
    with pytest.raises(Overloaded):
        await turns.acquire("a")
    [third] = await begun(turns, served, "b")
    with pytest.raises(Overloaded):
        await many[-2]
    with pytest.raises(Overloaded):
        await turns.acquire("b")
    turns.release()
    await asyncio.gather(*many[:2], other, third)
    assert "".join(served) == "abab"


@pytest.mark.parametrize("gives_first", [False, True])
async def test_a_caller_that_leaves_loses_no_place(gives_first: bool) -> None:
    turns, served = opened()
    await turns.acquire("a")
    leaving, staying = await begun(turns, served, "ab")
    if gives_first:
        turns.release()
        leaving.cancel()
    else:
        leaving.cancel()
        turns.release()
    await asyncio.wait_for(staying, 1)
    assert served == ["b"]
    await asyncio.wait_for(turns.acquire("c"), 1)
