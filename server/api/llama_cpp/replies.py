"""Replies in llama.cpp's shape, whole and in events, made from the outputs of a completion.

Source: the README of llama.cpp's server.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from engine.types import TokenOutput
from server.edge.http.endpoint import ReplyModel
from server.reply.generate.replies import ReplyPlan, Tally
from server.reply.generate.sse import CHUNKS


class LlamaTimings(ReplyModel):
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float


class LlamaReply(ReplyModel):
    """A whole reply, or an event of a stream; the last one has `stop` true and all of the fields."""

    index: int
    content: str
    """In an event, the piece that is new; empty in the last one."""
    tokens: list[int]
    """Always empty."""
    stop: bool
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    model: str | None = None
    stop_type: Literal["eos", "word", "limit"] | None = None
    stopping_word: str | None = None
    truncated: bool | None = None
    tokens_cached: int | None = None
    timings: LlamaTimings | None = None


class LlamaProperties(ReplyModel):
    default_generation_settings: dict[str, Any]
    total_slots: int
    """Always 1: requests wait in one line, for which no client need count places."""
    model_alias: str
    chat_template: str
    modalities: dict[str, bool]


EVENTS = replace(CHUNKS, end=b"")
"""Events without a [DONE]: the last one says by `stop` that it is last."""


class LlamaStream:
    """A streamed reply. Also gathers it: `reply` is whole once `finish` was called."""

    def __init__(self, plan: ReplyPlan, *, shows_text: bool, clock: Callable[[], float]) -> None:
        """`shows_text` false: the prompt is computed for the cache alone."""
        self._plan = plan
        self._tally = Tally(plan)
        self._shows_text = shows_text
        self._clock = clock
        self._began_s = clock()
        self._first_s: float | None = None
        self._texts: list[str] = []
        self._end: dict[str, Any] = {}
        self.reply: dict[str, Any] = {}

    def update(self, prompt_index: int, output: TokenOutput) -> list[dict[str, Any]]:
        if self._first_s is None:
            self._first_s = self._clock()
        _, reason = self._tally.add(prompt_index, output)
        if reason is not None:
            word = output.stop_reason if isinstance(output.stop_reason, str) else ""
            kind = "limit" if reason != "stop" else "word" if word else "eos"
            self._end = {"stop_type": kind, "stopping_word": word}
        if not output.text or not self._shows_text:
            return []
        self._texts.append(output.text)
        return [self._event(output.text)]

    def finish(self) -> list[dict[str, Any]]:
        self._tally.check_complete()
        usage, now_s = self._tally.usage(), self._clock()
        first_s = now_s if self._first_s is None else self._first_s
        last = {
            **self._event(""),
            "stop": True,
            "model": self._plan.head.model,
            **self._end,
            "truncated": False,
            "tokens_cached": usage["prompt_tokens_details"]["cached_tokens"],
            "timings": {
                "prompt_n": usage["prompt_tokens"],
                "prompt_ms": round((first_s - self._began_s) * 1000, 3),
                "predicted_n": usage["completion_tokens"],
                "predicted_ms": round((now_s - first_s) * 1000, 3),
            },
        }
        self.reply = last | {"content": "".join(self._texts)}
        return [last]

    def _event(self, text: str) -> dict[str, Any]:
        usage = self._tally.usage()
        return {
            "index": 0,
            "content": text,
            "tokens": [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"],
        }
