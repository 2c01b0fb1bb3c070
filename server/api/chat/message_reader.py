"""The text of one choice, as reasoning, answer and tool calls for a reply.

Owns: ids of calls, the count of reasoning tokens, the number of calls that are allowed.
"""

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.reply.reading.events import Arguments, CallStart, Content, Event, Reasoning
from server.reply.reading.machine import ReplyReader
from server.reply.reading.row import Phase, Row, ToolSchemas

_ALPHANUMERIC = string.ascii_letters + string.digits


def call_id() -> str:
    """A new id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """A new id of nine letters and digits, which Mistral's templates insist on."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Settings for reading the replies to one request."""

    row: Row = field(default_factory=Row)
    schemas: ToolSchemas = field(default_factory=dict)
    """Tools that may be called."""
    start: Phase = Phase.ANSWER
    prompt_end: str = ""
    """The end of the prompt that is read before the reply, where a checkpoint's template says so."""
    shows_reasoning: bool = True
    """Off: its tokens are counted, and no more."""
    reasoning_end_id: int | None = None
    """The token that ends a block of reasoning, if it is one token."""
    reports_reasoning: bool = False
    """Usage has the number of reasoning tokens."""
    max_calls: int | None = None
    new_call_id: Callable[[], str] = call_id
    finish_reason_of_calls: str = "tool_calls"
    """The finish reason in place of `stop`, if there are calls."""
    echo: str = ""
    """Text of the prompt that a reply of a chat repeats at its beginning."""

    @property
    def counts_by_tokens(self) -> bool:
        """Whether tokens of thoughts are counted however large the pieces are in which a reply is read."""
        return self.reasoning_end_id is not None or not self.reports_reasoning

    @property
    def is_plain(self) -> bool:
        """Text is passed on as it is."""
        return self.row == Row() and self.start is Phase.ANSWER

    def new_reader(self) -> ReplyReader:
        reader = ReplyReader(self.row, self.schemas, self.start)
        if self.prompt_end:
            reader.begin_behind(self.prompt_end)
        return reader


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
        self._is_plain = reading.is_plain
        self._reader = reading.new_reader()
        self._passed_on: tuple[type[Content | Reasoning], ...] = (
            (Content, Reasoning) if reading.shows_reasoning else (Content,)
        )
        self._ids: set[str] = set()
        """Ids of the calls so far, of which each is written once: clients tell calls apart by them."""
        self._has_left_out = False
        """There are more calls than may be shown."""
        self.ends_in_call = False
        """The text was cut off inside of a call that is shown: there is nothing to call."""
        self._undecided_ids: list[int] = []
        """Tokens that may be the beginning of a block."""
        self._is_counted = self._reader.place is Phase.ANSWER
        self.num_reasoning_tokens = 0
        """Exact where the end of the block is one token; else its last output counts as a whole."""

    def feed(self, text: str, token_ids: Sequence[int]) -> Sequence[Piece]:
        """Return the pieces that are certain by now. `token_ids` came with the text, and are only counted."""
        if self._is_plain:
            return [Content(text)] if text else []
        events = self._reader.feed(text)
        if not self._is_counted:
            if self._reader.is_in_thought and not self._undecided_ids:
                self.num_reasoning_tokens += len(token_ids)
            else:
                self._count(token_ids)
        return self._allowed(events) if events else ()

    def finish(self, *, is_cut: bool = False) -> Sequence[Piece]:
        """The text has ended. `is_cut`: the model has not ended it."""
        pieces = self._allowed(self._reader.finish(is_cut=is_cut))
        self.ends_in_call = is_cut and self._reader.is_inside_call and not self._has_left_out
        return pieces

    def finish_reason(self, reason: str | None) -> str | None:
        """A reply that calls tools ends for that reason, unless it was cut off. None: it goes on."""
        is_called = reason == "stop" and bool(self._ids) and not self.ends_in_call
        return self._reading.finish_reason_of_calls if is_called else reason

    def _allowed(self, events: list[Event]) -> Sequence[Piece]:
        """Calls beyond the allowed number are left out, and reasoning that is not shown."""
        if len(events) == 1 and isinstance(events[0], self._passed_on):
            return (events[0],)
        limit = self._reading.max_calls
        pieces: list[Piece] = []
        for event in events:
            match event:
                case Content():
                    pieces.append(event)
                case Reasoning():
                    if Reasoning in self._passed_on:
                        pieces.append(event)
                case _ if limit is not None and event.index >= limit:
                    self._has_left_out = True
                case CallStart():
                    written = event.id if event.id not in self._ids else None
                    own_id = written or self._reading.new_call_id()
                    self._ids.add(own_id)
                    pieces.append(ToolCall(event.index, own_id, event.name))
                case Arguments():
                    pieces.append(event)
        return pieces

    def _count(self, token_ids: Sequence[int]) -> None:
        ids = [*self._undecided_ids, *token_ids]
        self._undecided_ids.clear()
        self._is_counted = self._reader.place in (Phase.ANSWER, Phase.CALL)
        if self._reader.has_thought:
            end_id = self._reading.reasoning_end_id
            if end_id is not None and end_id in ids:
                self._is_counted = True
                ids = ids[: ids.index(end_id) + 1]
            self.num_reasoning_tokens += len(ids)
        elif not self._is_counted:
            self._undecided_ids = ids


class Message:
    """The whole message of one choice, for a reply that is not streamed."""

    def __init__(self, echo: str = "") -> None:
        self._reasoning: list[str] = []
        self._content = [echo]
        self._calls: list[tuple[ToolCall, list[str]]] = []
        """Each with the pieces of its arguments."""

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Reasoning():
                    self._reasoning.append(piece.text)
                case Content():
                    self._content.append(piece.text)
                case ToolCall():
                    self._calls.append((piece, []))
                case Arguments():
                    self._calls[piece.index][1].append(piece.text)

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
                    "function": {"name": call.name, "arguments": "".join(arguments)},
                }
                for call, arguments in self._calls
            ]
        return body


def reasoning_fields(text: str) -> dict[str, str]:
    """DeepSeek's name for it, and the newer one."""
    return {"reasoning": text, "reasoning_content": text}
