"""The text of one choice, split into reasoning, answer and tool calls.

Owns: the order of the readers (reasoning first, then calls), ids of calls, the count of reasoning tokens.
Never: finds marks itself (reasoning.py, tool_calls/, response_templates/), or knows the shape of a reply
(replies.py).
"""

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from server.api.chat.reasoning import Phase, Pieces, ReasoningStart
from server.api.chat.reasoning_styles import THINK, ReasoningStyle
from server.reply.tool_calls.events import Arguments, CallStart, Content, Reasoning, ToolCallParser, ToolEvent

_ALPHANUMERIC = string.ascii_letters + string.digits


def no_calls() -> ToolCallParser | None:
    """No parser: all of the answer is content."""
    return None


def call_id() -> str:
    """A new id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """A new id of nine letters and digits, which Mistral's templates insist on."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class ShownReasoning(StrEnum):
    """The part of the reasoning that a reply shows."""

    ALL = "all"
    COUNT = "count"  # only how many tokens it took


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Settings for reading the replies to one request."""

    reasoning: ReasoningStart = ReasoningStart.NONE
    style: ReasoningStyle = THINK
    """Marks of the reasoning, where there may be any."""
    shown_reasoning: ShownReasoning = ShownReasoning.ALL
    reasoning_end_id: int | None = None
    """The token that ends a block of reasoning, if it is one token."""
    reports_reasoning: bool = False
    """Usage has the number of reasoning tokens."""
    new_parser: Callable[[], ToolCallParser | None] = no_calls
    max_calls: int | None = None
    new_call_id: Callable[[], str] = call_id
    finish_reason_of_calls: str = "tool_calls"
    """The finish reason in place of `stop`, if there are calls."""

    @property
    def is_plain(self) -> bool:
        """Text is passed on as it is."""
        return self.new_parser is no_calls and self.reasoning is ReasoningStart.NONE


PLAIN = Reading()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call begins."""

    index: int
    id: str
    name: str


Piece = Reasoning | Content | ToolCall | Arguments


class MessageReader:
    """Fed with the text of one choice, in pieces of any size."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._splitter = reading.style.new_splitter(reading.reasoning)
        self._parser = reading.new_parser()
        self._num_calls = 0
        self._undecided_ids: list[int] = []
        """Tokens that may be the beginning of a block."""
        self._is_counted = reading.reasoning is ReasoningStart.NONE
        self.num_reasoning_tokens = 0
        """Exact where the end of the block is one token; else its last output counts as a whole."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Piece]:
        """Return the pieces that are certain by now. `token_ids` came with the text, and are only counted."""
        if self._reading.is_plain:
            return [Content(text)] if text else []
        events = self._splitter.feed(text)
        if not self._is_counted:
            self._count(token_ids)
        return self._read(events)

    def cut_off(self) -> None:
        """Note, before `finish`, that the text ends and the model has not ended it."""
        self._splitter.is_cut_off = True

    def finish(self) -> list[Piece]:
        """The text has ended."""
        pieces = self._read(self._splitter.finish())
        if self._parser is not None:
            pieces += self._allowed(self._parser.finish())
        return pieces

    def finish_reason(self, reason: str, stop_reason: int | str | None = None) -> str:
        """A reply that calls tools ends for that reason, unless it was cut off.

        `stop_reason` is the stop string or stop token that the caller has set and met. Inside of a call it
        leaves nothing to call.
        """
        parser = self._splitter if self._parser is None else self._parser
        is_cut_off = stop_reason is not None and parser.is_inside_call
        is_called = reason == "stop" and self._num_calls > 0 and not is_cut_off
        return self._reading.finish_reason_of_calls if is_called else reason

    def _read(self, events: Sequence[Pieces]) -> list[Piece]:
        pieces: list[Piece] = []
        for event in events:
            if isinstance(event, Reasoning):
                if self._reading.shown_reasoning is ShownReasoning.ALL:
                    pieces.append(event)
            elif isinstance(event, Content) and self._parser is not None:
                pieces += self._allowed(self._parser.feed(event.text))
            else:
                pieces += self._allowed((event,))
        return pieces

    def _allowed(self, events: Sequence[ToolEvent]) -> list[Piece]:
        """Calls beyond the allowed number are left out."""
        limit = self._reading.max_calls
        pieces: list[Piece] = []
        for event in events:
            if isinstance(event, Content):
                pieces.append(event)
            elif limit is not None and event.index >= limit:
                continue
            elif isinstance(event, CallStart):
                self._num_calls += 1
                pieces.append(ToolCall(event.index, event.id or self._reading.new_call_id(), event.name))
            else:
                pieces.append(event)
        return pieces

    def _count(self, token_ids: Sequence[int]) -> None:
        ids = [*self._undecided_ids, *token_ids]
        self._undecided_ids.clear()
        self._is_counted = self._splitter.phase is Phase.ANSWER
        if self._splitter.has_block:
            end_id = self._reading.reasoning_end_id
            if end_id is not None and end_id in ids:
                self._is_counted = True
                ids = ids[: ids.index(end_id) + 1]
            self.num_reasoning_tokens += len(ids)
        elif not self._is_counted:
            self._undecided_ids = ids


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class Message:
    """The whole message of one choice, for a reply that is not streamed."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[_Call] = []

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Reasoning():
                    self._reasoning.append(piece.text)
                case Content():
                    self._content.append(piece.text)
                case ToolCall():
                    self._calls.append(_Call(piece.id, piece.name))
                case Arguments():
                    self._calls[piece.index].arguments.append(piece.text)

    def body(self) -> dict[str, Any]:
        """The message as OpenAI documents it; reasoning under both names that clients look for."""
        content = "".join(self._content)
        body: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            body |= reasoning_fields("".join(self._reasoning))
        if self._calls:
            body["content"] = content or None
            body["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for call in self._calls
            ]
        return body


def reasoning_fields(text: str) -> dict[str, str]:
    """DeepSeek's name for it, and the newer one."""
    return {"reasoning": text, "reasoning_content": text}
