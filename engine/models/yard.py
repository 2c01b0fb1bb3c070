"""Models that are loaded when a call asks for them, and leave when they are idle.

Owns: the leases of calls, the line of calls whose model is not loaded, and one load at a time. A call takes
its lease in the moment in which its model is ready, so that no model leaves between a choice and a use.
Never: chooses who leaves (placement.py), or measures memory (memory_shares.py).
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from math import inf, isinf
from typing import TYPE_CHECKING, Any, Protocol

from engine.errors import EngineUnavailable, Overloaded, OverloadReason, without_folders
from engine.frontend.queue_limits import num_free
from engine.models.placement import Guest, Reservation, busy_victims, idle_victims
from engine.types import Health

if TYPE_CHECKING:
    from engine.processes.engine_processes import GaveUp
    from engine.processes.supervisor import EngineProcess, Spare

log = logging.getLogger(__name__)

LOAD_WAIT_S = 600.0
"""Time that a call may wait for its model."""
TURN_S = 30.0
"""Time for which calls of loaded models may keep another one waiting."""
REST_S = 60.0
"""Time for which a model is idle before it leaves for work that no client waits for."""
BACKGROUND_TURN_S = 300.0
"""Time after which such work has its turn as all others do."""
STANDSTILL_S = 600.0
"""Time in which a load makes some progress, or has failed."""
_CHANGED = "its files have changed since the server was started; start it again"
_CPU = "cpu"
_FIRST_BACK_OFF_S, _MAX_BACK_OFF_S = 30.0, 960.0
_GUESSED_LOAD_S = 10.0


class YardState(Enum):
    """The state of a model, by its name in lists."""

    ABSENT = "unloaded"
    LOADING = "loading"
    READY = "loaded"
    LEAVING = "leaving"  # loaded, but new calls wait until another model had its turn


class Waiting(Enum):
    """The treatment of a call whose model is not loaded."""

    IN_LINE = "in line"
    BACKGROUND = "background"  # in line, behind calls of clients
    REFUSED = "refused"  # the model is loaded all the same


class Loadable(Protocol):
    """The engine of a model, as far as its processes are concerned."""

    def start(self, spare: "EngineProcess | None" = None) -> None: ...

    async def ready(self) -> Any: ...

    def health(self) -> Health: ...

    async def gave_up(self) -> "GaveUp | None": ...

    async def unload(self, fault: str = "") -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRule:
    """The times at which a model is loaded and leaves."""

    at_start: bool = True
    is_pinned: bool = False
    """Once loaded, it never leaves."""
    keep_alive_s: float = inf
    """Seconds without a call after which it leaves."""

    @property
    def is_always_loaded(self) -> bool:
        return self.at_start and (self.is_pinned or isinf(self.keep_alive_s))


class YardPlace:
    """One model of the yard. `lease` and `release` are called in pairs."""

    def __init__(
        self, yard: "ModelYard", name: str, engine: Loadable, rule: KeepRule, room: Reservation
    ) -> None:
        self.name, self.engine, self.rule, self.room = name, engine, rule, room
        self.has_changed: Callable[[], bool] = lambda: False
        """Whether its files are others than those that its texts were read from."""
        self.state = YardState.ABSENT
        self.num_leases = 0
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.wanted_since_s = inf
        self.is_urgent = False
        """Whether a client waits for it."""
        self.leaves_for: YardPlace | None = None
        """While it is LEAVING, the model that waits for its memory."""
        self.last_used_s = -inf
        self.keep_alive_s = rule.keep_alive_s
        self.load_s = _GUESSED_LOAD_S
        """Duration of the last load."""
        self.num_loads: Counter[str] = Counter()
        """Loads by their end: `loaded` or `failed`."""
        self.num_unloads: Counter[str] = Counter()
        """Unloads by the reason: `idle`, `evicted` for another one, or `died`."""
        self.sum_load_s = 0.0
        self.failed_until_s = -inf
        self.num_failures = 0
        self.fault = ""
        """Reason why it cannot be loaded until then, or was not the last time, as clients may see it."""
        self.watching: asyncio.Task[None] | None = None
        self._yard = yard

    @property
    def is_loaded(self) -> bool:
        return self.state in (YardState.READY, YardState.LEAVING)

    @property
    def is_failed(self) -> bool:
        """Whether calls are refused, for a while or until the next start, with the reason in `fault`."""
        return self.failed_until_s > time.monotonic()

    @property
    def expires_in_s(self) -> float:
        """Seconds until it leaves if no call comes."""
        if self.rule.is_pinned or self.num_leases:
            return inf
        return max(0.0, self.last_used_s + self.keep_alive_s - time.monotonic())

    @property
    def guest(self) -> Guest:
        return Guest(
            device=self.room.device,
            num_bytes=self.room.num_bytes,
            budget_bytes=self.room.budget_bytes,
            is_loaded=self.is_loaded,
            is_pinned=self.rule.is_pinned,
            num_leases=self.num_leases,
            last_used_s=self.last_used_s,
        )

    async def lease(self, waiting: Waiting) -> None:
        """Keep the model from leaving until `release`; wait until it is loaded.

        Raises EngineUnavailable if it cannot be had now, Overloaded if too many wait.
        """
        self.keep_for(None)
        if self.state is YardState.READY:
            self.num_leases += 1
            return
        await self._yard.wait_for(self, waiting)

    def keep_for(self, seconds: float | None) -> None:
        """Let it stay idle for so long after this call, at most as its rule says; None is what that says."""
        longest_s = self.rule.keep_alive_s
        self.keep_alive_s = longest_s if seconds is None else min(seconds, longest_s)

    def give_up(self, fault: str) -> None:
        """Never load it: its calls are refused with this reason."""
        self.fault, self.failed_until_s = without_folders(fault), inf

    def come(self) -> None:
        """Be loaded as soon as there is room for it, as if a call asked. Raises EngineUnavailable."""
        self.keep_for(None)
        if self.state is not YardState.READY:
            self._yard.require_hope(self)
            self._yard.want(self, Waiting.REFUSED)

    def leave(self) -> None:
        """Leave once no call uses it, unless it is pinned or another call comes before.

        A load that has not begun, and for which no call waits, is taken back.
        """
        self.keep_for(0)
        if self.state is YardState.ABSENT and not self.waiting:
            self.wanted_since_s, self.is_urgent = inf, False
        self._yard.look()

    def release(self) -> None:
        self._yard.release(self)

    @asynccontextmanager
    async def held(self, waiting: Waiting = Waiting.IN_LINE) -> AsyncIterator[None]:
        await self.lease(waiting)
        try:
            yield
        finally:
            self.release()


class ModelYard:
    """The places of all models. For use from one event loop."""

    def __init__(self, *, max_waiting: int, spare: "Spare | None" = None) -> None:
        """`max_waiting`: calls that may wait for models; `spare` loads the next one on the CPU."""
        self._max_waiting = max_waiting
        self._spare = spare
        self.places: list[YardPlace] = []
        self._switching: asyncio.Task[None] | None = None
        self._look_again: asyncio.TimerHandle | None = None
        self._is_closed = False

    def add(
        self, name: str, engine: Loadable, rule: KeepRule, room: Reservation, fault: str = ""
    ) -> YardPlace:
        """With `fault` it is never loaded: calls are refused with this reason."""
        self.places.append(YardPlace(self, name, engine, rule, room))
        if fault:
            self.places[-1].give_up(fault)
        return self.places[-1]

    def start(self) -> None:
        """Begin to load the models that are loaded at the start, in their order."""
        now_s = time.monotonic()
        for place in self.places:
            if place.rule.at_start:
                place.wanted_since_s, place.is_urgent = now_s, True
        self.look()

    def require_hope(self, place: YardPlace) -> None:
        """Raise EngineUnavailable if a model cannot be loaded now, whatever leaves."""
        if self._is_closed:
            raise EngineUnavailable("the server is shutting down", code="shutting_down")
        if place.is_failed:
            why = f"{place.name} cannot be loaded: {place.fault}"
            if isinf(place.failed_until_s):
                raise EngineUnavailable(why, code="model_broken")
            raise EngineUnavailable(why, retry_after_s=place.failed_until_s - time.monotonic())

    async def wait_for(self, place: YardPlace, waiting: Waiting) -> None:
        """Wait in line for a lease of a model that is not loaded."""
        self.require_hope(place)
        if waiting is Waiting.REFUSED:
            self.want(place, waiting)
            raise EngineUnavailable(f"{place.name} is being loaded", retry_after_s=place.load_s)
        others = [len(each.waiting) for each in self.places if each is not place]
        if place.waiting and num_free(self._max_waiting, len(place.waiting), others) <= 0:
            raise Overloaded(
                f"{len(place.waiting)} requests wait for {place.name}, which is not loaded; try again later",
                retry_after_s=place.load_s,
                reason=OverloadReason.REQUESTS,
            )
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place.waiting.append(waiter)
        self.want(place, waiting)
        try:
            async with asyncio.timeout(LOAD_WAIT_S):
                await waiter
        except (TimeoutError, asyncio.CancelledError) as end:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(place)  # it had just been granted
            if isinstance(end, TimeoutError):
                why = f"{place.name} could not be loaded in {LOAD_WAIT_S:.0f} s: others are in use"
                raise EngineUnavailable(why, retry_after_s=TURN_S) from None
            raise
        finally:
            if waiter in place.waiting:
                place.waiting.remove(waiter)

    def release(self, place: YardPlace) -> None:
        place.num_leases -= 1
        place.last_used_s = time.monotonic()
        if not place.num_leases:
            self.look()

    async def close(self) -> None:
        """Load nothing more, and refuse all that wait."""
        self._is_closed = True
        if self._look_again is not None:
            self._look_again.cancel()
        for place in self.places:
            self._refuse(place, "the server is shutting down", code="shutting_down")
        tasks = [self._switching, *(place.watching for place in self.places)]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
        if self._spare is not None:
            await self._spare.close()

    def want(self, place: YardPlace, waiting: Waiting) -> None:
        """Put a model into the line of those that are to be loaded."""
        if waiting is not Waiting.BACKGROUND and not place.is_urgent:
            place.is_urgent, place.wanted_since_s = True, inf  # its turn counts from the first client
        place.wanted_since_s = min(place.wanted_since_s, time.monotonic())
        self.look()

    def look(self) -> None:
        """Begin the next change, if there is one to make now; else look again when there may be."""
        if self._switching is not None or self._is_closed:
            return
        for place in self.places:
            other = place.leaves_for if place.state is YardState.LEAVING else None
            if other is not None and isinf(other.wanted_since_s):  # its turn again
                self._open(place)
        now_s = time.monotonic()
        guests = [place.guest for place in self.places]
        next_look_s = inf
        devices: set[str] = set()
        """Devices for which a model waits: a later one there is loaded if none leaves for it."""
        for number in self._line(now_s):
            place = self.places[number]
            may_push = place.is_urgent or _turn_s(place) <= now_s
            victims = idle_victims(number, guests, inf if may_push else now_s - REST_S)
            is_first = place.room.device not in devices
            if victims is not None and (is_first or not victims):
                self._begin_switch(place, [self.places[each] for each in victims])
                return
            if is_first and _turn_s(place) > now_s:
                rests_s = [each.last_used_s + REST_S for each in guests if each.is_loaded and not may_push]
                next_look_s = min(next_look_s, _turn_s(place), *(each for each in rests_s if each > now_s))
            elif is_first:  # the last release looks
                for each in busy_victims(number, guests) or ():
                    self.places[each].state, self.places[each].leaves_for = YardState.LEAVING, place
            devices.add(place.room.device)
        expired = [each for each in self.places if each.state is YardState.READY and not each.expires_in_s]
        if expired:
            expired[0].state = YardState.ABSENT
            expired[0].num_unloads["idle"] += 1
            self._begin(partial(self._unload, expired[0]))
            return
        ends_s = [now_s + each.expires_in_s for each in self.places if each.state is YardState.READY]
        self._plan_look(min([next_look_s, *ends_s]) - now_s)
        self._prepare_spare()

    def _prepare_spare(self) -> None:
        absent = [each for each in self.places if each.state is YardState.ABSENT and not each.is_failed]
        if self._spare is not None and any(each.room.device == _CPU for each in absent):
            self._spare.prepare()

    def _line(self, now_s: float) -> list[int]:
        """List the models that wait to be loaded: those of clients, or whose turn has come, by their time."""
        wanted = [
            number
            for number, place in enumerate(self.places)
            if place.state is YardState.ABSENT and place.wanted_since_s < inf
        ]
        return sorted(
            wanted,
            key=lambda number: (
                not self.places[number].is_urgent and _turn_s(self.places[number]) > now_s,
                self.places[number].wanted_since_s,
            ),
        )

    def _begin_switch(self, place: YardPlace, victims: Sequence[YardPlace]) -> None:
        for each in victims:  # at once: the next call for one of them must not be let in
            each.state = YardState.ABSENT
        place.state = YardState.LOADING
        self._begin(partial(self._switch, place, victims))

    def _plan_look(self, in_s: float) -> None:
        if self._look_again is not None:
            self._look_again.cancel()
        self._look_again = None
        if not isinf(in_s):
            self._look_again = asyncio.get_running_loop().call_later(in_s, self.look)

    def _begin(self, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def change_and_look() -> None:
            try:
                await change()
            except Exception:
                log.exception("a model could not be loaded or unloaded")
                for place in self.places:
                    if place.state is YardState.LOADING:
                        await self._fail(place, "an error of the server, which the log has")
            finally:
                self._switching = None
                self.look()

        self._switching = asyncio.create_task(change_and_look())

    async def _switch(self, place: YardPlace, victims: Sequence[YardPlace]) -> None:
        began_s = time.monotonic()
        if await asyncio.to_thread(place.has_changed):
            for each in victims:
                if not each.is_failed:  # it has not died meanwhile
                    self._open(each)
            await self._fail(place, _CHANGED)
            return
        for each in victims:
            each.num_unloads["evicted"] += 1
            await self._unload(each)
        place.engine.start(self._spare.take() if self._spare and place.room.device == _CPU else None)
        try:
            await _loaded(place.engine)
        except EngineUnavailable as error:
            await self._fail(place, str(error))
            return
        place.load_s, place.num_failures, place.fault = time.monotonic() - began_s, 0, ""
        place.num_loads["loaded"] += 1
        place.sum_load_s += place.load_s
        place.last_used_s = time.monotonic()
        place.watching = asyncio.create_task(self._watch(place))
        log.info("%s is loaded, in %.1f s", place.name, place.load_s)
        self._open(place)

    def _open(self, place: YardPlace) -> None:
        place.state, place.leaves_for = YardState.READY, None
        place.wanted_since_s, place.is_urgent = inf, False
        while place.waiting:
            waiter = place.waiting.popleft()
            if not waiter.done():
                place.num_leases += 1
                waiter.set_result(None)

    async def _unload(self, place: YardPlace) -> None:
        if place.watching is not None:
            place.watching.cancel()
        await place.engine.unload()
        log.info("%s is unloaded", place.name)

    async def _watch(self, place: YardPlace) -> None:
        """Refuse calls of a loaded model that is given up as those of one that failed."""
        end = await place.engine.gave_up()
        if end is not None:
            place.watching = None
            place.num_unloads["died"] += 1
            await self._fail(place, f"its engine ended: {end.what}")

    async def _fail(self, place: YardPlace, why: str) -> None:
        if place.state is YardState.LOADING:
            place.num_loads["failed"], why = place.num_loads["failed"] + 1, f"the last load failed: {why}"
        place.num_failures += 1
        back_off_s = min(_FIRST_BACK_OFF_S * 2 ** (place.num_failures - 1), _MAX_BACK_OFF_S)
        place.failed_until_s, place.fault = time.monotonic() + back_off_s, without_folders(why)
        place.state, place.wanted_since_s, place.is_urgent = YardState.ABSENT, inf, False
        log.critical("%s is not loaded for %.0f s: %s", place.name, back_off_s, why)
        self._refuse(place, f"{place.name}: {place.fault}", retry_after_s=back_off_s)
        await place.engine.unload(place.fault)
        self.look()

    def _refuse(self, place: YardPlace, why: str, **more: Any) -> None:
        """End each wait with an error of its own: the server may tell one caller less than another."""
        while place.waiting:
            waiter = place.waiting.popleft()
            if not waiter.done():
                waiter.set_exception(EngineUnavailable(why, **more))


def _turn_s(place: YardPlace) -> float:
    """The time at which others begin to leave for it."""
    return place.wanted_since_s + (TURN_S if place.is_urgent else BACKGROUND_TURN_S)


async def _loaded(engine: Loadable) -> None:
    """Wait until a model is loaded. Raises EngineUnavailable, also for a load that stands still."""
    ready = asyncio.ensure_future(engine.ready())
    try:
        while True:
            before = engine.health()
            if (await asyncio.wait([ready], timeout=STANDSTILL_S))[0]:
                await ready
                return
            now = engine.health()
            if (now.progress, now.detail) == (before.progress, before.detail):
                raise EngineUnavailable(f"its load has made no progress for {STANDSTILL_S:.0f} s")
    finally:
        ready.cancel()
