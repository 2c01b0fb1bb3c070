"""Batches of a running server, one after the other, at the lowest priority.

Owns: the steps of a batch from validating to its end, going on with it after a restart, and that whatever
goes wrong with a line or a batch is the end of that line or batch alone.
Never: routes (server/api/files/batch_routes.py), the tables (server/api/files/store.py), or how a request is
sent again (run.py).

An answer is on disk before its line counts as answered. A line without an answer is sent when the server runs
again, so that a restart loses and repeats no answer. What a disk does not take is tried again until it does.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server.api.batches.files import (
    BatchFileError,
    BatchRequest,
    LineFault,
    answer_line,
    failed_line,
    fault_line,
    numbered_requests,
)
from server.api.batches.run import BatchRun, Client, failing_together
from server.api.files.access import PAUSE_S, StateAccess, unix_time_s
from server.api.files.batch_routes import WINDOW_S
from server.api.files.store import STORAGE_FAULTS
from server.edge.http.http_client import Reply
from server.reply.generate.protocol import INT32_MAX

log = logging.getLogger(__name__)

MAX_LINES = 50_000
_LOWEST_PRIORITY = INT32_MAX
_TIMED_OUT = 504
_OUR_FAULT = "the batch failed by a fault of the server, which its log has; what was answered is in its files"
_FAULTS = (Exception, asyncio.CancelledError)
"""Whatever may come out of a step; also the cancelling of what it waited for, which did not mean the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    number: int
    request: BatchRequest


class _Unfit(Exception):
    """The file cannot be a batch; the text says why."""


