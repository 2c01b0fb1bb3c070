"""Models that come when they are asked for and leave when they are idle; their processes are stand-ins."""

import asyncio
import random
from math import inf

import pytest

from engine.errors import EngineUnavailable, Overloaded
from engine.models import yard as yard_module
from engine.models.yard import KeepRule, ModelYard, Reservation, Waiting, YardPlace, YardState
from engine.processes.engine_processes import GaveUp

ON_DEMAND = KeepRule(at_start=False, keep_alive_s=inf)


class Engine:
    """The processes of a model: loaded after a few turns of the event loop, or not at all."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.is_loaded = self.fails = False
        self.num_loads = 0
        self._end: asyncio.Future[GaveUp | None] | None = None

    def start(self) -> None:
        assert not self.is_loaded
        self._end = asyncio.get_running_loop().create_future()
        self.num_loads += 1

    async def ready(self) -> None:
        await self._world.load()
        if self.fails:
            raise EngineUnavailable("it is broken")
        self.is_loaded = True
        self._world.check()

    async def gave_up(self) -> GaveUp | None:
        assert self._end is not None
        return await asyncio.shield(self._end)

    async def unload(self) -> None:
        await asyncio.sleep(0)
        self.is_loaded = False
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    def give_up(self) -> None:
        assert self._end is not None
        self._end.set_result(GaveUp(what="it died", fix="", exit_code=1))


class World:
    """A yard with room for so many models of one byte each."""

    def __init__(self, *rules: KeepRule, room: int, max_waiting: int = 100) -> None:
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.room = room
        self.yard = ModelYard(max_waiting=max_waiting)
        self.engines = [Engine(self) for _ in rules]
        self.places: list[YardPlace] = []
        for number, (engine, rule) in enumerate(zip(self.engines, rules, strict=True)):
            place = Reservation(device="cpu", num_bytes=1, budget_bytes=room)
            self.places.append(self.yard.add(f"m{number}", engine, rule, place))
        self.yard.start()

    async def load(self) -> None:
        await self.may_load.wait()
        await asyncio.sleep(0)

    def check(self) -> None:
        """Memory is never exceeded, and whatever is leased is loaded."""
        assert sum(engine.is_loaded for engine in self.engines) <= self.room
        for engine, place in zip(self.engines, self.places, strict=True):
            assert engine.is_loaded or not place.num_leases

    async def until(self, condition) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0)


async def test_a_call_waits_for_its_model_and_an_idle_one_leaves_for_another() -> None:
    world = World(ON_DEMAND, ON_DEMAND, room=1)
    first, second = world.places
    await first.lease(Waiting.IN_LINE)
    assert first.is_loaded
    waiting = asyncio.create_task(second.lease(Waiting.IN_LINE))
    await asyncio.sleep(0.01)
    assert not waiting.done(), "what is used does not leave"
    first.release()
    await waiting
    assert [engine.is_loaded for engine in world.engines] == [False, True]
    await world.yard.close()


async def test_models_of_the_start_are_loaded_at_once_one_after_the_other_and_a_pinned_one_stays() -> None:
    world = World(KeepRule(is_pinned=True), KeepRule(), ON_DEMAND, room=2)
    await world.until(lambda: sum(engine.is_loaded for engine in world.engines) == 2)
    assert [engine.is_loaded for engine in world.engines] == [True, True, False]
    await world.places[2].lease(Waiting.IN_LINE)
    assert [engine.is_loaded for engine in world.engines] == [True, False, True]
    await world.yard.close()


async def test_a_model_leaves_once_it_was_idle_for_its_time() -> None:
    world = World(KeepRule(at_start=False, keep_alive_s=0.02), room=1)
    (place,) = world.places
    async with place.held():
        await asyncio.sleep(0.05)
        assert place.is_loaded
    assert place.is_loaded
    await world.until(lambda: not world.engines[0].is_loaded)
    async with place.held():
        assert world.engines[0].num_loads == 2
    await world.yard.close()


async def test_a_call_that_does_not_wait_is_refused_and_the_model_is_loaded_all_the_same() -> None:
    world = World(ON_DEMAND, room=1)
    with pytest.raises(EngineUnavailable, match="m0 is being loaded") as refused:
        await world.places[0].lease(Waiting.REFUSED)
    assert refused.value.retry_after_s > 0
    await world.until(lambda: world.engines[0].is_loaded)
    assert not world.places[0].num_leases
    await world.yard.close()


async def test_a_hang_up_leaves_the_line_and_does_not_stop_the_load() -> None:
    world = World(ON_DEMAND, room=1)
    world.may_load.clear()
    leaving, staying = (asyncio.create_task(world.places[0].lease(Waiting.IN_LINE)) for _ in range(2))
    await world.until(lambda: world.places[0].state is YardState.LOADING)
    leaving.cancel()
    world.may_load.set()
    await staying
    assert (world.places[0].num_leases, world.engines[0].num_loads) == (1, 1)
    await world.yard.close()


async def test_few_calls_wait_for_models_that_are_not_loaded() -> None:
    world = World(ON_DEMAND, ON_DEMAND, room=2, max_waiting=2)
    world.may_load.clear()
    waiting = [asyncio.create_task(place.lease(Waiting.IN_LINE)) for place in world.places]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await world.places[0].lease(Waiting.IN_LINE)
    world.may_load.set()
    await asyncio.gather(*waiting)
    await world.places[0].lease(Waiting.IN_LINE)
    await world.yard.close()


async def test_a_model_that_fails_is_refused_for_a_while_and_the_others_are_served() -> None:
    world = World(ON_DEMAND, ON_DEMAND, room=1)
    world.engines[0].fails = True
    with pytest.raises(EngineUnavailable, match="m0: it is broken") as refused:
        await world.places[0].lease(Waiting.IN_LINE)
    assert refused.value.retry_after_s == pytest.approx(30)
    with pytest.raises(EngineUnavailable, match="m0 could not be loaded"):
        await world.places[0].lease(Waiting.IN_LINE)
    assert world.engines[0].num_loads == 1
    await world.places[1].lease(Waiting.IN_LINE)
    world.engines[1].give_up()
    await world.until(lambda: not world.places[1].is_loaded)
    with pytest.raises(EngineUnavailable, match="m1 could not be loaded"):
        await world.places[1].lease(Waiting.IN_LINE)
    await world.yard.close()


async def test_a_model_that_is_always_used_gives_way_after_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yard_module, "TURN_S", 0.02)
    world = World(ON_DEMAND, ON_DEMAND, room=1)
    num_served = [0, 0]

    async def ask(number: int) -> None:
        """Two callers of each model always have a call under way."""
        while min(num_served) < 20:
            async with world.places[number].held():
                world.check()
                await asyncio.sleep(0.001)
            num_served[number] += 1

    async with asyncio.timeout(60):
        await asyncio.gather(*(ask(number) for number in (0, 0, 1, 1)))
    assert world.engines[0].num_loads >= 2
    await world.yard.close()


async def test_the_end_refuses_all_that_wait() -> None:
    world = World(ON_DEMAND, room=1)
    world.may_load.clear()
    waiting = asyncio.create_task(world.places[0].lease(Waiting.IN_LINE))
    await asyncio.sleep(0)
    await world.yard.close()
    for refused in (waiting, world.places[0].lease(Waiting.IN_LINE)):
        with pytest.raises(EngineUnavailable) as end:
            await refused
        assert end.value.code == "shutting_down"


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_comes_each_call_is_served_or_refused_and_memory_is_never_exceeded(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yard_module, "TURN_S", 0.005)
    chance = random.Random(seed)
    rules = [KeepRule(at_start=False, keep_alive_s=0.01)] * 3
    world = World(*rules, room=2, max_waiting=300)
    num_served = 0

    async def call(number: int) -> None:
        nonlocal num_served
        await asyncio.sleep(chance.random() * 0.2)
        async with world.places[number].held():
            for _ in range(chance.randrange(4)):
                world.check()
                await asyncio.sleep(chance.random() * 0.004)
        num_served += 1

    calls = [asyncio.create_task(call(chance.randrange(3))) for _ in range(300)]
    for each in chance.sample(calls, 40):
        await asyncio.sleep(0.002)
        each.cancel()
    async with asyncio.timeout(60):
        ends = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(end) for end in ends} <= {type(None), asyncio.CancelledError}
    assert num_served >= 260
    assert all(not place.num_leases and not place.waiting for place in world.places)
    await world.until(lambda: not any(engine.is_loaded for engine in world.engines))
    await world.yard.close()
