"""The events of a streamed response, in OpenAI's order, made from the pieces of a chat's reply.

Owns: the open item, sequence numbers, the bytes of an event, and the end of a stream that failed.
Never: the meaning of the text: the chat path has separated text, reasoning and function calls.
Source: OpenAI's reference of streaming events; the accumulator of its Python SDK.

    response.created, response.queued (in the background), response.in_progress
    for each item: response.output_item.added
        message:        content_part.added, output_text.delta ..., output_text.done, content_part.done
        reasoning:      content_part.added, reasoning_text.delta ..., reasoning_text.done, content_part.done
        function call:  function_call_arguments.delta ..., function_call_arguments.done
        custom call:    custom_tool_call_input.delta ..., custom_tool_call_input.done
        response.output_item.done
    response.completed | response.incomplete | response.failed
"""

from collections.abc import Callable
from typing import Any

from engine.types import TokenOutput
from server.api.chat.message_reader import Piece, ToolCall
from server.api.chat.replies import OnlyChoice
from server.api.responses.replies import (
    CallItem,
    OutputItem,
    ResponsePlan,
    TextItem,
    TextKind,
    ended,
    raw_messages,
    response_of,
    status_of,
)
from server.api.responses.tools import ID_PREFIXES, WireForm
from server.edge.error_replies import ErrorReply
from server.reply.generate.wire_logprobs import chat_logprobs
from server.reply.reading.events import Arguments, Content, Reasoning

OnEnd = Callable[[dict[str, Any]], None]
"""Called with the finished response object, before the client receives it."""

_DONE_EVENTS = {
    WireForm.FUNCTION: ("function_call_arguments", "arguments"),
    WireForm.CUSTOM: ("custom_tool_call_input", "input"),
}
"""The event of the pieces of a call, and the field of its last one; a call of the shell comes whole."""
_CODES = {"server_overloaded": "rate_limit_exceeded"}
"""OpenAI's own words for our codes; every other one is a `server_error` there."""


