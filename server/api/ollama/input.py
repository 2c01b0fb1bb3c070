"""A request in Ollama's words to the chat request that means the same.

Owns: the chat message for each of Ollama's, ids for calls of tools (Ollama has none), names of models.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import orjson

from engine.errors import RequestRejected
from engine.types import ModelInfo
from server.api.chat.protocol import ChatCompletionRequest
from server.api.chat.tool_protocol import chat_call
from server.api.completions.protocol import CompletionRequest
from server.api.ollama.protocol import (
    OllamaChatRequest,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaMessage,
)
from server.edge.http.json_body import built
from server.edge.refusals import in_words
from server.reply.generate.protocol import SamplingNumbers, ServiceFields
from server.reply.pictures.media_parts import data_url, picture_part

_LATEST = ":latest"
_NAMES: Final = (
    (r"\bcontent(\[\d+\])[\w.]*", r"images\1"),
    (r"\bmax_(?:completion_)?tokens\b", "options.num_predict"),
    ("repetition_penalty", "options.repeat_penalty"),
    (r"response_format(?:\.json_schema(?:\.schema)?)?", "format"),
    ("reasoning_effort", "think"),
)
"""Names of a chat's fields to Ollama's; pictures stand before the text, so that their numbers agree."""
_NAMES_OF_PROMPT: Final = (
    (r"^messages(?=$|:)|\bmessages\[\d+\]\.content\b(?!\[)", "prompt"),
    (r"messages\[\d+\]\.", ""),
)
"""The same, before these, where the only message is the prompt."""


def served_name(name: str | None, info: ModelInfo) -> str | None:
    """The name without the tag that Ollama's clients add, unless one is served with it."""
    if name is None or name in info.names:
        return name
    return name.removesuffix(_LATEST)


def in_ollamas_words(body: OllamaFields) -> AbstractContextManager[None]:
    """Make refusals of the paths of chats and completions name the fields that the caller wrote."""
    return in_words(*(_NAMES_OF_PROMPT if isinstance(body, OllamaGenerateRequest) else ()), *_NAMES)


def chat_request_of(
    body: OllamaChatRequest | OllamaGenerateRequest, info: ModelInfo
) -> ChatCompletionRequest:
    """Build the chat request. Raises RequestRejected."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in ServiceFields.model_fields}
    fields["model"] = served_name(body.model, info)
    fields |= _option_fields(body)
    if body.think is not None:
        fields["enable_thinking"] = bool(body.think)
        fields["reasoning_effort"] = None if body.think is True else body.think or "none"
    if isinstance(body, OllamaChatRequest):
        fields["messages"] = _messages(body.messages or ())
        fields["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        content = _content(body.prompt, body.images)
        fields["messages"] = [*system, {"role": "user", "content": content}]
    return built(ChatCompletionRequest, fields)


def completion_request_of(body: OllamaGenerateRequest, info: ModelInfo) -> CompletionRequest:
    """Build the completion of a prompt that is raw, or has a suffix. Raises RequestRejected."""
    for name in ("system", "images"):
        if getattr(body, name):
            why = f"{name}: a prompt that is raw, or has a suffix, has no place for it"
            raise RequestRejected(why, param=name)
    fields: dict[str, Any] = {name: getattr(body, name) for name in ServiceFields.model_fields}
    options = _option_fields(body)
    fields |= {"max_tokens": options.pop("max_completion_tokens", None), **options}
    fields |= {"model": served_name(body.model, info), "prompt": body.prompt, "suffix": body.suffix}
    return built(CompletionRequest, fields)


def _option_fields(body: OllamaFields) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.options is not None:
        fields |= {name: getattr(body.options, name) for name in (*SamplingNumbers.model_fields, "stop")}
        if body.options.repeat_penalty is not None:
            fields["repetition_penalty"] = body.options.repeat_penalty
        if body.options.num_predict is not None and body.options.num_predict > 0:
            fields["max_completion_tokens"] = body.options.num_predict
    if body.format is not None:
        described = {"name": "reply", "schema": body.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": described}
    return fields


def _messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Give calls ids, and each result the id of the earliest call of its tool that has none."""
    waiting: deque[tuple[str, str]] = deque()
    """Id and name of each call without a result."""
    found = []
    for place, message in enumerate(messages):
        rendered: dict[str, Any] = {
            "role": message.role,
            "content": _content(message.content, message.images),
        }
        if message.thinking:
            rendered["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [(f"call_{place}_{number}", call) for number, call in enumerate(message.tool_calls)]
            waiting.extend((call_id, call.function.name) for call_id, call in calls)
            rendered["tool_calls"] = [
                chat_call(call_id, call.function.name, orjson.dumps(call.function.arguments or {}).decode())
                for call_id, call in calls
            ]
        if message.role == "tool":
            rendered["tool_call_id"] = _answered(waiting, message, f"messages[{place}]")
        found.append(rendered)
    return found


def _content(text: str | None, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    if not images:
        return text or ""
    urls = (each if each.startswith("data:") else data_url("", each) for each in images)
    pictures = [picture_part(url) for url in urls]
    return [*pictures, {"type": "text", "text": text}] if text else pictures


def _answered(waiting: deque[tuple[str, str]], message: OllamaMessage, where: str) -> str:
    for each in waiting:
        if message.tool_name in (None, "", each[1]):
            waiting.remove(each)
            return each[0]
    raise RequestRejected(f"{where}: no earlier call of a tool waits for this result", param=where)
