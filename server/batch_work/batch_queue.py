"""Batches of a running server, one after the other, at the lowest priority.

Owns: the steps of a batch from validating to its end, and going on with it after a restart.
Never: routes (server/state/batch_routes.py), the tables (server/state/state_store.py), or how a request is
sent again (batch_run.py).

An answer is on disk before its line counts as answered. A line without an answer is sent when the server runs
again, so that a restart loses and repeats no answer.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from server.batch_work.batch_files import (
    BatchFileError,
    BatchRequest,
    answer_line,
    fault_line,
    numbered_requests,
)
from server.batch_work.batch_run import BatchRun, Client, ServerLost, failing_together
from server.generate.protocol import INT32_MAX
from server.state.batch_routes import WINDOW_S
from server.state.state_desk import StateDesk, unix_time_s
from server.state.state_store import OPEN_STATUSES

log = logging.getLogger(__name__)

MAX_LINES = 50_000
_LOWEST_PRIORITY = INT32_MAX
_TIMED_OUT = 504
_PAUSE_AFTER_FAILURE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    number: int
    request: BatchRequest


class _Unfit(Exception):
    """The file cannot be a batch; the text says why."""


class BatchQueue:
    """Works through the batches of a desk."""

    def __init__(self, desk: StateDesk, client_of: Callable[[str], Client], *, concurrency: int) -> None:
        """`client_of` makes a client that sends requests as the key of this name."""
        self._desk = desk
        self._client_of = client_of
        self._concurrency = concurrency

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            self._desk.changed.clear()
            try:
                found = await self._desk.do(lambda store: store.next_open())
                if found is None:
                    await self._desk.changed.wait()
                else:
                    await self._advance(*found)
            except (sqlite3.Error, OSError, ServerLost) as error:
                log.error("a batch cannot go on, and is tried again: %s", error)
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

    async def _advance(self, owner: str, batch: dict[str, Any]) -> None:
        """Bring one batch to its end."""
        if batch["status"] == "cancelling":
            await self._finish(owner, batch, "cancelled")
            return
        content = await self._desk.do(lambda store: store.content(owner, batch["input_file_id"]))
        try:
            lines = await asyncio.to_thread(_read_lines, content, batch["endpoint"])
        except _Unfit as error:
            await self._fail(batch, str(error))
            return
        if batch["status"] == "validating":
            counts = {"total": len(lines), "completed": 0, "failed": 0}
            changes = {
                "status": "in_progress",
                "in_progress_at": unix_time_s(),
                "request_counts": counts,
            }
            started = await self._desk.do(
                lambda store: store.update_batch(batch["id"], changes, expected={"validating"})
            )
            if started is None:  # cancelled meanwhile
                return
        end = await self._send_until_the_end(owner, batch, lines)
        await self._finish(owner, batch, end)

    async def _send_until_the_end(self, owner: str, batch: dict[str, Any], lines: list[_Line]) -> str:
        """Send the open lines; return the status that the batch ends with."""
        answered = await self._desk.do(lambda store: store.answered(batch["id"]))
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
                now = await self._desk.do(lambda store: store.batch(owner, batch["id"]))
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
        request = line.request
        fault = request.fault()
        if fault is not None:
            answer, is_error = fault_line(request.custom_id, fault), True
        else:
            body = {**request.body, "priority": _LOWEST_PRIORITY}
            reply = await run.send(request.url, orjson.dumps(body))
            while reply.status == _TIMED_OUT:  # it had no turn before the server's time limit
                reply = await run.send(request.url, orjson.dumps(body))
            answer, is_error = answer_line(request.custom_id, reply), not 200 <= reply.status < 300
        await self._desk.do(lambda store: store.add_answer(batch_id, line.number, answer, is_error=is_error))

    async def _finish(self, owner: str, batch: dict[str, Any], status: str) -> None:
        now_s = unix_time_s()
        changes = {"status": status, f"{status}_at": now_s, "finalizing_at": now_s}
        await self._desk.do(lambda store: store.finish(owner, batch["id"], changes, now_s=now_s))
        log.info("batch %s: %s", batch["id"], status)

    async def _fail(self, batch: dict[str, Any], message: str) -> None:
        fault = {"code": "invalid_file", "message": message, "param": "input_file_id", "line": None}
        errors = {"object": "list", "data": [fault]}
        changes = {"status": "failed", "failed_at": unix_time_s(), "errors": errors}
        await self._desk.do(lambda store: store.update_batch(batch["id"], changes, expected=OPEN_STATUSES))


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
