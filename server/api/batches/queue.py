"""Batches of a running server: of each key one at a time, all keys in turn, at the lowest priority.

Owns: the steps of a batch from validating to its end, going on with it after a restart, and that whatever
goes wrong with a line or a batch is the end of that line or batch alone.

An answer is on disk before its line counts as answered, and the output of a batch is its answers. A line is
sent once in each pass over the file: one that was refused for lack of room, or had no turn, is left to the
next pass, so that nothing about it has to be kept, and its key rests. A line without an answer is sent when
the server runs again, so that a restart loses and repeats no answer. What a disk does not take is tried again
until it does.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from server.api.batches.access import PAUSE_S, StateAccess, settled_time_s, unix_time_s
from server.api.batches.batch_routes import WINDOW_S
from server.api.batches.lines import (
    BatchFileError,
    BatchRequest,
    LineFault,
    answer_line,
    failed_line,
    fault_line,
    numbered_requests,
)
from server.api.batches.places import MIN_REST_S, FairPlaces
from server.api.batches.run import Client, asked_wait_s, helps_to_retry, some_at_a_time
from server.api.batches.store import Answer, FilePart, OpenBatch, OwnerFull, StateStore
from server.edge.http.http_client import Reply
from server.reply.generate.protocol import INT32_MAX

log = logging.getLogger(__name__)

MAX_LINES = 50_000
_TIMED_OUT = 504
_FAULT_OF_OURS = 500
_MAX_FAULTS = 2
"""Times that a line may end so: the engine process may have died of it."""
_TIME_LIMITS = ("timeout", "queue_timeout", "first_token_timeout")
_SWEEP_S = 3600.0
"""Between two looks for what is old."""
_LEFT_AT_START_S = 3600.0
"""Seconds that a batch has at least after a start: the clock may have been wrong then, or before."""
_LONGEST_PAUSE_S = 900.0
_OUR_FAULT = "the batch failed by a fault of the server, which its log has; what was answered is in its files"
_FAULTS = (Exception, asyncio.CancelledError)
"""Whatever may come out of a step; also the cancelling of what it waited for, which did not mean the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    owner: str
    id: str
    file_id: str
    endpoint: str
    ends_s: float
    """Time of the event loop at which it expires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    number: int
    custom_id: str
    body: bytes
    fault: str
    """The reason for which it cannot be sent; empty if it can."""
    has_time_limit: bool
    """True if the line itself says how long it may take."""


class BatchQueue:
    """Works through the batches of a desk."""

    def __init__(
        self,
        desk: StateAccess,
        client_of: Callable[[str], Client],
        places: FairPlaces,
        *,
        count_fault: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`client_of` makes a client that sends requests as the key of this name.

        `count_fault` takes the part that failed by a fault of ours.
        """
        self._desk = desk
        self._client_of = client_of
        self._places = places
        self._count_fault = count_fault
        self._ends_s: dict[str, float] = {}
        """For each batch under way, the time of the event loop at which it expires."""
        self._working: dict[str, asyncio.Task[None]] = {}
        """For each owner of one, the task that works on them."""

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            while True:
                await self._despite_faults(self._look, self)
        finally:
            working = list(self._working.values())
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)

    async def _despite_faults(self, action: Callable[[], Awaitable[bool]], waiting: object) -> bool:
        """Return what a step returns; True after a fault of ours, once some time has passed."""
        try:
            goes_on = await action()
        except _FAULTS as error:
            _raise_if_stopped(error)
            log.error("no batch can be worked on; tried again", exc_info=error)
            self._count_fault("batches")
            self._desk.waits(waiting, error)
            await asyncio.sleep(PAUSE_S)
            return True
        self._desk.goes_on(waiting)
        return goes_on

    async def _look(self) -> bool:
        """Delete what is old, have a task for each owner of an open batch, and wait until that changes."""
        changed = self._desk.changed
        await self._desk.keep(lambda store: store.delete_old(settled_time_s()))
        found = await self._desk.keep(StateStore.open_batches)
        self._ends_s = {each.id: self._end_s(each) for each in found}
        for owner in {each.owner for each in found} - self._working.keys():
            self._working[owner] = task = asyncio.create_task(self._work_for(owner))
            task.add_done_callback(partial(self._forget, owner))
        self._desk.goes_on(self)
        with suppress(TimeoutError):
            async with asyncio.timeout(_SWEEP_S):
                await changed.wait()
        return True

    def _end_s(self, batch: OpenBatch) -> float:
        """Time of the event loop at which a batch expires: fixed when it is first seen in this run."""
        now_s = asyncio.get_running_loop().time()
        return self._ends_s.setdefault(batch.id, now_s + _left_s(batch.expires_s))

    def _forget(self, owner: str, _: "asyncio.Task[None]") -> None:
        del self._working[owner]
        self._desk.wake()  # another batch may have come meanwhile

    async def _work_for(self, owner: str) -> None:
        """Work on the batches of one owner, one after the other, until there is none."""
        stuck: set[str] = set()
        waiting = object()
        try:
            while await self._despite_faults(partial(self._take_next, owner, stuck), waiting):
                pass
        finally:
            self._desk.goes_on(waiting)

    async def _take_next(self, owner: str, stuck: set[str]) -> bool:
        """Bring a batch to its end; False if there is none. Those that are `stuck` come last."""
        found = [each for each in await self._desk.keep(StateStore.open_batches) if each.owner == owner]
        if not found:
            return False
        if stuck.issuperset(each.id for each in found):
            stuck.clear()
        batch = next(each for each in found if each.id not in stuck)
        batch_id = batch.id
        stuck.add(batch_id)
        try:
            await self._advance(batch)
        except _Unfit as error:
            await self._fail(batch_id, "invalid_file", str(error), line=error.line)
        except OwnerFull as error:
            await self._fail(batch_id, "storage_full", str(error))
        except _FAULTS as error:
            _raise_if_stopped(error)
            log.error("batch %s: failed", batch_id, exc_info=error)
            self._count_fault("batch")
            await self._fail(batch_id, "internal_error", _OUR_FAULT)
        stuck.discard(batch_id)
        return True

    async def _advance(self, opened: OpenBatch) -> None:
        """Bring one batch to its end. Raises _Unfit, OwnerFull."""
        owner, batch_id = opened.owner, opened.id
        found = await self._desk.keep(lambda store: store.batch(owner, batch_id))
        assert found is not None, "batches under way are not deleted"
        batch = _Batch(
            owner=owner,
            id=batch_id,
            file_id=found["input_file_id"],
            endpoint=found["endpoint"],
            ends_s=self._end_s(opened),
        )
        if found["status"] == "validating":
            num_lines = await self._check_lines(batch)
            counts = {"total": num_lines, "completed": 0, "failed": 0}
            changes = {"status": "in_progress", "in_progress_at": unix_time_s(), "request_counts": counts}
            await self._desk.keep(
                lambda store: store.update_batch(batch_id, changes, expected={"validating"})
            )
        end = await self._send_until_the_end(batch)
        now_s = unix_time_s()
        changes = {"status": end, f"{end}_at": now_s, "finalizing_at": now_s}
        await self._desk.keep(lambda store: store.finish(batch_id, changes))
        log.info("batch %s: %s", batch_id, end)

    async def _check_lines(self, batch: _Batch) -> int:
        """Count the lines of a file. Raises _Unfit if they cannot be a batch."""
        seen: set[str] = set()
        async for part in self._desk.parts(batch.file_id):
            await asyncio.to_thread(_check_part, part, batch.endpoint, seen)
        if not seen:
            raise _Unfit("the file has no lines")
        return len(seen)

    async def _send_until_the_end(self, batch: _Batch) -> str:
        """Send the open lines; return the status that the batch ends with."""
        sending: asyncio.Task[None] | None = None
        try:
            while True:
                changed = self._desk.changed
                now = await self._desk.keep(lambda store: store.batch(batch.owner, batch.id))
                if now is None or now["status"] == "cancelling":
                    return "cancelled"
                left_s = batch.ends_s - asyncio.get_running_loop().time()
                if left_s <= 0:
                    return "expired"
                sending = sending or asyncio.create_task(self._send_all(batch))
                waking = asyncio.create_task(changed.wait())
                await asyncio.wait(
                    [sending, waking], timeout=min(left_s, WINDOW_S), return_when=asyncio.FIRST_COMPLETED
                )
                waking.cancel()
                if sending.done():
                    sending.result()
                    return "completed"
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    async def _send_all(self, batch: _Batch) -> None:
        """Send the lines without an answer, in passes, until each has one. Raises OwnerFull."""
        answered = await self._desk.keep(lambda store: store.answered(batch.id))
        faults: Counter[int] = Counter()
        pause_s = MIN_REST_S
        while True:
            num_before = len(answered)
            if await self._send_each(batch, answered, faults):
                return
            pause_s = MIN_REST_S if len(answered) > num_before else min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _send_each(self, batch: _Batch, answered: set[int], faults: Counter[int]) -> bool:
        """Send each line without an answer once; return whether all have one now."""
        client = self._client_of(batch.owner)
        num_put_off = 0

        async def send(line: _Line) -> None:
            nonlocal num_put_off
            answer = await self._answer(client, batch, line, faults)
            if answer is None:
                num_put_off += 1
                return
            await self._desk.keep(lambda store: store.add_answer(answer))
            answered.add(line.number)

        async with some_at_a_time(self._places.num_places) as begin:
            async for part in self._desk.parts(batch.file_id):
                for line in await asyncio.to_thread(_lines_to_send, part, answered):
                    await begin(send(line))
        return not num_put_off

    async def _answer(
        self, client: Client, batch: _Batch, line: _Line, faults: Counter[int]
    ) -> Answer | None:
        """Return the answer of a line, or that it failed; None if it is to be sent in the next pass."""
        content, is_error = fault_line(line.custom_id, line.fault), True
        try:
            if not line.fault:
                await self._desk.until_kept()  # while a disk is full, nothing more is made for it
                async with self._places.held_by(batch.owner):
                    reply = await client.post(batch.endpoint, line.body)
                if self._is_put_off(line, reply, faults):
                    self._places.rest(batch.owner, asked_wait_s(reply) or 0.0)
                    return None
                content = answer_line(line.custom_id, reply)
                is_error = not 200 <= reply.status < 300
        except _FAULTS as error:
            _raise_if_stopped(error)
            log.error("batch %s: line %d failed", batch.id, line.number, exc_info=error)
            self._count_fault("batch_line")
            content = failed_line(line.custom_id)
        return Answer(
            owner=batch.owner,
            batch_id=batch.id,
            line=line.number,
            content=content,
            is_error=is_error,
            now_s=unix_time_s(),
        )

    def _is_put_off(self, line: _Line, reply: Reply, faults: Counter[int]) -> bool:
        """Whether a line may have another answer later, and is not itself the reason of this one."""
        if reply.status == _TIMED_OUT:
            return not line.has_time_limit
        if reply.status == _FAULT_OF_OURS:
            faults[line.number] += 1
            return helps_to_retry(reply) and faults[line.number] < _MAX_FAULTS
        return helps_to_retry(reply)

    async def _fail(self, batch_id: str, code: str, message: str, *, line: int | None = None) -> None:
        """End a batch with the reason; answers so far are in its files."""
        param = "input_file_id" if code == "invalid_file" else None
        fault = {"code": code, "message": message, "param": param, "line": line}
        errors = {"object": "list", "data": [fault]}
        changes = {"status": "failed", "failed_at": unix_time_s(), "errors": errors}
        await self._desk.keep(lambda store: store.finish(batch_id, changes))