class BatchQueue:
    """Works through the batches of a desk."""

    def __init__(
        self,
        desk: StateAccess,
        client_of: Callable[[str], Client],
        *,
        concurrency: int,
        count_fault: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`client_of` makes a client that sends requests as the key of this name.

        `count_fault` takes the part that failed by a fault of ours.
        """
        self._desk = desk
        self._client_of = client_of
        self._concurrency = concurrency
        self._count_fault = count_fault
        self._after: str | None = None
        """The batch that could not be brought to its end: those behind it come first."""

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            try:
                if self._desk.waits_for(self):
                    await asyncio.sleep(PAUSE_S)
                await self._take_turn()
            except _FAULTS as error:
                _raise_if_stopped(error)
                if not isinstance(error, STORAGE_FAULTS):
                    log.error("no batch can be worked on; tried again", exc_info=error)
                    self._count_fault("batches")
                self._desk.waits(self, error)

    async def _take_turn(self) -> None:
        """Bring the next batch to its end; wait if there is none."""
        self._desk.changed.clear()
        found = await self._desk.attempt(lambda store: store.next_open(self._after) or store.next_open(None))
        if found is None:
            self._desk.goes_on(self)
            await self._desk.changed.wait()
            return
        owner, batch_id = found
        self._after = batch_id
        try:
            await self._advance(owner, batch_id)
        except STORAGE_FAULTS:
            raise
        except _FAULTS as error:
            _raise_if_stopped(error)
            log.error("batch %s: failed", batch_id, exc_info=error)
            self._count_fault("batch")
            await self._fail(owner, batch_id, "internal_error", _OUR_FAULT)
        self._after = None
        self._desk.goes_on(self)

    async def _advance(self, owner: str, batch_id: str) -> None:
        """Bring one batch to its end."""
        batch = await self._desk.attempt(lambda store: store.batch(owner, batch_id))
        assert batch is not None, "batches are not deleted"
        if batch["status"] == "cancelling":
            await self._finish(owner, batch_id, "cancelled")
            return
        content = await self._desk.attempt(lambda store: store.content(owner, batch["input_file_id"]))
        try:
            lines = await asyncio.to_thread(_read_lines, content, batch["endpoint"])
        except _Unfit as error:
            await self._fail(owner, batch_id, "invalid_file", str(error))
            return
        if batch["status"] == "validating":
            counts = {"total": len(lines), "completed": 0, "failed": 0}
            changes = {
                "status": "in_progress",
                "in_progress_at": unix_time_s(),
                "request_counts": counts,
            }
            started = await self._desk.attempt(
                lambda store: store.update_batch(batch_id, changes, expected={"validating"})
            )
            if started is None:  # cancelled meanwhile
                return
        end = await self._send_until_the_end(owner, batch, lines)
        await self._finish(owner, batch_id, end)

    async def _send_until_the_end(self, owner: str, batch: dict[str, Any], lines: list[_Line]) -> str:
        """Send the open lines; return the status that the batch ends with."""
        answered = await self._desk.attempt(lambda store: store.answered(batch["id"]))
        still_open = [line for line in lines if line.number not in answered]
        sending = asyncio.create_task(self._send_all(owner, batch["id"], still_open))
        try:
            while True:
                remaining_s = batch["expires_at"] - unix_time_s()
                changed = asyncio.create_task(self._desk.changed.wait())
                await asyncio.wait(
                    [sending, changed],
                    timeout=max(0, remaining_s),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                changed.cancel()
                self._desk.changed.clear()
                if sending.done():
                    sending.result()
                    return "completed"
                if batch["expires_at"] <= unix_time_s():
                    return "expired"
                now = await self._desk.attempt(lambda store: store.batch(owner, batch["id"]))
                if now is None or now["status"] == "cancelling":
                    return "cancelled"
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send_all(self, owner: str, batch_id: str, lines: list[_Line]) -> None:
        places = asyncio.Semaphore(self._concurrency)
        run = BatchRun(
            client=self._client_of(owner),
            write=lambda _: None,
            concurrency=self._concurrency,
            retry_s=WINDOW_S,
        )
        async with failing_together() as group:
            for line in lines:
                await places.acquire()
                task = group.create_task(self._answer(run, batch_id, line))
                task.add_done_callback(lambda _: places.release())

    async def _answer(self, run: BatchRun, batch_id: str, line: _Line) -> None:
        """Keep the answer of a line, or that it failed."""

        async def keep(answer: bytes, *, is_error: bool) -> None:
            await self._desk.keep(
                lambda store: store.add_answer(batch_id, line.number, answer, is_error=is_error)
            )

        custom_id = line.request.custom_id
        try:
            reply = await self._reply_to(run, line.request)
            await keep(answer_line(custom_id, reply), is_error=not 200 <= reply.status < 300)
        except LineFault as fault:
            await keep(fault_line(custom_id, str(fault)), is_error=True)
        except _FAULTS as error:
            _raise_if_stopped(error)
            log.error("batch %s: line %d failed", batch_id, line.number, exc_info=error)
            self._count_fault("batch_line")
            await keep(failed_line(custom_id), is_error=True)

    async def _reply_to(self, run: BatchRun, request: BatchRequest) -> Reply:
        """Raises LineFault."""
        body = request.encoded(priority=_LOWEST_PRIORITY)
        reply = await run.send(request.url, body)
        while reply.status == _TIMED_OUT:  # it had no turn before the server's time limit
            reply = await run.send(request.url, body)
        return reply

    async def _finish(self, owner: str, batch_id: str, status: str) -> None:
        now_s = unix_time_s()
        changes = {"status": status, f"{status}_at": now_s, "finalizing_at": now_s}
        await self._desk.attempt(lambda store: store.finish(owner, batch_id, changes, now_s=now_s))
        log.info("batch %s: %s", batch_id, status)

    async def _fail(self, owner: str, batch_id: str, code: str, message: str) -> None:
        """End a batch with the reason; answers so far stay in its files, if they can be written."""
        param = "input_file_id" if code == "invalid_file" else None
        fault = {"code": code, "message": message, "param": param, "line": None}
        now_s = unix_time_s()
        changes = {"status": "failed", "failed_at": now_s, "errors": {"object": "list", "data": [fault]}}
        try:
            await self._desk.attempt(lambda store: store.finish(owner, batch_id, changes, now_s=now_s))
        except STORAGE_FAULTS:
            raise
        except _FAULTS as error:
            _raise_if_stopped(error)
            log.error("batch %s: its files cannot be written", batch_id, exc_info=error)
            await self._desk.attempt(lambda store: store.abandon(batch_id, changes))


def _raise_if_stopped(error: BaseException) -> None:
    """Raise the error if the task itself is to end, and not only what it waited for."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise error


def _read_lines(content: bytes | None, endpoint: str) -> list[_Line]:
    """Raises _Unfit."""
    if content is None:
        raise _Unfit("the input file was deleted")
    lines: list[_Line] = []
    seen: set[str] = set()
    try:
        for number, request in numbered_requests(content):
            if request.custom_id in seen:
                raise _Unfit(f"line {number}: custom_id {request.custom_id[:80]!r} is there twice")
            if request.url != endpoint:
                raise _Unfit(f"line {number}: url must be {endpoint}, the endpoint of the batch")
            seen.add(request.custom_id)
            lines.append(_Line(number=number, request=request))
            if len(lines) > MAX_LINES:
                raise _Unfit(f"the file has more than {MAX_LINES} lines")
    except BatchFileError as error:
        raise _Unfit(str(error)) from None
    if not lines:
        raise _Unfit("the file has no lines")
    return lines
