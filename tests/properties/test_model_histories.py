"""Random histories of models that come and go: calls, hang-ups, loads by hand, failures, changed files.

Time is that of the event loop, which passes only where nothing else is to be done. After each change of a
process: memory is never exceeded, and no model leaves under a lease. At the end each call has ended once,
and none has waited longer than the turns of all others take.
"""

import asyncio
import selectors
from collections import Counter
from math import inf
from random import Random
from types import SimpleNamespace

import pytest

from engine.errors import EngineUnavailable, Overloaded
from engine.models import yard as yard_module
from engine.models.placement import Reservation
from engine.models.yard import (
    BACKGROUND_TURN_S,
    REST_S,
    TURN_S,
    KeepRule,
    ModelYard,
    Waiting,
    YardPlace,
    YardState,
)
from engine.processes.engine_processes import GaveUp
from engine.types import EngineState, Health
from tests.properties.lengths import TIMES, seeds

LONGEST_LOAD_S, LONGEST_UNLOAD_S, LONGEST_CALL_S = 20.0, 2.0, 40.0
LONGEST_CHANGE_S = LONGEST_LOAD_S + LONGEST_UNLOAD_S
PAUSES_S = (0.0, 0.0, 0.001, 0.5, 3.0, 12.0, TURN_S, REST_S)


class _Jumps(selectors.SelectSelector):
    """Wait for no time at all, and say that it has passed."""

    now_s = 1000.0

    def select(self, timeout: float | None = None):
        assert timeout is not None, "nothing would ever happen again"
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now_s

    def run_in_executor(self, executor, func, *args):
        """Call at once what a thread would do, and let it seem to take a second."""
        future = self.create_future()
        self.call_later(1.0, future.set_result, func(*args))
        return future


