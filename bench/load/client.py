"""Sends a workload to an OpenAI-compatible server and times what comes back.

Owns: the requests as OpenAI defines them, the reading of their streams, closed and open loops.
Never: statistics (report.py), nor a decision about what is sent (workload.py).
"""

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

import orjson

from bench.load.request_record import COMPLETED, CUT_OFF, RequestRecord
from bench.load.workload import ONE_TOKEN_A_WORD, PlannedRequest, WordCost, words
from server.edge.http.http_client import ExchangeFailed, Reply, Target, Timeouts, exchange

_CALIBRATION_WORDS = (16, 80)


class Endpoint(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Endpoint.CHAT else "/v1/completions"


class UsageMode(StrEnum):
    """Way of counting tokens."""

    CONTINUOUS = "continuous"  # every chunk says how many there are so far, as Tokenyard and vLLM can
    FINAL = "final"  # one for each chunk, set right by the last one, as OpenAI does


class StreamEnd(StrEnum):
    """Mark by which a server ends a whole stream."""

    DONE_EVENT = "done event"  # `data: [DONE]`, as OpenAI does
    FINISH_REASON = "finish reason"  # and then the end of the reply, as `transformers serve` does


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStyle:
    """Fields that all requests of a run have in common."""

    endpoint: Endpoint
    model: str
    temperature: float
    ignores_eos: bool
    sends_priority: bool
    usage: UsageMode
    seed: int
    """Request i samples with seed + i."""
    timeout_s: float
    end: StreamEnd = StreamEnd.DONE_EVENT


class StreamReader:
    """Reads the events of one stream: tokens, their times, the end."""

    def __init__(self) -> None:
        self.is_done = False
        self.finish_reason = ""
        self.error: dict[str, Any] | None = None
        self.num_tokens = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.times_s: list[float] = []
        self.num_first_tokens = 0

    def take(self, data: bytes, now_s: float) -> None:
        """Read one event. Raises ExchangeFailed if it is not what OpenAI would send."""
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            self._take_chunk(orjson.loads(data), now_s)
        except (orjson.JSONDecodeError, AttributeError, LookupError, TypeError):
            raise ExchangeFailed("bad event", f"not a chunk: {data[:60]!r}") from None

    def _take_chunk(self, chunk: dict[str, Any], now_s: float) -> None:
        error = chunk.get("error")
        if error:
            self.error = error if isinstance(error, dict) else {"message": error}
            return
        text = ""
        # The last usage comes in a chunk of its own, without choices: it corrects, and brings nothing.
        if chunk["choices"]:
            choice = chunk["choices"][0]
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        before = self.num_tokens
        if chunk.get("usage"):
            self._take_usage(chunk["usage"])
        elif text:
            self.num_tokens += 1
        if text or (chunk["choices"] and self.num_tokens > before):
            if not self.times_s:
                self.num_first_tokens = max(1, self.num_tokens)
            self.times_s.append(now_s)

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self.num_tokens = usage.get("completion_tokens") or self.num_tokens
        self.num_prompt_tokens = usage.get("prompt_tokens") or 0
        self.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def tpot_s(self) -> float | None:
        num_later = self.num_tokens - self.num_first_tokens
        if len(self.times_s) < 2 or num_later < 1:
            return None
        return (self.times_s[-1] - self.times_s[0]) / num_later

    def gaps_s(self) -> tuple[float, ...]:
        return tuple(later - earlier for earlier, later in pairwise(self.times_s))


def request_body(request: PlannedRequest, style: RequestStyle) -> bytes:
    """Build the JSON of one streaming request; fields beyond OpenAI's only where they were asked for."""
    stream_options = {"include_usage": True}
    if style.usage is UsageMode.CONTINUOUS:
        stream_options["continuous_usage_stats"] = True
    body: dict[str, Any] = {
        "model": style.model,
        "max_tokens": request.max_tokens,
        "temperature": style.temperature,
        "seed": style.seed + request.index,
        "stream": True,
        "stream_options": stream_options,
    }
    if style.endpoint is Endpoint.CHAT:
        body["messages"] = [{"role": "user", "content": request.prompt}]
    else:
        body["prompt"] = request.prompt
    if style.ignores_eos:
        body["ignore_eos"] = True
    if style.sends_priority:
        body["priority"] = request.priority
    return orjson.dumps(body)


def error_of(reply: Reply) -> ExchangeFailed:
    """Turn a reply that is no success into a failure with status and code."""
    code, message = "", reply.body[:200].decode("utf-8", "replace")
    with contextlib.suppress(orjson.JSONDecodeError, AttributeError):
        error = orjson.loads(reply.body).get("error")
        if isinstance(error, dict):
            code = str(error.get("code") or error.get("type") or "")
            message = str(error.get("message") or message)
    return ExchangeFailed(f"HTTP {reply.status} {code}".strip(), message)


async def stream(target: Target, request: PlannedRequest, style: RequestStyle, reader: StreamReader) -> None:
    """Send `request` and feed its stream to `reader`. Raises ExchangeFailed unless it ends as it should."""
    wire = target.request("POST", style.endpoint.path, request_body(request, style))
    reply = await exchange(target, wire, timeouts=Timeouts(whole_s=style.timeout_s), on_event=reader.take)
    if reply.status != 200:
        raise error_of(reply)
    if reader.error is not None:
        code = reader.error.get("code") or reader.error.get("type") or "unnamed"
        raise ExchangeFailed(f"error event {code}", str(reader.error.get("message") or ""))
    is_whole = reader.is_done or style.end is StreamEnd.FINISH_REASON
    if not (is_whole and reader.finish_reason):
        raise ExchangeFailed("stream incomplete", "the stream ended without finish_reason and [DONE]")


async def first_model(target: Target, *, timeout_s: float) -> str:
    """Return the first of the models that the server lists. Raises ExchangeFailed."""
    reply = await exchange(target, target.request("GET", "/v1/models"), timeouts=Timeouts(whole_s=timeout_s))
    if reply.status != 200:
        raise error_of(reply)
    try:
        return str(orjson.loads(reply.body)["data"][0]["id"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        raise ExchangeFailed("no model", "/v1/models names none; give --model") from None


async def measure_words(target: Target, style: RequestStyle) -> WordCost:
    """Send two short prompts to learn what a word costs in tokens. Raises ExchangeFailed."""
    rng, counts = random.Random(0), []
    for num_words in _CALIBRATION_WORDS:
        reader = StreamReader()
        prompt = words(num_words, rng)
        request = PlannedRequest(index=0, prompt=prompt, max_tokens=1, priority=0, arrival_s=0.0)
        await stream(target, request, style, reader)
        counts.append(reader.num_prompt_tokens)
    few, many = _CALIBRATION_WORDS
    if counts[1] <= counts[0] or not counts[0]:
        return ONE_TOKEN_A_WORD  # the server counts no prompt tokens
    per_word = (counts[1] - counts[0]) / (many - few)
    return WordCost(per_word=per_word, per_prompt=max(0.0, counts[0] - few * per_word))


class LoadRun:
    """One run of a workload. Ends by itself: when all is answered, after `max_duration_s`, or on Ctrl-C."""

    def __init__(
        self, target: Target, style: RequestStyle, on_record: Callable[[RequestRecord], None]
    ) -> None:
        self._target = target
        self._style = style
        self._on_record = on_record
        self._records: list[RequestRecord] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._start_s = 0.0
        self._is_stopped = False
        self.is_interrupted = False
        """Whether Ctrl-C ended the run."""

    async def run_closed(
        self, requests: Sequence[PlannedRequest], *, concurrency: int, max_duration_s: float
    ) -> list[RequestRecord]:
        """Keep `concurrency` requests under way until all are answered."""
        line = iter(requests)
        takers = [self._take_turns(line) for _ in range(min(concurrency, len(requests)))]
        return await self._run(takers, max_duration_s)

    async def run_open(
        self, requests: Sequence[PlannedRequest], *, max_duration_s: float
    ) -> list[RequestRecord]:
        """Send each request at its arrival, however many are under way."""
        return await self._run([self._send_at_arrival(each) for each in requests], max_duration_s)

    def stop(self) -> None:
        """Send nothing more and cut off what is under way; the run returns at once."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()

    def _interrupt(self) -> None:
        self.is_interrupted = True
        self.stop()

    async def _run(self, work: Sequence[Any], max_duration_s: float) -> list[RequestRecord]:
        loop = asyncio.get_running_loop()
        self._start_s = time.perf_counter()
        self._tasks = [loop.create_task(each) for each in work]
        alarm = loop.call_later(max_duration_s, self.stop)
        # Only a main thread may have signal handlers; elsewhere Ctrl-C is not ours to take.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(signal.SIGINT, self._interrupt)
        try:
            for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome
        finally:
            alarm.cancel()
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.remove_signal_handler(signal.SIGINT)
        return sorted(self._records, key=lambda record: record.index)

    async def _take_turns(self, line: Iterator[PlannedRequest]) -> None:
        for request in line:
            if self._is_stopped:
                return
            await self._send(request, late_s=0.0)

    async def _send_at_arrival(self, request: PlannedRequest) -> None:
        await asyncio.sleep(self._start_s + request.arrival_s - time.perf_counter())
        late_s = time.perf_counter() - self._start_s - request.arrival_s
        await self._send(request, late_s=max(0.0, late_s))

    async def _send(self, request: PlannedRequest, *, late_s: float) -> None:
        reader = StreamReader()
        outcome, message = COMPLETED, ""
        sent_s = time.perf_counter()
        try:
            await stream(self._target, request, self._style, reader)
        except ExchangeFailed as failure:
            outcome, message = failure.kind, str(failure)
        except asyncio.CancelledError:
            # Only stop() cancels: the record of what was under way is part of the result.
            outcome, message = CUT_OFF, "the run was stopped first"
        record = RequestRecord(
            index=request.index,
            priority=request.priority,
            outcome=outcome,
            message=message,
            start_s=sent_s - self._start_s,
            late_s=late_s,
            ttft_s=reader.times_s[0] - sent_s if reader.times_s else None,
            e2e_s=time.perf_counter() - sent_s,
            chunk_gaps_s=reader.gaps_s(),
            tpot_s=reader.tpot_s(),
            num_prompt_tokens=reader.num_prompt_tokens,
            num_cached_tokens=reader.num_cached_tokens,
            num_output_tokens=reader.num_tokens,
            finish_reason=reader.finish_reason,
        )
        self._records.append(record)
        self._on_record(record)
