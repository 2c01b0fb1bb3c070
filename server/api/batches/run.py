"""The requests of a batch, some at a time, each sent again while that can help."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from server.api.batches.lines import BatchRequest, LineFault, answer_line, as_one_line, fault_line
from server.edge.http.http_client import ExchangeFailed, Reply

_WAIT_STATUSES = frozenset({429, 503})
_LONGEST_WAIT_S = 60.0


class Client(Protocol):
    async def post(self, path: str, body: bytes) -> Reply:
        """Send a body and return the reply. Raises ExchangeFailed."""
        ...


class ServerLost(Exception):
    """No reply came within --retry-for. The answers so far are in the output."""


@dataclass(slots=True)
class Counts:
    num_done: int = 0
    num_failed: int = 0
    """Requests done whose line has an error."""
    num_cut_off: int = 0
    """Requests done whose answer was ended by a time limit; their line has the text so far."""
    num_retries: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    def add(self, reply: Reply | None) -> None:
        self.num_done += 1
        if reply is None or not 200 <= reply.status < 300:
            self.num_failed += 1
            return
        body = _json_object(reply)
        usage = _object(body.get("usage"))
        self.num_cut_off += _is_cut_off(body)
        # Responses have other names for the same.
        self.num_prompt_tokens += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
        self.num_output_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0


def _json_object(reply: Reply) -> dict[str, Any]:
    try:
        return _object(orjson.loads(reply.body))
    except orjson.JSONDecodeError:
        return {}


def _object(value: Any) -> dict[str, Any]:
    """The value if it is an object, else an empty one: the server may be of any make."""
    return value if isinstance(value, dict) else {}


def _is_cut_off(body: dict[str, Any]) -> bool:
    choices = body.get("choices")
    ends = list(map(_object, choices)) if isinstance(choices, list) else []
    reasons = [end.get("finish_reason") for end in ends]
    return "timeout" in [*reasons, _object(body.get("incomplete_details")).get("reason")]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRun:
    client: Client
    write: Callable[[bytes], None]
    """Takes the line of a request that is done."""
    concurrency: int
    retry_s: float
    """Seconds in which a request is sent again that met 429, 503 or a lost connection."""
    counts: Counts = field(default_factory=Counts)
    show: Callable[[Counts], None] = lambda _: None
    """Called when a request is done."""

    async def send_all(self, requests: Iterable[BatchRequest], *, paths: frozenset[str]) -> None:
        """Send those for these paths. Raises ServerLost, and OSError if a line cannot be written.

        Every request ends with one line. Cancelled, it leaves no half line.
        """
        async with some_at_a_time(self.concurrency) as begin:
            for request in requests:
                await begin(self._answer(request, paths))

    async def _answer(self, request: BatchRequest, paths: frozenset[str]) -> None:
        reply = None
        try:
            request.check_url(paths)
            reply = await self.send(request.url, request.encoded())
            line = answer_line(request.custom_id, as_one_line(reply))
        except LineFault as fault:
            line = fault_line(request.custom_id, str(fault))
        self.write(line)
        self.counts.add(reply)
        self.show(self.counts)

    async def send(self, path: str, body: bytes) -> Reply:
        """Send one request, again and again while that can help. Raises ServerLost."""
        clock = asyncio.get_running_loop().time
        give_up_s = clock() + self.retry_s
        num_tries = 0
        while True:
            num_tries += 1
            try:
                reply = await self.client.post(path, body)
            except ExchangeFailed as error:
                wait_s, last = _backoff_s(num_tries), error
                if clock() + wait_s > give_up_s:
                    raise ServerLost(str(last)) from None
            else:
                if not helps_to_retry(reply):
                    return reply
                wait_s = _wait_s(reply, num_tries)
                if clock() + wait_s > give_up_s:
                    return reply
            self.counts.num_retries += 1
            await asyncio.sleep(wait_s)


def helps_to_retry(reply: Reply) -> bool:
    advice = reply.headers.get("x-should-retry")
    return advice == "true" or (reply.status in _WAIT_STATUSES and advice != "false")


def asked_wait_s(reply: Reply) -> float | None:
    """Seconds that the server asks to wait, within _LONGEST_WAIT_S; None if it does not say."""
    for header, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = reply.headers.get(header, "")
        if text.isascii() and text.isdigit() and len(text) < 16:
            return min(int(text) * unit_s, _LONGEST_WAIT_S)
    return None


def _wait_s(reply: Reply, num_tries: int) -> float:
    """The wait that the server asks for, and some more, so that refused requests do not return together."""
    asked_s = asked_wait_s(reply)
    return _backoff_s(num_tries) if asked_s is None else asked_s * random.uniform(1.0, 1.25)


def _backoff_s(num_tries: int) -> float:
    return min(0.25 * 2.0 ** min(num_tries, 8), _LONGEST_WAIT_S) * random.uniform(0.75, 1.25)


@asynccontextmanager
async def some_at_a_time(most: int) -> AsyncIterator[Callable[[Coroutine[Any, Any, None]], Awaitable[None]]]:
    """Open a function that begins work once less than `most` is under way; the end waits for all.

    The first error of any is raised itself, rather than a group of errors, and ends the others.
    """
    places = asyncio.Semaphore(most)
    try:
        async with asyncio.TaskGroup() as group:

            async def begin(work: Coroutine[Any, Any, None]) -> None:
                try:
                    await places.acquire()
                except BaseException:
                    work.close()
                    raise
                group.create_task(work).add_done_callback(lambda _: places.release())

            yield begin
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
