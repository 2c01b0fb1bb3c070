"""Shapes that the replies of several endpoints share, for /openapi.json only."""

from typing import Literal

from server.edge.http.endpoint import ReplyModel

FinishReasonName = Literal["stop", "length", "tool_calls", "timeout"]
"""`timeout` is ours: a time limit ran out, and the reply is the text so far."""


class PromptTokensDetails(ReplyModel):
    cached_tokens: int


class CompletionTokensDetails(ReplyModel):
    reasoning_tokens: int | None = None
    """Present if the server separates the model's reasoning from its answer."""
    accepted_prediction_tokens: int | None = None
    """Present if the request has a prediction, as is the next."""
    rejected_prediction_tokens: int | None = None


class Usage(ReplyModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    """Present if one of its fields is."""


class RequestTimes(ReplyModel):
    """Times of one request, for `include_metrics`; null where they are not known."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    """From the first token to the last."""
    queue_time_ms: float | None
    mean_itl_ms: float | None
    """Time between two tokens."""
    tokens_per_second: float | None


class ReplyFrame(ReplyModel):
    """Fields of whole replies and of chunks."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    metrics: RequestTimes | None = None


class PromptLogprob(ReplyModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Objects by token id, one for each token of the prompt, with its alternatives; null for the first token."""


class TopLogprob(ReplyModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]
