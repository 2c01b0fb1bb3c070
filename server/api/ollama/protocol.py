"""The bodies of /api/chat, /api/generate and /api/show, as Ollama documents them.

Source: Ollama's page of its API.
"""

import re
from math import inf
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from engine.errors import RequestRejected
from server.api.chat.protocol import MAX_MESSAGES
from server.api.chat.tool_protocol import MAX_TOOLS, FunctionName, Tools
from server.edge.wire_model import WireModel, shown_as, wrong_shape
from server.reply.generate.protocol import (
    INT32_MAX,
    RepetitionPenalty,
    SamplingNumbers,
    ServiceFields,
    Stop,
    Text,
)
from server.reply.generate.structured_output import Schema

TURN_REFUSALS: Final[dict[str, tuple[Any, ...]]] = {"logprobs": (False,), "top_logprobs": (0,)}
PROMPT_REFUSALS: Final[dict[str, tuple[Any, ...]]] = {
    **TURN_REFUSALS,
    "context": ([],),
    "template": ("",),
}
"""Fields refused by name, unless set to one of these values, or to null."""
_EFFORTS: Final = ("low", "medium", "high", "max")


def _as_format(value: Any) -> Any:
    """`json` is any object; a schema stands for itself."""
    if value == "json":
        return {"type": "object"}
    if value == "":
        return None
    if isinstance(value, dict):
        return value
    raise wrong_shape("must be 'json' or a JSON schema")


def _check_think(value: Any) -> Any:
    if isinstance(value, bool) or value in _EFFORTS:
        return value
    raise wrong_shape(f"must be true, false, or one of {', '.join(_EFFORTS)}")


_ShortText = Annotated[str, StringConstraints(max_length=256)]
_Format = Annotated[
    Schema | None, BeforeValidator(_as_format, json_schema_input_type=_ShortText | Schema | None)
]
_Think = Annotated[bool | _ShortText, BeforeValidator(_check_think)]
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h)")


def keep_alive_s(value: str | float | None) -> float | None:
    """Read how long a model stays idle: seconds, or `5m` and `1h30m`; below 0 is for ever. None: not said.

    Raises RequestRejected.
    """
    if isinstance(value, str):
        parts = _DURATION.findall(value)
        if parts and "".join(map("".join, parts)) == value:
            return sum(float(number) * _SECONDS[unit] for number, unit in parts)
        if not re.fullmatch(r"-?\d{1,9}(\.\d{1,9})?(ms|s|m|h)?", value):
            raise RequestRejected("keep_alive must be seconds, or a time such as 5m", param="keep_alive")
        value = float(value.rstrip("msh"))
    return inf if value is not None and value < 0 else value


KeepAlive = Annotated[str, StringConstraints(max_length=64)] | Annotated[float, Field(ge=-1e9, le=1e9)]


_Images = Annotated[list[Text], Field(max_length=MAX_TOOLS)]
"""Pictures, in base64, which stand before the text."""


class OllamaOptions(SamplingNumbers):
    """Sampling options; others of Ollama's, such as num_ctx, set up its own engine and are ignored."""

    repeat_penalty: RepetitionPenalty | None = None
    stop: Stop | None = None
    num_predict: Annotated[int, Field(ge=-2, le=INT32_MAX)] | None = None
    """Tokens of the reply; below 1: what the context window leaves."""

    @model_validator(mode="before")
    @classmethod
    def _with_whole_numbers(cls, value: Any) -> Any:
        """Take 5.0 for 5, as Ollama does; a number of more digits than a float has stays what it is."""
        if not isinstance(value, dict):
            return value
        floats = {name: each for name, each in value.items() if isinstance(each, float)}
        whole = {name: int(each) for name, each in floats.items() if each % 1 == 0 and abs(each) < 2**53}
        return {**value, **whole}


class OllamaFunctionCall(WireModel):
    name: FunctionName
    arguments: Annotated[dict[str, Any], Field(max_length=1024)] | None = None


class OllamaToolCall(WireModel):
    function: OllamaFunctionCall


class OllamaMessage(WireModel):
    role: _ShortText
    content: Text | None = None
    thinking: Text | None = None
    tool_calls: Annotated[list[OllamaToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_name: _ShortText | None = None
    images: _Images | None = None


class OllamaFields(ServiceFields):
    """Fields of both endpoints."""

    format: _Format | None = None
    options: OllamaOptions | None = None
    stream: bool | None = None
    """On if absent."""
    think: _Think | None = None
    keep_alive: KeepAlive | None = None
    """Time for which a model that comes and goes stays idle, at most as long as its entry says."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be generated."""
        raise NotImplementedError

    @property
    def needs_model(self) -> bool:
        """False for a request that only asks for the model to leave. Raises RequestRejected."""
        return not self.is_empty or keep_alive_s(self.keep_alive) != 0

    @property
    def streams_events(self) -> bool:
        """False: lines of JSON have no comments."""
        return False


class OllamaChatRequest(OllamaFields):
    """The body of POST /api/chat."""

    model_config = shown_as(messages=[{"role": "user", "content": "Hello!"}], stream=False)

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """Absent or empty: the reply says that the model is loaded; with `keep_alive` 0, that it leaves."""
    tools: Tools | None = None

    @property
    def is_empty(self) -> bool:
        return not self.messages


class OllamaGenerateRequest(OllamaFields):
    """The body of POST /api/generate: one turn, by the chat template unless `raw` or `suffix` is set."""

    model_config = shown_as(prompt="Hello!", stream=False)

    prompt: Text | None = None
    """Absent or empty: the reply says that the model is loaded; with `keep_alive` 0, that it leaves."""
    system: Text | None = None
    images: _Images | None = None
    raw: bool | None = None
    """On: the prompt is gone on with as it is, without the chat template."""
    suffix: Text | None = None
    """Text after the one to be generated; for models that were trained to fill holes."""

    @property
    def is_empty(self) -> bool:
        return not self.prompt


class OllamaShowRequest(WireModel):
    """The body of POST /api/show."""

    model: _ShortText | None = None
    name: _ShortText | None = None
    """The older name of `model`."""
    verbose: bool | None = None
    """Without effect."""
