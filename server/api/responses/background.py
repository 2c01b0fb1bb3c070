"""Responses that are made whether or not a client waits for them.

Owns: the responses under way, how many of them the engine holds at once, the events of those that were asked
for as streams, and their end: complete, failed or cancelled.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from math import isinf
from typing import Any

from starlette.types import Scope

from engine.errors import DeadlineExceeded, EngineUnavailable, Overloaded
from engine.logs.lines import fields
from server.api.batches.places import FairPlaces
from server.api.responses.event_log import EventLog
from server.api.responses.events import ResponseStream
from server.api.responses.making import Making, ResponseTask, begin_making
from server.edge.error_replies import RateLimited, TooManyOfOneKey, describe, log_failure
from server.edge.http.edge import Edge
from server.edge.http.served_models import end_lease, held

log = logging.getLogger(__name__)

MAX_UNDER_WAY = 1000
MAX_UNDER_WAY_OF_OWNER = 100
_MAX_LOGS = 2 * MAX_UNDER_WAY
_PLACES = 8
_RETRY_AFTER_S = 5.0
_GIVE_UP_S = 24 * 3600.0
_KEPT_WITHIN_S = 2.0
"""Seconds that a cancelling client waits for the disk."""


@dataclass(slots=True, kw_only=True)
class Work:
    """One response under way."""

    edge: Edge
    """The edge of the model that it asks for."""
    owner: str
    """The key that asked for it, by name; empty where there are no keys."""
    task: ResponseTask
    making: Making | None = None
    """The prepared response, for the first try; None: it is prepared when its turn has come."""
    save: Callable[[dict[str, Any]], Awaitable[None]]
    """Keeps the response object at its end."""
    response: dict[str, Any]
    """The response object as it is now."""
    events: EventLog | None = None
    """Its events, if it was asked for as a stream."""
    can_be_left: bool
    """True if the next start of the server makes it again, from the disk."""
    reply: ResponseStream | None = None
    is_cancelled: bool = False
    began_s: float = field(default_factory=time.monotonic)
    running: "asyncio.Task[None] | None" = None


class BackgroundResponses:
    """Responses under way by id, and the events of those that had an end not long ago."""

    def __init__(self, edge: Edge, *, max_event_bytes: int) -> None:
        """`max_event_bytes`: all events together; the oldest go first."""
        self._edge = edge
        self._max_event_bytes = max_event_bytes
        self._works: dict[str, Work] = {}
        self._logs: OrderedDict[str, EventLog] = OrderedDict()
        self._num_event_bytes = 0
        self.places = FairPlaces(_PLACES)
        """For responses that the engine holds, and lines of batches."""

    def require_place(self, owner: str) -> None:
        """Raise TooManyOfOneKey if this owner has too many under way, or its part of what all may have."""
        of_owner = Counter(work.owner for work in self._works.values())
        limit = MAX_UNDER_WAY_OF_OWNER
        if len(self._works) >= MAX_UNDER_WAY:
            limit = min(limit, max(1, MAX_UNDER_WAY // len({*of_owner, owner})))
        if of_owner[owner] >= limit:
            raise TooManyOfOneKey(limit=limit, retry_after_s=_RETRY_AFTER_S)

    def begin(self, response_id: str, work: Work, scope: Scope | None = None) -> None:
        """Make a response, in its turn. `scope`: of the request that asks for it, if one does."""
        if scope is not None:
            end_lease(scope)  # else its reader would keep the model from leaving, for which the work may wait
        if work.making and work.making.request.at_end and not self.places.has_room(work.owner):
            work.making.request.at_end()  # else pictures of a long line would fill the shared memory
            work.making = None
        self._works[response_id] = work
        if work.events is not None:
            self._logs[response_id] = work.events
            self._num_event_bytes += work.events.num_bytes
            self._trim()
        work.running = asyncio.create_task(self._run(response_id, work))

    def find(self, response_id: str, *, owner: str) -> Work | None:
        """Find a response under way; None if there is none of `owner`."""
        work = self._works.get(response_id)
        return work if work is not None and work.owner == owner else None

    def events_of(self, response_id: str) -> EventLog | None:
        """The events of a response, under way or at its end, as long as they are kept."""
        return self._logs.get(response_id)

    def forget_events(self, response_id: str) -> None:
        events = self._logs.pop(response_id, None)
        if events is not None:
            self._num_event_bytes -= events.num_bytes

    async def cancel(self, work: Work) -> dict[str, Any]:
        """End a response; return it as it is then. One that has just had its end stays as it is."""
        assert work.running is not None
        if not work.is_cancelled:
            work.is_cancelled = True
            work.running.cancel()
        await asyncio.wait([work.running], timeout=_KEPT_WITHIN_S)
        work.running.cancel()  # a full disk makes no client wait
        await asyncio.gather(work.running, return_exceptions=True)
        return work.response

    async def leave_to_next_start(self) -> None:
        """Stop what the next start of the server can make again."""
        await self._stop([work for work in self._works.values() if work.can_be_left])

    async def close(self) -> None:
        await self._stop(list(self._works.values()))

    async def _stop(self, works: list[Work]) -> None:
        tasks = [work.running for work in works if work.running is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, response_id: str, work: Work) -> None:
        """Make a response to its end, and keep it."""
        try:
            last = await self._end_of(response_id, work)
            await work.save(work.response)
            self._add(work, last)
            facts = {"key": work.owner or None, "status": work.response["status"]}
            total_s = round(time.monotonic() - work.began_s, 6)
            log.info("background", extra=fields(reply_id=response_id, **facts, total_s=total_s))
        except Exception:
            log.exception("background response %s could not be kept", response_id)
            self._edge.metrics.count_background_fault("response")
        finally:
            work.task.origin.settle()
            del self._works[response_id]
            if work.events is not None:
                work.events.close()

    async def _end_of(self, response_id: str, work: Work) -> list[dict[str, Any]]:
        """Generate; return the events of the end, which are read only once the response is kept."""
        unbegun: dict[str, Any] = {}
        try:
            last = await self._generate(work)
        except asyncio.CancelledError:
            if not work.is_cancelled:  # the server ends
                raise
            last = work.reply.cancel() if work.reply else []
            unbegun = {"status": "cancelled"}
        except Exception as error:  # noqa: BLE001 -- describe has a row for each
            described = describe(error, response_id)
            log_failure(error, described, response_id)
            self._edge.metrics.count_error(described.code)
            last = work.reply.fail(described) if work.reply else []
            unbegun = {"status": "failed", "error": {"code": "server_error", "message": described.message}}
        work.response = work.reply.response if work.reply else work.response | unbegun
        return last

    async def _generate(self, work: Work) -> list[dict[str, Any]]:
        """Generate, and try again for up to a day while there is no room."""
        while True:
            try:
                async with self.places.held_by(work.owner), held(work.edge):
                    # Once: the end of a request lets its pictures go, so that a further try makes its own.
                    making, work.making = work.making or await begin_making(work.edge, work.task), None
                    reply = work.reply = work.reply or making.reply
                    async with aclosing(work.edge.engine.generate_all([making.request])) as outputs:
                        async for place, output in outputs:
                            self._add(work, reply.update(place, output))
                            work.response = reply.response
                return reply.finish()
            except (Overloaded, EngineUnavailable, DeadlineExceeded, RateLimited) as error:
                has_begun = work.reply is not None and work.reply.has_begun
                is_late = time.monotonic() - work.began_s > _GIVE_UP_S
                is_final = has_begun or is_late or getattr(error, "code", "") == "model_broken"
                has_limit = not isinf(work.task.origin.terms.time_limits.nearest_s)  # the client's own
                if is_final or (has_limit and isinstance(error, DeadlineExceeded)):
                    raise
                self.places.rest(work.owner, getattr(error, "retry_after_s", 0.0))

    def _add(self, work: Work, events: list[dict[str, Any]]) -> None:
        if work.events is None or not events:
            return
        before = work.events.num_bytes
        work.events.add(events)
        self._num_event_bytes += work.events.num_bytes - before
        self._trim()

    def _trim(self) -> None:
        """Forget events while they are too many: first those of responses that ended first."""
        while self._num_event_bytes > self._max_event_bytes or len(self._logs) > _MAX_LOGS:
            over = next((name for name, events in self._logs.items() if events.is_over), None)
            if over is not None:
                self.forget_events(over)
                continue
            largest = max(self._logs.values(), key=lambda events: events.num_bytes)
            before = largest.num_bytes
            largest.drop_half()
            self._num_event_bytes += largest.num_bytes - before
