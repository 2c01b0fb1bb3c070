"""Many streams at a time, for minutes: does any lose, repeat or mix up a piece of its text?

    python -m campaigns.soak --streams 256 --minutes 3

Every prompt is asked alone first. Then always so many streams are open, each of a prompt drawn from the same
few, and each must bring the text that its prompt brought alone, piece by piece, with a count of tokens that
only rises, one finish reason and one end. Replies are greedy, so there is one right text.

Owns: the prompts, the reading of one stream, and what is wrong with it.
Never: servers (own_server.py), bytes on the wire (http_client.py).
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from bench.load.workload import words
from campaigns.servers.own_server import SERVED_NAME
from server.edge.http.http_client import ExchangeFailed, Target, Timeouts, exchange

_NUM_PROMPTS = 24
_NUM_WORDS = (4, 60)
LONG = (8, 160)
"""Fewest and most tokens of a reply."""
_TIMEOUT_S = 300.0
_COME_AGAIN_S = 0.05
_NUM_EXAMPLES = 5


@dataclass(slots=True)
class StreamText:
    """Pieces that one stream has brought so far. `faults` is empty for one that keeps its promises."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: str = ""
    is_done: bool = False
    error_code: str = ""
    faults: list[str] = field(default_factory=list)

    def take(self, data: bytes, now_s: float) -> None:  # noqa: ARG002  # an event sink is told the time
        """Read the data of one event."""
        if self.is_done:
            self.faults.append("an event after the end")
        elif data == b"[DONE]":
            self.is_done = True
        else:
            self._take_chunk(orjson.loads(data))

    def check(self) -> list[str]:
        """Fault of the stream, now that it has ended."""
        if not self.is_done:
            self.faults.append("no end")
        if bool(self.finish_reason) == bool(self.error_code):
            self.faults.append("neither a finish reason nor an error" if not self.error_code else "both ends")
        return self.faults

    def _take_chunk(self, chunk: dict[str, Any]) -> None:
        if chunk.get("error"):
            self.error_code = str(chunk["error"].get("code"))
            return
        for choice in chunk["choices"]:
            if self.finish_reason and (choice["text"] or choice["finish_reason"]):
                self.faults.append("a piece after the finish reason")
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            num_tokens = chunk["usage"]["completion_tokens"]
            if num_tokens < self.num_tokens or (choice["text"] and num_tokens == self.num_tokens):
                self.faults.append(f"token {num_tokens} after token {self.num_tokens}")
            self.num_tokens = num_tokens


@dataclass(slots=True)
class Tally:
    """Outcome of all streams."""

    num_streams: int = 0
    num_tokens: int = 0
    num_refused: int = 0
    most_open: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    """The first few faults, with all there is to say."""

    def report(self, kind: str, details: str) -> None:
        self.faults[kind] += 1
        if len(self.examples) < _NUM_EXAMPLES:
            self.examples.append(f"{kind}: {details}")

    def __str__(self) -> str:
        lines = [
            f"{self.num_streams} streams ended, {self.num_tokens} tokens, at most {self.most_open} open at a "
            f"time, {self.num_refused} refused"
        ]
        lines += [f"FAULT: {num} times {kind}" for kind, num in self.faults.items()]
        return "\n".join([*lines, *(f"  {example}" for example in self.examples)])


def prompts_of(seed: int, num_tokens: tuple[int, int]) -> list[dict[str, Any]]:
    """Bodies of requests, but for what is the same in all."""
    dice = random.Random(seed)
    return [
        {
            "prompt": f"{place} {words(dice.randint(*_NUM_WORDS), dice)}",
            "max_tokens": dice.randint(*num_tokens),
        }
        for place in range(_NUM_PROMPTS)
    ]


async def read_stream(target: Target, fields: dict[str, Any]) -> StreamText | None:
    """One greedy stream to its end; None if there was no place for it. Raises ExchangeFailed."""
    seen = StreamText()
    body = {
        "model": SERVED_NAME,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **fields,
    }
    wire = target.request("POST", "/v1/completions", orjson.dumps(body))
    reply = await exchange(target, wire, timeouts=Timeouts(whole_s=_TIMEOUT_S), on_event=seen.take)
    if reply.status == 429:
        return None
    if reply.status != 200:
        raise ExchangeFailed(f"HTTP {reply.status}", reply.body[:200].decode("utf-8", "replace"))
    return seen


class ManyStreams:
    """Keep so many streams open at a time, until the time is over and the last of them has ended."""

    def __init__(
        self, target: Target, *, num_streams: int, seed: int = 0, num_tokens: tuple[int, int] = LONG
    ) -> None:
        self._target = target
        self._num_streams = num_streams
        self._dice = random.Random(seed)
        self._prompts = prompts_of(seed, num_tokens)
        self._alone: list[str] = []
        self._num_open = 0
        self.tally = Tally()

    async def run(self, seconds: float) -> Tally:
        """Raises ExchangeFailed if the prompts cannot even be asked alone."""
        self._alone = [await self._alone_text(fields) for fields in self._prompts]
        ends_s = time.monotonic() + seconds
        await asyncio.gather(*(self._take_turns(ends_s) for _ in range(self._num_streams)))
        return self.tally

    async def _alone_text(self, fields: dict[str, Any]) -> str:
        seen = await read_stream(self._target, fields)
        if seen is None or seen.check():
            raise ExchangeFailed("alone", f"{fields}: {'refused' if seen is None else seen.faults}")
        return seen.text

    async def _take_turns(self, ends_s: float) -> None:
        """One stream at least, however slow the machine is, and others until the time is over."""
        await self._read_one()
        while time.monotonic() < ends_s:
            await self._read_one()

    async def _read_one(self) -> None:
        place = self._dice.randrange(len(self._prompts))
        self._num_open += 1
        self.tally.most_open = max(self.tally.most_open, self._num_open)
        try:
            seen = await read_stream(self._target, self._prompts[place])
        except ExchangeFailed as failure:
            self.tally.report(failure.kind, str(failure))
            await asyncio.sleep(_COME_AGAIN_S)
            return
        finally:
            self._num_open -= 1
        if seen is None:
            self.tally.num_refused += 1
            await asyncio.sleep(_COME_AGAIN_S)
        else:
            self._judge(seen, self._alone[place])

    def _judge(self, seen: StreamText, alone: str) -> None:
        self.tally.num_streams += 1
        self.tally.num_tokens += seen.num_tokens
        for fault in seen.check():
            self.tally.report(fault, repr(seen.text[-80:]))
        if seen.error_code:
            self.tally.report(f"error {seen.error_code}", repr(seen.text[-80:]))
        elif seen.text != alone:
            same = _num_equal(seen.text, alone)
            near = max(0, same - 20)
            kind = "another text than alone"
            self.tally.report(
                kind, f"from {same} on {seen.text[near : same + 40]!r}, not {alone[near : same + 40]!r}"
            )


def _num_equal(text: Sequence[str], other: Sequence[str]) -> int:
    """Number of characters with which they begin in common."""
    pairs = zip(text, other, strict=False)
    return next((place for place, (one, two) in enumerate(pairs) if one != two), min(len(text), len(other)))
