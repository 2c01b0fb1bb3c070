"""Shapes of the replies of /v1/chat/completions, for /openapi.json only."""

from typing import Literal

from server.edge.http.endpoint import ReplyModel
from server.reply.generate.reply_models import (
    FinishReasonName,
    PromptLogprobs,
    ReplyFrame,
    TokenLogprob,
    Usage,
)


class CalledFunction(ReplyModel):
    name: str
    arguments: str
    """JSON text as the model wrote it: it may be broken."""


class MessageToolCall(ReplyModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(ReplyModel):
    role: Literal["assistant"]
    content: str | None
    """Null if there are tool calls and nothing else."""
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Equal to `reasoning`, under its older name."""
    tool_calls: list[MessageToolCall] | None = None


class ChatLogprobs(ReplyModel):
    content: list[TokenLogprob]
    refusal: None


class ChatChoice(ReplyModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(ReplyFrame):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(ReplyModel):
    name: str | None = None
    arguments: str
    """A piece of the JSON text."""


class ToolCallDelta(ReplyModel):
    """A piece of a call: the first has id and name; pieces of its arguments follow under the same index."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(ReplyModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ReplyModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(ReplyFrame):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
