"""Work that outlives its request, beside the clients of a soak: batches, and responses in the background.

Owns: that each batch has one end and each line of it one answer, that each response in the background ends,
and that all goes on while the processes of templates and grammars are stopped and killed.
Never: the engine process (run.py, attacks.py), or what a request may answer (acts.py).
"""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from campaigns.servers.own_server import SERVED_NAME, OwnServer
from server.edge.http.http_client import ExchangeFailed, Reply, Timeouts, exchange

_TIMEOUT_S = 60.0
_ENDS_WITHIN_S = 600.0
_POLL_S = 0.5
_REST_S = 0.2
_STRIKE_EVERY_S, _STOPPED_S = 15.0, 1.0
_MAX_LINES = 24
_NOW = frozenset({429, 503})
_BOUNDARY = "a-boundary-of-the-soak"
_ENDS = frozenset({"completed", "incomplete", "failed", "cancelled", "expired"})


class Lasting:
    """Work that lasts, of one soak. `ends` tells what happened, `faults` what should not have."""

    def __init__(self, server: OwnServer, *, seed: int, is_engine_gone: Callable[[], bool]) -> None:
        self._server = server
        self._dice = random.Random(seed)
        self._is_engine_gone = is_engine_gone
        self.ends: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()

    async def run(self, until: asyncio.Event) -> None:
        """Go on until the event is set, and then to the end of what was begun."""
        acts = (self._batch, self._batch, self._response, self._response, self._response, self._strike)
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
                self.faults[f"{act.__name__}: {type(error).__name__} {str(error)[:80]}"] += 1
            await asyncio.sleep(_REST_S)

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
            content = (await self._reply("GET", f"/v1/files/{file_id}/content")).body
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
        if response["status"] == "failed" and not self._is_engine_gone():
            self.faults[f"response: {response['error']}"] += 1

    async def _end_of(self, path: str) -> dict[str, Any] | None:
        """Wait for the end of a batch or a response; None if it does not come, or is gone."""
        for _ in range(int(_ENDS_WITHIN_S / _POLL_S)):
            found = await self._reply("GET", path)
            if found.status == 404 and path.startswith("/v1/responses"):  # newer ones took its room
                self.ends["response forgotten"] += 1
                return None
            if found.status == 200 and orjson.loads(found.body)["status"] in _ENDS:
                body: dict[str, Any] = orjson.loads(found.body)
                return body
            await asyncio.sleep(_POLL_S)
        self.faults[f"{path.split('/')[2]}: no end"] += 1
        return None

    async def _strike(self) -> None:
        """Stop a process for a while, or kill it; none of API and engine."""
        await asyncio.sleep(_STRIKE_EVERY_S)
        others = _children(self._server.pid) - {self._server.engine_pid}
        if not others:
            return
        pid = self._dice.choice(sorted(others, key=str))
        with suppress(ProcessLookupError):
            if self._dice.random() < 0.5:
                os.kill(pid or 0, signal.SIGKILL)
                self.ends["small process killed"] += 1
                return
            os.kill(pid or 0, signal.SIGSTOP)
            await asyncio.sleep(_STOPPED_S)
            os.kill(pid or 0, signal.SIGCONT)
            self.ends["small process stopped"] += 1

    async def _ask(
        self, method: str, path: str, body: bytes = b"", *, form: bool = False
    ) -> dict[str, Any] | None:
        """Return what it answers; None if it is refused for now. Other answers are faults."""
        reply = await self._reply(method, path, body, form=form)
        if reply.status == 200:
            found: dict[str, Any] = orjson.loads(reply.body)
            return found
        self.ends[f"{method} {path.split('/')[2]} {reply.status}"] += 1
        if reply.status not in _NOW:
            self.faults[f"{method} {path.split('/')[2]}: {reply.status} {reply.body[:120]!r}"] += 1
        return None

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


def _children(pid: int) -> set[int | None]:
    return {int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