class Process:
    """The process of one model. Its memory is taken from `start` to the end of `unload`, or to its death."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.holds_memory = self.is_loaded = self.is_dead = self.fails = False
        self._end: asyncio.Future[GaveUp | None] | None = None

    def start(self, spare: object = None) -> None:
        assert not self.holds_memory
        self.holds_memory, self.is_dead = True, False
        self._end = asyncio.get_running_loop().create_future()
        self._world.check()

    async def ready(self) -> None:
        await asyncio.sleep(self._world.random.uniform(0.1, LONGEST_LOAD_S))
        if self.fails:
            raise EngineUnavailable("it is broken")
        self.is_loaded = True

    def health(self) -> Health:
        return Health(state=EngineState.LOADING, is_live=True, detail="", num_steps=0, progress=0.0)

    async def gave_up(self) -> GaveUp | None:
        assert self._end is not None
        return await asyncio.shield(self._end)

    async def unload(self, fault: str = "") -> None:
        place = self._world.places[self._world.processes.index(self)]
        assert fault or not place.num_leases, "it leaves while a call uses it"
        assert fault or not place.rule.is_pinned, "a pinned one leaves"
        self.is_loaded = False
        await asyncio.sleep(self._world.random.uniform(0.0, LONGEST_UNLOAD_S))
        self._ended(None)

    async def use(self, seconds: float) -> None:
        """Compute a reply, which ends with the process at the latest."""
        assert self._end is not None
        await asyncio.wait([self._end], timeout=seconds)

    def die(self) -> None:
        self.is_dead = True
        self._ended(GaveUp(what="it died", fix="", exit_code=1))

    def _ended(self, end: GaveUp | None) -> None:
        self.holds_memory = self.is_loaded = False
        if self._end is not None and not self._end.done():
            self._end.set_result(end)


class World:
    """Models on two devices, calls for them, and what became of each."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.yard = ModelYard(max_waiting=1000)
        self.processes: list[Process] = []
        self.places: list[YardPlace] = []
        self.budgets = {"cpu": random.randint(4, 10), "cuda:0": random.randint(4, 10)}
        for number in range(random.randint(2, 6)):
            device = random.choice(["cpu", "cpu", "cuda:0"])
            room = Reservation(
                device=device,
                num_bytes=random.randint(1, self.budgets[device] - 1),
                budget_bytes=self.budgets[device],
            )
            # The plan of the memory admits no other: each of the rest fits in what a pinned one leaves.
            is_pinned = room.num_bytes == 1 and not any(each.rule.is_pinned for each in self.places)
            keep_alive_s = inf if is_pinned else random.choice([inf, 0.5, 20.0])
            rule = KeepRule(at_start=random.random() < 0.3, is_pinned=is_pinned, keep_alive_s=keep_alive_s)
            self.processes.append(Process(self))
            self.places.append(self.yard.add(f"m{number}", self.processes[-1], rule, room))
            self.places[-1].has_changed = lambda: random.random() < 0.1
        self.ends: Counter[str] = Counter()
        self.num_calls, self.longest_s = 0, 0.0
        self.loop = asyncio.get_running_loop()

    def check(self) -> None:
        held = Counter[str]()
        for each, place in zip(self.processes, self.places, strict=True):
            held[place.room.device] += place.room.num_bytes * each.holds_memory
            assert each.is_loaded or each.is_dead or not place.num_leases
        assert all(num_bytes <= self.budgets[device] for device, num_bytes in held.items())

    async def call(self, place: YardPlace, waiting: Waiting, hold_s: float, patience_s: float) -> None:
        self.num_calls += 1
        began_s = self.loop.time()
        try:
            async with asyncio.timeout(patience_s if patience_s < inf else None):
                await place.lease(waiting)
        except TimeoutError:
            self.ends["left"] += 1
            return
        except (EngineUnavailable, Overloaded) as error:
            self.ends["starved" if "could not be loaded in" in str(error) else "refused"] += 1
            return
        waited_s = self.loop.time() - began_s
        limit_s = TURN_S if waiting is Waiting.IN_LINE else BACKGROUND_TURN_S
        others_s = (len(self.places) + 1) * (LONGEST_CALL_S + LONGEST_CHANGE_S)
        assert waited_s <= limit_s + others_s, (waiting, waited_s)
        self.longest_s = max(self.longest_s, waited_s)
        assert place.is_loaded
        self.check()
        await self.processes[self.places.index(place)].use(hold_s)
        self.check()
        place.release()
        self.check()
        self.ends["served"] += 1

    async def crowd(self, place: YardPlace) -> None:
        """Two callers that leave no moment without a call, for a quarter of an hour."""
        until_s = self.loop.time() + 900.0

        async def caller() -> None:
            while self.loop.time() < until_s and not place.is_failed:
                await self.call(place, Waiting.IN_LINE, self.random.uniform(1.0, 20.0), inf)

        await asyncio.gather(caller(), caller())

    def act(self) -> asyncio.Task[None] | None:
        """Do one thing that clients, operators and processes do."""
        random = self.random
        place = random.choice(self.places)
        process = self.processes[self.places.index(place)]
        chosen = random.random()
        if chosen < 0.7:
            waiting = random.choice([*[Waiting.IN_LINE] * 4, Waiting.BACKGROUND, Waiting.REFUSED])
            hold_s = random.choice([0.0, 0.5, LONGEST_CALL_S])
            patience_s = random.choice([inf, inf, inf, 0.0, 5.0])
            return asyncio.create_task(self.call(place, waiting, hold_s, patience_s))
        if chosen < 0.8:
            place.leave()
        elif chosen < 0.81:
            return asyncio.create_task(self.crowd(place))
        elif chosen < 0.85:
            place.keep_for(random.choice([0.0, 10.0, None]))
        elif chosen < 0.92:
            if not place.is_failed:
                place.come()
        elif chosen < 0.96:
            process.fails = not process.fails
        elif process.is_loaded and place.state is not YardState.LOADING:
            process.die()
        return None


async def play(random: Random) -> World:
    world = World(random)
    world.yard.start()
    calls = []
    for _ in range(random.randint(20, 150)):
        call = world.act()
        if call is not None:
            calls.append(call)
        await asyncio.sleep(random.choice(PAUSES_S))
        world.check()
    await asyncio.gather(*calls)
    assert (world.ends["starved"], sum(world.ends.values())) == (0, world.num_calls)
    assert not any(place.num_leases or place.waiting for place in world.places)
    for place, process in zip(world.places, world.processes, strict=True):
        place.has_changed, process.fails = lambda: False, False
    await asyncio.sleep(2000.0)  # whatever failed may be tried again, and what is idle has left
    for place, process in zip(world.places, world.processes, strict=True):
        assert process.is_loaded == place.is_loaded
        if place.rule.keep_alive_s < inf:
            assert not place.is_loaded
        async with place.held():
            assert process.is_loaded
    await world.yard.close()
    return world


def test_no_model_leaves_under_a_lease_memory_is_never_exceeded_and_none_starves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: Counter[str] = Counter()
    longest_s = 0.0
    for seed in seeds(40):
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            monkeypatch.setattr(yard_module, "time", SimpleNamespace(monotonic=runner.get_loop().time))
            world = runner.run(play(Random(seed)))
        ends += world.ends
        longest_s = max(longest_s, world.longest_s)
    assert min(ends[each] for each in ("served", "refused", "left")) > 60 * TIMES, (
        "the histories are too easy"
    )
    assert longest_s > TURN_S
