"""The lines of a streamed reply in Ollama's shape, made from the pieces of a chat's reply.

Owns: the lines of /api/chat and /api/generate, the counts and times of the last one, and the bytes of a line.
Never: the meaning of the text: the chat path has separated text, thinking and calls of tools.
Source: Ollama's page of its API; its Python client.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from engine.types import TokenOutput
from server.api.chat.message_reader import Message
from server.api.chat.replies import OnlyChoice
from server.edge.error_replies import ErrorReply
from server.reply.generate.replies import arguments_of
from server.reply.generate.sse import Framing
from server.reply.reading.events import Content, Reasoning

_DONE_REASONS: Final = {"tool_calls": "stop", "timeout": "length"}


def error_body(error: ErrorReply) -> dict[str, Any]:
    """The error object; the same in a reply and as a line of a stream."""
    return {"error": error.message}


def time_text(unix_time_s: float) -> str:
    return datetime.fromtimestamp(unix_time_s, UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class LineShape:
    """The part of a line that differs between the two endpoints."""

    model: str
    is_chat: bool

    def line(self, said: dict[str, Any], unix_time_s: float) -> dict[str, Any]:
        """Make a line of `content`, `thinking` and `tool_calls`."""
        head = {"model": self.model, "created_at": time_text(unix_time_s)}
        if self.is_chat:
            return {**head, "message": {"role": "assistant", **said}, "done": False}
        thinking = {name: said[name] for name in ("thinking",) if name in said}
        return {**head, "response": said["content"], **thinking, "done": False}


class LineStream:
    """A streamed reply. Also gathers it: `reply` is the whole object once `finish` was called."""

    def __init__(
        self,
        shape: LineShape,
        choice: OnlyChoice,
        *,
        clock: Callable[[], float],
        unix_time_s: Callable[[], float],
    ) -> None:
        self._shape = shape
        self._choice = choice
        self._clock = clock
        self._unix_time_s = unix_time_s
        self._began_s = clock()
        self._first_s: float | None = None
        self._message = Message()
        self.reply: dict[str, Any] = {}

    def update(self, prompt_index: int, output: TokenOutput) -> list[dict[str, Any]]:
        if self._first_s is None:
            self._first_s = self._clock()
        pieces = self._choice.read(prompt_index, output)
        self._message.add(pieces)
        said = [
            {"content": piece.text} if isinstance(piece, Content) else {"content": "", "thinking": piece.text}
            for piece in pieces
            if isinstance(piece, Content | Reasoning)  # a call is sent when it is complete
        ]
        return [self._shape.line(each, self._unix_time_s()) for each in said]

    def finish(self) -> list[dict[str, Any]]:
        ended, whole = self._ended(self._choice.usage()), self._message.body()
        said: dict[str, Any] = {"content": whole["content"] or ""}
        lines = []
        if "reasoning" in whole:
            said["thinking"] = whole["reasoning"]
        calls = [_call(each["function"]) for each in whole.get("tool_calls", ())]
        if self._choice.ends_in_call:  # clients run what they get, whatever the reason of the end
            del calls[-1]
        if calls:
            said["tool_calls"] = calls
            lines.append(self._shape.line({"content": "", "tool_calls": calls}, self._unix_time_s()))
        self.reply = {**self._shape.line(said, self._unix_time_s()), **ended}
        return [*lines, {**self._shape.line({"content": ""}, self._unix_time_s()), **ended}]

    def _ended(self, usage: dict[str, Any]) -> dict[str, Any]:
        now_s = self._clock()
        first_s = now_s if self._first_s is None else self._first_s
        return {
            "done": True,
            "done_reason": _DONE_REASONS.get(self._choice.finish_reason, self._choice.finish_reason),
            "total_duration": _nanoseconds(now_s - self._began_s),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(first_s - self._began_s),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(now_s - first_s),
        }


LINES = Framing(
    event=lambda payload: orjson.dumps(payload) + b"\n",
    failed=lambda error: [error_body(error)],
    keep_alive=b"",
    media_type="application/x-ndjson",
)
"""One JSON object on each line. Nothing can be written in a silence: clients read every line as JSON."""


def _call(function: dict[str, str]) -> dict[str, Any]:
    return {"function": {"name": function["name"], "arguments": arguments_of(function["arguments"])}}


def _nanoseconds(seconds: float) -> int:
    return int(max(0.0, seconds) * 1e9)
