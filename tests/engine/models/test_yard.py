"""Models that come when they are asked for and leave when they are idle; their processes are stand-ins."""

import asyncio
import random
import threading
from collections.abc import Sequence
from math import inf

import pytest

from engine.errors import EngineUnavailable, Overloaded
from engine.models import yard as yard_module
from engine.models.placement import Reservation
from engine.models.yard import KeepRule, ModelYard, Waiting, YardPlace, YardState
from engine.processes.engine_processes import GaveUp
from engine.types import EngineState, Health

ON_DEMAND = KeepRule(at_start=False, keep_alive_s=inf)


class Engine:
    """The processes of a model: loaded after a few turns of the event loop, or not at all."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.is_loaded = self.fails = False
        self.num_loads = 0
        self.spares: list[object] = []
        self.progress, self.fault = 0.0, ""
        self._end: asyncio.Future[GaveUp | None] | None = None

    def start(self, spare: object = None) -> None:
        assert not self.is_loaded
        self.spares.append(spare)
        self._end = asyncio.get_running_loop().create_future()
        self.num_loads += 1

    async def ready(self) -> None:
        await self._world.load()
        if self.fails:
            raise EngineUnavailable("it is broken in /srv/models/weights")
        self.is_loaded = True
        self._world.check()

    def health(self) -> Health:
        """A load that is looked at three times makes some progress between two of them."""
        self.progress = min(self.progress + 0.25, 0.5)
        return Health(
            state=EngineState.LOADING, is_live=True, detail="loading", num_steps=0, progress=self.progress
        )

    async def gave_up(self) -> GaveUp | None:
        assert self._end is not None
        return await asyncio.shield(self._end)

    async def unload(self, fault: str = "") -> None:
        await asyncio.sleep(0)
        self.is_loaded, self.fault = False, fault
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    def give_up(self) -> None:
        assert self._end is not None
        self._end.set_result(GaveUp(what="it died", fix="", exit_code=1))


class Spare:
    """Processes that wait for a configuration: numbers."""

    def __init__(self) -> None:
        self.num_prepared, self.waiting = 0, None

    def prepare(self) -> None:
        if self.waiting is None:
            self.num_prepared += 1
            self.waiting = self.num_prepared

    def take(self) -> int | None:
        taken, self.waiting = self.waiting, None
        return taken

    async def close(self) -> None:
        self.waiting = None


class World:
    """A yard with room for so many models of one byte each."""

    def __init__(
        self,
        *rules: KeepRule,
        room: int,
        max_waiting: int = 100,
        sizes: Sequence[int] = (),
        devices: Sequence[str] = (),
    ) -> None:
        """`sizes` and `devices` are those of the models; without them one byte each, on one device."""
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.room = room
        self.spare = Spare()
        self.yard = ModelYard(max_waiting=max_waiting, spare=self.spare)  # type: ignore[arg-type]
        self.engines = [Engine(self) for _ in rules]
        self.sizes, self.devices = sizes or [1] * len(rules), devices or ["cpu"] * len(rules)
        self.places: list[YardPlace] = []
        for number, (engine, rule) in enumerate(zip(self.engines, rules, strict=True)):
            place = Reservation(device=self.devices[number], num_bytes=self.sizes[number], budget_bytes=room)
            self.places.append(self.yard.add(f"m{number}", engine, rule, place))
        self.yard.start()

    async def load(self) -> None:
        await self.may_load.wait()
        await asyncio.sleep(0)

    def check(self) -> None:
        """Memory is never exceeded, and whatever is leased is loaded."""
        for device in self.devices:
            facts = zip(self.engines, self.sizes, self.devices, strict=True)
            assert sum(size for each, size, at in facts if each.is_loaded and at == device) <= self.room
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


async def test_a_spare_process_loads_what_is_on_the_cpu_and_there_is_one_while_a_model_is_absent() -> None:
    world = World(ON_DEMAND, ON_DEMAND, ON_DEMAND, room=1, devices=["cpu", "cuda:0", "cpu"])
    for place in world.places:
        async with place.held():
            pass
    assert [each.spares for each in world.engines] == [[1], [None], [2]]
    await world.until(lambda: world.spare.waiting == 3)
    await world.yard.close()
    assert world.spare.waiting is None


async def test_no_spare_process_is_kept_where_all_models_are_loaded() -> None:
    world = World(ON_DEMAND, ON_DEMAND, room=2)
    for place in world.places:
        async with place.held():
            pass
    await asyncio.sleep(0.01)
    assert (world.spare.num_prepared, world.spare.waiting) == (2, None)
    await world.yard.close()


async def test_no_spare_process_is_kept_for_a_model_that_is_given_up() -> None:
    world = World(ON_DEMAND, ON_DEMAND, room=2)
    world.places[1].give_up("planted")
    async with world.places[0].held():
        pass
    await asyncio.sleep(0.01)
    assert (world.spare.num_prepared, world.spare.waiting) == (1, None)
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


async def test_a_call_that_is_left_at_any_moment_of_a_load_leaves_no_lease_behind() -> None:
    ends = set()
    # The files are looked at in a thread, which takes any number of turns.
    for num_turns in (*range(12), *(2**power for power in range(4, 16))):
        world = World(ON_DEMAND, room=1)
        world.may_load.clear()
        waiting = asyncio.create_task(world.places[0].lease(Waiting.IN_LINE))
        await world.until(lambda place=world.places[0]: place.state is YardState.LOADING)
        world.may_load.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        waiting.cancel()
        (end,) = await asyncio.gather(waiting, return_exceptions=True)
        assert world.places[0].num_leases == (end is None)
        ends.add(type(end))
        await world.yard.close()
    assert len(ends) == 2


async def test_a_crowd_before_one_model_keeps_no_call_from_waiting_for_another() -> None:
    world = World(ON_DEMAND, ON_DEMAND, room=2, max_waiting=4)
    world.may_load.clear()
    crowd = [asyncio.create_task(world.places[0].lease(Waiting.IN_LINE)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="3 requests wait for m0"):
        await world.places[0].lease(Waiting.IN_LINE)
    waiting = asyncio.create_task(world.places[1].lease(Waiting.IN_LINE))
    await asyncio.sleep(0)
    world.may_load.set()
    await asyncio.gather(waiting, *crowd)
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
    with pytest.raises(
        EngineUnavailable, match=r"^m0: the last load failed: it is broken in weights$"
    ) as refused:
        await world.places[0].lease(Waiting.IN_LINE)
    assert refused.value.retry_after_s == pytest.approx(30)
    await world.until(lambda: world.engines[0].fault == "the last load failed: it is broken in weights")
    with pytest.raises(EngineUnavailable, match="m0 cannot be loaded: the last load failed: it is broken"):
        await world.places[0].lease(Waiting.IN_LINE)
    assert world.engines[0].num_loads == 1
    await world.places[1].lease(Waiting.IN_LINE)
    world.engines[1].give_up()
    await world.until(lambda: not world.places[1].is_loaded)
    with pytest.raises(EngineUnavailable, match="m1 cannot be loaded: its engine ended: it died"):
        await world.places[1].lease(Waiting.IN_LINE)
    assert [dict(each.num_loads) for each in world.places] == [{"failed": 1}, {"loaded": 1}]
    assert [dict(each.num_unloads) for each in world.places] == [{}, {"died": 1}]
    await world.yard.close()


async def test_no_model_leaves_for_one_whose_files_have_changed() -> None:
    world = World(ON_DEMAND, ON_DEMAND, room=1)
    first, second = world.places
    async with first.held():
        pass
    second.has_changed = lambda: True
    with pytest.raises(EngineUnavailable, match="m1: the last load failed: its files have changed"):
        await second.lease(Waiting.IN_LINE)
    await first.lease(Waiting.IN_LINE)
    assert [each.num_loads for each in world.engines] == [1, 0]
    assert not first.num_unloads
    await world.yard.close()


async def test_one_that_died_while_the_files_of_another_were_looked_at_is_not_taken_for_loaded() -> None:
    world = World(ON_DEMAND, ON_DEMAND, room=1)
    first, second = world.places
    async with first.held():
        pass
    may_tell = threading.Event()
    second.has_changed = lambda: may_tell.wait(30)
    asking = asyncio.create_task(second.lease(Waiting.IN_LINE))
    await world.until(lambda: second.state is YardState.LOADING)
    world.engines[0].give_up()
    await world.until(lambda: first.is_failed)
    may_tell.set()
    with pytest.raises(EngineUnavailable, match="m1: the last load failed: its files have changed"):
        await asking
    assert (first.state, second.state) == (YardState.ABSENT, YardState.ABSENT)
    await world.yard.close()


async def test_a_model_with_a_fault_is_refused_with_it_and_never_loaded() -> None:
    world = World(ON_DEMAND, room=1)
    world.places[0].give_up("its weights are cut off; download it again to /srv/models/m0, or '/a b/c'")
    assert world.places[0].fault.endswith("again to m0, or 'c'")
    for waiting in (Waiting.IN_LINE, Waiting.REFUSED):
        with pytest.raises(EngineUnavailable, match="m0 cannot be loaded: its weights are cut off"):
            await world.places[0].lease(waiting)
    assert not world.engines[0].num_loads
    await world.yard.close()


async def test_an_unload_by_hand_takes_back_a_load_that_has_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(yard_module, "TURN_S", 0.0)
    world = World(ON_DEMAND, ON_DEMAND, room=1)
    busy, asked = world.places
    async with busy.held():
        asked.come()
        assert busy.state is YardState.LEAVING
        late = asyncio.create_task(busy.lease(Waiting.IN_LINE))
        await asyncio.sleep(0)
        asked.leave()
        async with asyncio.timeout(30):
            await late
        waiting = asyncio.create_task(asked.lease(Waiting.IN_LINE))
        await asyncio.sleep(0)
        asked.leave()
        assert busy.state is YardState.LEAVING, "a call still waits for it"
        waiting.cancel()
    busy.release()
    await world.yard.close()
    assert world.engines[1].num_loads <= 1


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


async def test_a_load_that_stands_still_fails_and_the_others_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(yard_module, "STANDSTILL_S", 0.01)
    world = World(ON_DEMAND, ON_DEMAND, room=1)
    world.may_load.clear()
    hanging = asyncio.create_task(world.places[0].lease(Waiting.IN_LINE))
    await world.until(lambda: world.places[0].state is YardState.LOADING)
    waiting = asyncio.create_task(world.places[1].lease(Waiting.IN_LINE))
    with pytest.raises(
        EngineUnavailable, match="m0: the last load failed: its load has made no progress for"
    ):
        await asyncio.wait_for(hanging, 30)
    assert world.engines[0].progress == 0.5, "it was left alone while it moved"
    world.may_load.set()
    await waiting
    await world.yard.close()


async def test_a_model_that_waits_for_others_keeps_none_back_that_fits_or_is_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, devices = (3, 4, 1, 4, 4), ("cpu", "cpu", "cpu", "gpu", "gpu")
    world = World(*[ON_DEMAND] * 5, room=4, sizes=sizes, devices=devices)
    busy, large, small, there, also_there = world.places
    for each in (busy, there):
        await each.lease(Waiting.IN_LINE)
    there.release()
    waiting = asyncio.create_task(large.lease(Waiting.IN_LINE))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await small.lease(Waiting.IN_LINE)  # fits beside the busy one
        await also_there.lease(Waiting.IN_LINE)  # for which one leaves there
    monkeypatch.setattr(yard_module, "TURN_S", 0.0)
    world.yard.look()
    assert [busy.state, small.state] == [YardState.LEAVING] * 2
    also_there.release()
    async with asyncio.timeout(30):
        await there.lease(Waiting.IN_LINE)
    assert [busy.state, small.state] == [YardState.LEAVING] * 2, "a load elsewhere lets none in again"
    for each in (busy, small):
        each.release()
    await waiting
    assert [engine.is_loaded for engine in world.engines] == [False, True, False, True, False]
    await world.yard.close()


async def test_background_work_waits_until_a_model_has_been_idle_for_a_while_and_clients_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(yard_module, "REST_S", 1000.0)
    world = World(*[ON_DEMAND] * 3, room=1)
    chat, batch, other = world.places
    async with chat.held():
        work = asyncio.create_task(batch.lease(Waiting.BACKGROUND))
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)
    assert chat.is_loaded
    async with asyncio.timeout(30), other.held():
        assert other.is_loaded, "a client's model is loaded before"
    assert not work.done()
    monkeypatch.setattr(yard_module, "REST_S", 0.01)
    world.yard.look()
    async with asyncio.timeout(30):
        await work
    async with asyncio.timeout(30):
        batch.release()
        async with chat.held():
            monkeypatch.setattr(yard_module, "BACKGROUND_TURN_S", 0.01)
            work = asyncio.create_task(batch.lease(Waiting.BACKGROUND))
            await world.until(lambda: chat.state is YardState.LEAVING)
        await work
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
