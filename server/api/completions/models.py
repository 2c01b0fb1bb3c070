"""Shapes of the replies of /v1/completions, for /openapi.json only.

Owns: the documentation of replies; tests/server hold every real reply against it.
Never: imported by code that builds replies.
"""

from typing import Literal

from server.edge.http.endpoint import ReplyModel
from server.reply.generate.reply_models import FinishReasonName, PromptLogprobs, RequestTimes, Usage


class CompletionLogprobs(ReplyModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of an echoed prompt, in both lists."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


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
    metrics: RequestTimes | None = None
