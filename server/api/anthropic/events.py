"""The events of a streamed message, in Anthropic's order, made from the pieces of a chat's reply.

Owns: the open block, the message that grows, the bytes of an event, and the shape of an error.
Never: the meaning of the text: the chat path has separated text, thinking and calls of tools.
Source: Anthropic's references of streaming events and of errors; the accumulator of its Python SDK.

    message_start
    for each block: content_block_start, content_block_delta ..., content_block_stop
    message_delta, message_stop
    error, in the place of all that is missing
"""

from typing import Any, Final

from engine.types import TokenOutput
from server.api.chat.message_reader import Piece, ToolCall
from server.api.chat.replies import OnlyChoice
from server.edge.error_replies import ErrorReply
from server.reply.generate.replies import arguments_of
from server.reply.generate.sse import Framing, named_event
from server.reply.reading.events import Arguments, Content, Reasoning

_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STOP_REASONS: Final = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_TIMED_OUT: Final = "max_tokens"
"""Anthropic has no time limits; clients know this reason, and that the text was cut off."""
_FIELD_OF: Final = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
_DELTA_OF: Final = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


def error_body(error: ErrorReply) -> dict[str, Any]:
    """The error object; the same in a reply and as an event of a stream."""
    otherwise = "api_error" if error.status >= 500 else "invalid_request_error"
    detail = {"type": _ERROR_TYPES.get(error.status, otherwise), "message": error.message}
    return {"type": "error", "error": detail}


FRAMING: Final = Framing(event=named_event, failed=lambda error: [error_body(error)])


class MessageStream:
    """A streamed message. Also gathers it: `message` is whole once `finish` was called."""

    def __init__(
        self, message_id: str, model: str, num_prompt_tokens: int, choice: OnlyChoice, *, is_marked: bool
    ) -> None:
        self._choice, self._is_marked = choice, is_marked
        self._num_prompt_tokens = num_prompt_tokens
        self._num_cached = self._num_created = 0
        self._has_begun = False
        self._pieces: list[str] = []
        """The text of the open block."""
        self._is_open = False
        self._has_calls = False
        self.message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }

    def update(self, prompt_index: int, output: TokenOutput) -> list[dict[str, Any]]:
        self._num_cached = output.num_cached_tokens
        if self._is_marked:
            self._num_created = max(output.num_kept_tokens - output.num_cached_tokens, 0)
        events = self._begin()
        for piece in self._choice.read(prompt_index, output):
            events += self._take(piece)
        return events

    def finish(self) -> list[dict[str, Any]]:
        usage, stopped_by = self._choice.usage(), self._choice.stop_reason
        events = [*self._begin(), *self._close_block()]
        self.message["usage"] = self._usage(usage["completion_tokens"])
        delta = {
            "stop_reason": self._stop_reason(),
            "stop_sequence": stopped_by if isinstance(stopped_by, str) else None,
        }
        self.message |= delta
        return [
            *events,
            {"type": "message_delta", "delta": delta, "usage": self.message["usage"]},
            {"type": "message_stop"},
        ]

    def _begin(self) -> list[dict[str, Any]]:
        if self._has_begun:
            return []
        self._has_begun = True
        begun = {**self.message, "content": [], "usage": self._usage(0)}
        return [{"type": "message_start", "message": begun}]

    def _take(self, piece: Piece) -> list[dict[str, Any]]:
        match piece:
            case Reasoning():
                return self._add({"type": "thinking", "thinking": "", "signature": ""}, piece.text)
            case Content():
                return self._add({"type": "text", "text": ""}, piece.text)
            case ToolCall():
                self._has_calls = True
                return self._open_block({"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
            case Arguments():
                return self._add_arguments(piece.text)

    def _add_arguments(self, text: str) -> list[dict[str, Any]]:
        """Show arguments that are an object: any others are an empty one in the end."""
        text = text if self._pieces else text.lstrip()
        events = [self._delta(text)] if text else []
        return events if self._pieces and self._pieces[0].startswith("{") else []

    def _add(self, block: dict[str, Any], text: str) -> list[dict[str, Any]]:
        is_same = self._is_open and self._block["type"] == block["type"]
        events = [] if is_same else self._open_block(block)
        return [*events, self._delta(text)]

    def _open_block(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._close_block()
        self.message["content"].append(block)
        self._pieces = []
        self._is_open = True
        begun = dict(block)  # it changes while this event waits to be sent
        return [*events, {"type": "content_block_start", "index": self._place, "content_block": begun}]

    def _close_block(self) -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        self._is_open = False
        block, text = self._block, "".join(self._pieces)
        if block["type"] == "tool_use":
            block["input"] = arguments_of(text)
        else:
            block[_FIELD_OF[block["type"]]] = text
        return [{"type": "content_block_stop", "index": self._place}]

    def _delta(self, text: str) -> dict[str, Any]:
        self._pieces.append(text)
        kind = self._block["type"]
        delta = {"type": _DELTA_OF[kind], _FIELD_OF[kind]: text}
        return {"type": "content_block_delta", "index": self._place, "delta": delta}

    @property
    def _block(self) -> dict[str, Any]:
        block: dict[str, Any] = self.message["content"][-1]
        return block

    @property
    def _place(self) -> int:
        return len(self.message["content"]) - 1

    def _stop_reason(self) -> str:
        if isinstance(self._choice.stop_reason, str):
            return "stop_sequence"
        # A named tool ends with `stop` in OpenAI's words.
        if self._has_calls and self._choice.finish_reason == "stop":
            return "tool_use"
        return _STOP_REASONS.get(self._choice.finish_reason, _TIMED_OUT)

    def _usage(self, num_output_tokens: int) -> dict[str, int]:
        return {
            "input_tokens": self._num_prompt_tokens - self._num_cached - self._num_created,
            "cache_creation_input_tokens": self._num_created,
            "cache_read_input_tokens": self._num_cached,
            "output_tokens": num_output_tokens,
        }