class ResponseStream:
    """A streamed response. Also gathers it: `response` is the whole object once it has an end."""

    def __init__(
        self, plan: ResponsePlan, choice: OnlyChoice, *, on_end: OnEnd, unix_time_s: Callable[[], float]
    ) -> None:
        self._plan = plan
        self._choice = choice
        self._on_end = on_end
        self._unix_time_s = unix_time_s
        self._sequence_number = 0
        self._output: list[dict[str, Any]] = []
        """Items that are done."""
        self._open: OutputItem | None = None
        self._held_logprobs: list[dict[str, Any]] = []
        """Log-probabilities of tokens whose item is not known yet."""
        self._output_ids: list[int] = []
        self._has_begun = self._was_queued = False
        self.response: dict[str, Any] = {}

    @property
    def has_begun(self) -> bool:
        """True once there was an output."""
        return self._has_begun

    def queue(self) -> list[dict[str, Any]]:
        """The events of a response in the background before its turn."""
        self._was_queued = True
        self.response = response_of(self._plan, status="queued")
        return [
            self._event("response.created", response=self.response),
            self._event("response.queued", response=self.response),
        ]

    def update(self, prompt_index: int, output: TokenOutput) -> list[dict[str, Any]]:
        if self._plan.raw_text is not None:
            self._output_ids += output.token_ids
        pieces = self._choice.read(prompt_index, output)
        events = self._begin()
        self._held_logprobs += chat_logprobs(output.logprobs)["content"]
        if not pieces and output.logprobs:
            item = self._open
            if self._choice.is_plain or (isinstance(item, TextItem) and item.kind == "output_text"):
                pieces = [Content("")]
            elif item is not None:  # the mark that ends reasoning or a call
                self._held_logprobs = []
        for piece in pieces:
            events += self._take(piece)
        return events

    def finish(self) -> list[dict[str, Any]]:
        usage = self._choice.usage()
        events = self._begin()
        if not self._output and self._open is None:  # an answer without a word is an answer
            events += self._open_item(TextItem(self._item_id("msg")))
        status = status_of(self._choice.finish_reason)
        events += self._close_item("incomplete" if self._choice.ends_in_call else status)
        self.response = ended(
            self._plan,
            self._output,
            finish_reason=self._choice.finish_reason,
            usage=usage,
            now_s=int(self._unix_time_s()),
        ) | raw_messages(self._plan, self._output_ids)
        self._on_end(self.response)
        return [*events, self._event(f"response.{status}", response=self.response)]

    def fail(self, error: ErrorReply) -> list[dict[str, Any]]:
        """The events that end a stream which has begun and cannot go on."""
        events = [*self._begin(), *self._close_item("incomplete")]
        code = _CODES.get(error.code, "server_error")
        self.response = response_of(self._plan, status="failed") | {
            "output": self._output,
            "error": {"code": code, "message": error.message},
        }
        return [*events, self._event("response.failed", response=self.response)]

    def cancel(self) -> list[dict[str, Any]]:
        """The last events of a response in the background that shall not go on."""
        events = self._close_item("incomplete")
        self.response = response_of(self._plan, status="cancelled") | {"output": self._output}
        # No event is called after it: the status of the response tells it from one that was cut off.
        return [*events, self._event("response.incomplete", response=self.response)]

    def _begin(self) -> list[dict[str, Any]]:
        if self._has_begun:
            return []
        self._has_begun = True
        response = self.response = response_of(self._plan, status="in_progress")
        kinds = ("in_progress",) if self._was_queued else ("created", "in_progress")
        return [self._event(f"response.{kind}", response=response) for kind in kinds]

    def _take(self, piece: Piece) -> list[dict[str, Any]]:
        logprobs, self._held_logprobs = self._held_logprobs, []
        match piece:
            case Content():
                return self._add_text("output_text", piece.text, logprobs=logprobs)
            case Reasoning():
                return self._add_text("reasoning_text", piece.text)
            case ToolCall():
                tool = self._plan.tools.named(piece.name)
                return self._open_item(CallItem(self._item_id(ID_PREFIXES[tool.form]), piece.id, tool))
            case Arguments():
                return self._add_arguments(piece.text)

    def _add_text(self, kind: TextKind, text: str, **more: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`more`: the log-probabilities, of which reasoning has none."""
        item, events = self._open, list[dict[str, Any]]()
        if not isinstance(item, TextItem) or item.kind != kind:
            item = TextItem(self._item_id("msg" if kind == "output_text" else "rs"), kind)
            events = self._open_item(item)
        item.text.append(text)
        item.logprobs.add(more)
        return [*events, self._part_event(f"response.{kind}.delta", delta=text, **more)]

    def _add_arguments(self, text: str) -> list[dict[str, Any]]:
        item = self._open
        assert isinstance(item, CallItem)
        item.arguments.append(text)
        if item.tool.form is WireForm.FUNCTION:
            return [self._item_event("response.function_call_arguments.delta", delta=text)]
        if item.tool.form is WireForm.CUSTOM and (said := item.text.feed(text)):
            return [self._item_event("response.custom_tool_call_input.delta", delta=said)]
        return []

    def _open_item(self, item: OutputItem) -> list[dict[str, Any]]:
        events = self._close_item("completed")
        self._open = item
        added = item.body("in_progress")
        events.append(self._event("response.output_item.added", output_index=len(self._output), item=added))
        if not isinstance(item, CallItem):
            events.append(self._part_event("response.content_part.added", part=item.part()))
        return events

    def _close_item(self, status: str) -> list[dict[str, Any]]:
        item = self._open
        if item is None:
            return []
        body = item.body(status)
        if isinstance(item, CallItem):
            events = []
            if item.tool.form in _DONE_EVENTS:
                kind, name = _DONE_EVENTS[item.tool.form]
                events.append(self._item_event(f"response.{kind}.done", **{name: body[name]}))
        else:
            part = item.part()
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = [
                self._part_event(f"response.{item.kind}.done", **said),
                self._part_event("response.content_part.done", part=part),
            ]
        events.append(self._event("response.output_item.done", output_index=len(self._output), item=body))
        self._output.append(body)
        self._open = None
        return events

    def _item_id(self, prefix: str) -> str:
        place = len(self._output) + (self._open is not None)
        return self._plan.item_id(prefix, place)

    def _part_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        return self._event(kind, item_id=self._open.id, output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sequence_number += 1
        return {"type": kind, "sequence_number": self._sequence_number - 1, **fields}


def error_event(error: ErrorReply) -> dict[str, Any]:
    """The one event of a stream that fails before its response exists."""
    told = {"code": error.code, "message": error.message, "param": error.param}
    return {"type": "error", "sequence_number": 0, **told}
