"""The shapes of replies, for /openapi.json only: what is sent is built as plain dicts, token by token.

Owns: the documentation of replies; tests/server hold every real reply against it.
Never: imported by what builds replies.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReasonName = Literal["stop", "length", "tool_calls", "timeout"]
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


class CompletionTokensDetails(ReplyModel):
    reasoning_tokens: int


class Usage(ReplyModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    """Of a model whose reasoning is told apart from its answer."""


class CompletionLogprobs(ReplyModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of an echoed prompt, in both lists."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(ReplyModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, by token id: itself and the alternatives; null for the first token."""


class CompletionChoice(ReplyModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName | None
    """Null only in the chunks of a stream."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the choice; null for the end-of-sequence token."""
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


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
    """The same, under its older name."""
    tool_calls: list[MessageToolCall] | None = None


class ChatChoice(ReplyModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(ReplyModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(ReplyModel):
    name: str | None = None
    arguments: str
    """A piece of the JSON text."""


class ToolCallDelta(ReplyModel):
    """With an id and a name where a call begins; further pieces of its arguments have the same index."""

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


class ChatCompletionChunk(ReplyModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class Model(ReplyModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """The first served name; the others are aliases."""
    parent: None
    permission: list[Any]
    """Always empty."""
    max_model_len: int


class ModelList(ReplyModel):
    object: Literal["list"]
    data: list[Model]


class Tokenization(ReplyModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """As the tokenizer spells them."""


class Detokenization(ReplyModel):
    prompt: str


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
    rank: list[float | None]
    """null stands for infinity: a time limit that is not set."""
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
