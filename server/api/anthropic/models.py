"""Shapes of a message and its events, for /openapi.json only.

Owns: the documentation of /v1/messages; tests/server/api/anthropic holds replies against it.
Never: imported by code that builds replies.
"""

from typing import Any, Literal

from server.edge.http.endpoint import ReplyModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicText(ReplyModel):
    type: Literal["text"]
    text: str


class AnthropicThoughts(ReplyModel):
    type: Literal["thinking"]
    thinking: str
    signature: str
    """Always empty."""


class AnthropicToolUse(ReplyModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class AnthropicUsage(ReplyModel):
    input_tokens: int
    """Prompt tokens that were in no cache."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(ReplyModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicText | AnthropicThoughts | AnthropicToolUse]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicEvent(ReplyModel):
    """One event; the fields depend on its type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    message: AnthropicMessage | None = None
    index: int | None = None
    content_block: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    usage: AnthropicUsage | None = None
    error: dict[str, str] | None = None


class AnthropicErrorDetail(ReplyModel):
    type: str
    message: str


class AnthropicErrorBody(ReplyModel):
    type: Literal["error"]
    error: AnthropicErrorDetail


class TokenCount(ReplyModel):
    input_tokens: int
