"""Shapes of Ollama's replies, for /openapi.json only."""

from typing import Any, Literal

from server.edge.http.endpoint import ReplyModel


class OllamaReplyMessage(ReplyModel):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class OllamaReply(ReplyModel):
    """A line of a stream, or the whole reply; counts and times, in nanoseconds, are in the last line."""

    model: str
    created_at: str
    message: OllamaReplyMessage | None = None
    """The reply of /api/chat."""
    response: str | None = None
    """The reply of /api/generate."""
    thinking: str | None = None
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaDetails(ReplyModel):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class _OllamaNamed(ReplyModel):
    name: str
    model: str
    size: int
    digest: str
    """Changes with kind, size and type of the weights; no digest of the files."""
    details: OllamaDetails


class OllamaModel(_OllamaNamed):
    modified_at: str


class OllamaModelList(ReplyModel):
    models: list[OllamaModel]


class OllamaLoadedModel(_OllamaNamed):
    expires_at: str
    size_vram: int
    context_length: int


class OllamaLoadedList(ReplyModel):
    models: list[OllamaLoadedModel]


class OllamaModelPage(ReplyModel):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(ReplyModel):
    version: str


class OllamaError(ReplyModel):
    error: str
