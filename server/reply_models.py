"""The shapes of replies, for /openapi.json only: what is sent is built as plain dicts, token by token.

Owns: the documentation of replies; tests/server hold every real reply against it.
Never: imported by what builds replies.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishReasonName = Literal["stop", "length", "timeout"]
"""`timeout` is ours: a time limit ran out, and what there is was sent."""


class ReplyModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(ReplyModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorReplyBody(ReplyModel):
    error: ErrorDetail


class PromptTokensDetails(ReplyModel):
    cached_tokens: int


class Usage(ReplyModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(ReplyModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(ReplyModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName | None
    """Null only in the chunks of a stream."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the choice; null for the end-of-sequence token."""


class Completion(ReplyModel):
    """A whole reply, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(ReplyModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ReplyModel):
    content: list[TokenLogprob]
    refusal: None


class AssistantMessage(ReplyModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(ReplyModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    stop_reason: int | str | None


class ChatCompletion(ReplyModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(ReplyModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(ReplyModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName | None
    stop_reason: int | str | None = None


class ChatCompletionChunk(ReplyModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Model(ReplyModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(ReplyModel):
    object: Literal["list"]
    data: list[Model]


class HealthPage(ReplyModel):
    status: Literal["ok", "unavailable"]
    state: Literal["loading", "ready", "draining", "dead"]
    detail: str
    progress: float
    num_steps: int


class LiveRequest(ReplyModel):
    request_id: str | None
    choice: int = 0
    sequence_id: int
    state: Literal["running", "waiting", "swapped"]
    place: int
    priority: int
    rank: list[float]
    tenant: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_host_blocks: int
    num_preemptions: int
    num_bypasses: int
    age_s: float
    wait_reason: str


class LiveRequests(ReplyModel):
    requests: list[LiveRequest]


class Version(ReplyModel):
    version: str
