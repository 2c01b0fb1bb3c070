"""Work that outlives its request, beside the clients of a soak: batches, and responses in the background.

Owns: that each batch has one end and each line of it one answer, and that each response in the background
ends, also when the server was killed meanwhile.
Never: what is done to processes (run.py, trouble.py), or what a request may answer (acts.py).
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

import orjson

from campaigns.servers.own_server import SERVED_NAME, OwnServer
from server.edge.http.http_client import ExchangeFailed, Reply, Timeouts, exchange

_TIMEOUT_S = 60.0
_ENDS_WITHIN_S = 600.0
_POLL_S = 0.5
_LEAST_REST_S = 0.2
_MAX_LINES = 24
_NOW = frozenset({429, 503})
_BOUNDARY = "a-boundary-of-the-soak"
_ENDS = frozenset({"completed", "incomplete", "failed", "cancelled", "expired"})


class Lasting:
    """Work that lasts, of one soak. `ends` tells what happened, `faults` what should not have."""

    def __init__(
        self, server: OwnServer, *, seed: int, is_disturbed: Callable[[], bool], rest_s: float
    ) -> None:
        self._server = server
        self._dice = random.Random(seed)
        self._is_disturbed = is_disturbed
        self._rest_s = max(rest_s, _LEAST_REST_S)
        self.ends: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()

    async def run(self, until: asyncio.Event) -> None:
        """Go on until the event is set, and then to the end of what was begun."""
        acts = (self._batch, self._batch, self._response, self._response, self._response)
        await asyncio.gather(*(self._again_and_again(act, until) for act in acts))

    def report(self) -> str:
        return "lasting: " + ", ".join(f"{num} {end}" for end, num in sorted(self.ends.items()))

    async def _again_and_again(
        self, act: Callable[[], Coroutine[Any, Any, None]], until: asyncio.Event
    ) -> None:
        while not until.is_set():
            try:
                await act()
            except (ExchangeFailed, OSError, TimeoutError) as error:
                self._report(f"{act.__name__}: {type(error).__name__} {str(error)[:80]}")
            await asyncio.sleep(self._rest_s)

    def _report(self, fault: str) -> None:
        if self._is_disturbed():
            self.ends["disturbed"] += 1
        else:
            self.faults[fault] += 1

    async def _batch(self) -> None:
        num_lines = self._dice.randint(1, _MAX_LINES)
        lines = [self._line(number) for number in range(num_lines)]
        file = await self._ask("POST", "/v1/files", _form(b"".join(lines)), form=True)
        if file is None:
            return
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = await self._ask("POST", "/v1/batches", orjson.dumps(asked))
        if batch is None:
            return
        if self._dice.random() < 0.1:
            await self._ask("POST", f"/v1/batches/{batch['id']}/cancel")
        batch = await self._end_of(f"/v1/batches/{batch['id']}")
        if batch is None:
            return
        answers = []
        for file_id in filter(None, (batch["output_file_id"], batch["error_file_id"])):
            content = await self._content(file_id)
            answers += [orjson.loads(line)["custom_id"] for line in content.splitlines()]
            await self._ask("DELETE", f"/v1/files/{file_id}")
        await self._ask("DELETE", f"/v1/files/{file['id']}")
        fault = fault_of_batch(batch, answers, num_lines)
        self.ends[f"batch {batch['status']}"] += 1
        if fault:
            self.faults[f"batch: {fault}"] += 1

    def _line(self, number: int) -> bytes:
        chance: tuple[dict[str, Any], ...] = ({}, {}, {}, {"first_token_timeout": 1e-6}, {"max_tokens": -1})
        body: dict[str, Any] = {
            "prompt": "x" * self._dice.randint(1, 60),
            "max_tokens": self._dice.randint(1, 40),
        }
        line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions"}
        return (
            orjson.dumps(line | {"body": {"model": SERVED_NAME, **body, **self._dice.choice(chance)}}) + b"\n"
        )

    async def _response(self) -> None:
        fields = {"input": "x" * self._dice.randint(1, 60), "max_output_tokens": 16, "background": True}
        made = await self._ask("POST", "/v1/responses", orjson.dumps({"model": SERVED_NAME, **fields}))
        if made is None:
            return
        path = f"/v1/responses/{made['id']}"
        if self._dice.random() < 0.2:
            await self._ask("POST", f"{path}/cancel")
        response = await self._end_of(path)
        if response is None:
            return
        self.ends[f"response {response['status']}"] += 1
        if response["status"] == "failed":
            self._report(f"response: {response['error']}")

    async def _end_of(self, path: str) -> dict[str, Any] | None:
        """Wait for the end of a batch or a response; None if it does not come, or is gone."""
        for _ in range(int(_ENDS_WITHIN_S / _POLL_S)):
            found = await self._found(path)
            if found.status == 404 and path.startswith("/v1/responses"):  # newer ones took its room
                self.ends["response forgotten"] += 1
                return None
            if found.status == 200 and orjson.loads(found.body)["status"] in _ENDS:
                body: dict[str, Any] = orjson.loads(found.body)
                return body
            await asyncio.sleep(_POLL_S)
        self.faults[f"{path.split('/')[2]}: no end"] += 1
        return None

    async def _ask(
        self, method: str, path: str, body: bytes = b"", *, form: bool = False
    ) -> dict[str, Any] | None:
        """Return what it answers; None if it is refused for now. Other answers are faults."""
        reply = await self._reply(method, path, body, form=form)
        if reply.status == 200:
            found: dict[str, Any] = orjson.loads(reply.body)
            return found
        self.ends[f"{method} {path.split('/')[2]} {reply.status} {_code_of(reply)}"] += 1
        if reply.status not in _NOW:
            self._report(f"{method} {path.split('/')[2]}: {reply.status} {reply.body[:120]!r}")
        return None

    async def _content(self, file_id: str) -> bytes:
        """Read a file. Raises ExchangeFailed, TimeoutError."""
        async with asyncio.timeout(_ENDS_WITHIN_S):
            while (reply := await self._found(f"/v1/files/{file_id}/content")).status in _NOW:
                await asyncio.sleep(_POLL_S)
        if reply.status != 200:
            raise ExchangeFailed("content", f"{reply.status} {reply.body[:80]!r}")
        return reply.body

    async def _found(self, path: str) -> Reply:
        """Ask until there is an answer, while the server may be gone. Raises ExchangeFailed, TimeoutError."""
        ends_s = time.monotonic() + _ENDS_WITHIN_S
        while time.monotonic() < ends_s:
            try:
                return await self._reply("GET", path)
            except ExchangeFailed:
                if not self._is_disturbed():
                    raise
            await asyncio.sleep(_POLL_S)
        raise TimeoutError(path)

    async def _reply(self, method: str, path: str, body: bytes = b"", *, form: bool = False) -> Reply:
        target = self._server.target
        wire = target.request(method, path, body)
        if form:
            wire = wire.replace(b"application/json\r\nContent-L", f"{_FORM}\r\nContent-L".encode(), 1)
        return await exchange(target, wire, timeouts=Timeouts(whole_s=_TIMEOUT_S))


_FORM = f"multipart/form-data; boundary={_BOUNDARY}"


def _form(content: bytes) -> bytes:
    parts = (('name="purpose"', b"batch"), ('name="file"; filename="in.jsonl"', content))
    pieces = [
        f"--{_BOUNDARY}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + text + b"\r\n"
        for head, text in parts
    ]
    return b"".join(pieces) + f"--{_BOUNDARY}--\r\n".encode()


def fault_of_batch(batch: dict[str, Any], answers: Iterable[str], num_lines: int) -> str:
    """Name what is wrong with a batch at its end and the ids of its answers; empty if nothing is."""
    found, counts = Counter(answers), batch["request_counts"]
    if batch["status"] not in ("completed", "cancelled"):
        return f"{batch['status']} {batch['errors']}"
    if max(found.values(), default=1) > 1:
        return "a line has two answers"
    if not found.keys() <= {f"{number}" for number in range(num_lines)}:
        return "an answer of no line"
    if batch["status"] == "completed" and len(found) < num_lines:
        return f"{num_lines - len(found)} lines without an answer"
    if counts["completed"] + counts["failed"] != len(found):
        return f"counts {counts} of {len(found)} answers"
    return ""


def _code_of(reply: Reply) -> str:
    with suppress(orjson.JSONDecodeError, LookupError, TypeError):
        return str(orjson.loads(reply.body)["error"]["code"])
    return "without a code"
