"""Shapes of a response object and its events, for /openapi.json only."""

from typing import Any, Literal

from server.edge.http.endpoint import ReplyModel, ReplyPage
from server.reply.generate.reply_models import TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(ReplyModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    """Always empty."""
    logprobs: list[TokenLogprob]


class OutputMessage(ReplyModel):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(ReplyModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningOutput(ReplyModel):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    """Always empty: the reasoning itself is in `content`."""
    content: list[ReasoningText]


class FunctionCallOutput(ReplyModel):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomCallOutput(ReplyModel):
    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    input: str


class ShellCallOutput(ReplyModel):
    id: str
    type: Literal["local_shell_call"]
    status: ItemStatus
    call_id: str
    action: dict[str, Any]


class IncompleteDetails(ReplyModel):
    reason: Literal["max_output_tokens", "timeout"]


class ResponseFailure(ReplyModel):
    code: str
    message: str


class InputTokensDetails(ReplyModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(ReplyModel):
    reasoning_tokens: int


class ResponseUsage(ReplyModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class RawMessage(ReplyModel):
    """Tokens as the model has them."""

    type: Literal["raw_message_tokens"]
    message: str
    tokens: list[int]


class ResponseObject(ReplyModel):
    """A response, whole or on its way."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | ReasoningOutput | FunctionCallOutput | CustomCallOutput | ShellCallOutput]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"]
    store: bool
    """True if GET and previous_response_id will find it, as long as there is room."""
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    input_messages: list[RawMessage] | None = None
    """Present with `enable_response_messages`, as is `output_messages`."""
    output_messages: list[RawMessage] | None = None


class ResponseEvent(ReplyModel):
    """One event; its other fields depend on its type, as OpenAI documents them."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    """Present in response.created, response.queued, response.in_progress and the last event."""
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    item: dict[str, Any] | None = None
    part: dict[str, Any] | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    input: str | None = None
    logprobs: list[TokenLogprob] | None = None


class InputItemPage(ReplyPage):
    """Some of the items that a response was asked with."""

    data: list[dict[str, Any]]
    """Items as the request may bring them, each with an id."""


class InputTokens(ReplyModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseDeletion(ReplyModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