class _Unfit(Exception):
    """The file cannot be a batch; the text says why."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def _raise_if_stopped(error: BaseException) -> None:
    """Raise the error if the task itself is to end, and not only what it waited for."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise error


def _left_s(expires_s: int) -> float:
    """Seconds that a batch has left when it is first seen in this run, by a clock that may be wrong."""
    return min(max(expires_s - unix_time_s(), _LEFT_AT_START_S), WINDOW_S)


def _check_part(part: FilePart, endpoint: str, seen: set[str]) -> None:
    """Check some lines of a file, and add their ids to those `seen`. Raises _Unfit."""
    try:
        for number, request in _requests(part):
            if request.custom_id in seen:
                raise _Unfit(f"line {number}: custom_id {request.custom_id[:80]!r} is there twice", number)
            if request.url != endpoint:
                raise _Unfit(f"line {number}: url must be {endpoint}, the endpoint of the batch", number)
            if len(seen) == MAX_LINES:
                raise _Unfit(f"the file has more than {MAX_LINES} lines", number)
            seen.add(request.custom_id)
    except BatchFileError as error:
        raise _Unfit(str(error), error.line) from None


def _lines_to_send(part: FilePart, answered: set[int]) -> list[_Line]:
    return [_line_of(number, request) for number, request in _requests(part) if number not in answered]


def _requests(part: FilePart) -> Iterator[tuple[int, BatchRequest]]:
    for first, content in part:
        yield from numbered_requests(content, first=first)


def _line_of(number: int, request: BatchRequest) -> _Line:
    body, fault = b"", ""
    try:
        body = request.encoded(priority=INT32_MAX)
    except LineFault as error:
        fault = str(error)
    return _Line(
        number=number,
        custom_id=request.custom_id,
        body=body,
        fault=fault,
        has_time_limit=not fault and any(request.body.get(name) is not None for name in _TIME_LIMITS),
    )
