"""The body of POST /v1/messages and of /v1/messages/count_tokens, as Anthropic documents them.

Source: Anthropic's reference of the Messages API. Sampling fields of ours are understood as well.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from server.api.anthropic.client_tools import is_others_work
from server.api.chat.protocol import MAX_CONTENT_PARTS, MAX_MESSAGES
from server.api.chat.tool_protocol import MAX_TOOLS, ParametersSchema
from server.edge.refusals import Hint
from server.edge.wire_model import WireModel, shown_as, text_or_list
from server.reply.generate.protocol import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    NumTokens,
    SamplingFields,
    Text,
)

MAX_OPTION_KEYS = 16

MESSAGES_REFUSALS: Final[dict[str, tuple[Any, ...]]] = {
    "container": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_format": (),
    "service_tier": Hint(("auto", "standard_only")),
    "user_profile_id": (),
}
"""Fields refused by name, unless set to one of these values, or to null."""


_as_blocks = text_or_list("content blocks", lambda text: {"type": "text", "text": text}, is_others_work)
_ShortText = Annotated[str, StringConstraints(max_length=256)]
_Options = Annotated[dict[str, Any], Field(max_length=MAX_OPTION_KEYS)]


class AnthropicSource(WireModel):
    """The content of a document, or a picture."""

    type: _ShortText = ""
    """`text`, with `data`, or `content`, with blocks of text; `base64` or `url` of a picture."""
    data: Text | None = None
    media_type: _ShortText | None = None
    """Kind of a picture. Without effect: its first bytes say it."""
    url: Text | None = None
    content: "AnthropicBlocks | None" = None


def _as_source(value: Any) -> Any:
    """The source of a search result is a text, and says where it is from."""
    return {"type": "origin", "data": value} if isinstance(value, str) else value


class AnthropicBlock(WireModel):
    """A block of a message: text, image, document, search_result, thinking, tool_use or tool_result.

    A result has blocks of the first four within it, or tool_reference, a document and a search result texts.
    """

    type: _ShortText
    text: Text | None = None
    cache_control: _Options | None = None
    """Later prompts go on behind this block. Its keys have no effect."""
    source: (
        Annotated[AnthropicSource, BeforeValidator(_as_source, json_schema_input_type=Text | AnthropicSource)]
        | None
    ) = None
    title: Text | None = None
    context: Text | None = None
    """More about a document, which is no part of it."""
    thinking: Text | None = None
    signature: Text | None = None
    """Without effect: thinking is taken as it is."""
    id: _ShortText | None = None
    name: _ShortText | None = None
    tool_name: _ShortText | None = None
    """Name of a tool that a search has found (tool_reference): all tools are shown anyway."""
    input: Annotated[dict[str, Any], Field(max_length=1024)] | None = None
    tool_use_id: _ShortText | None = None
    content: "AnthropicBlocks | None" = None
    is_error: bool | None = None


_BlockShapes = Text | Annotated[list[AnthropicBlock], Field(max_length=MAX_CONTENT_PARTS)]
AnthropicBlocks = Annotated[
    list[AnthropicBlock],
    Field(max_length=MAX_CONTENT_PARTS, fail_fast=True),
    BeforeValidator(_as_blocks, json_schema_input_type=_BlockShapes),
]


class AnthropicTurn(WireModel):
    role: Literal["user", "assistant", "system"]
    content: AnthropicBlocks


class AnthropicTool(WireModel):
    type: _ShortText | None = None
    """`custom`, or absent, or one of Anthropic's that the caller runs: `bash_20250124`, say."""
    name: _ShortText
    description: Text | None = None
    input_schema: ParametersSchema | None = None
    strict: bool | None = None
    """Without effect: see FunctionDefinition."""
    cache_control: _Options | None = None


class AnthropicToolChoice(WireModel):
    type: Literal["auto", "any", "tool", "none"]
    name: _ShortText | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicThinking(WireModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: NumTokens | None = None
    """Tokens of thoughts after which the answer begins. They count towards max_tokens."""
    display: _ShortText | None = None
    """`omitted`: the reply has no block of thoughts. Any other word shows them."""


class AnthropicFormat(WireModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(max_length=4096, alias="schema")]


class AnthropicOutputConfig(WireModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnthropicFormat | None = None


class CountTokensRequest(SamplingFields):
    """The body of POST /v1/messages/count_tokens."""

    model_config = shown_as(messages=[{"role": "user", "content": "Hello!"}])

    messages: Annotated[list[AnthropicTurn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: AnthropicBlocks | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: AnthropicOutputConfig | None = None

    # Accepted without effect; the second asks for the end of the last message, which needs no mark.
    context_management: _Options | None = None
    cache_control: _Options | None = None


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    model_config = shown_as(messages=[{"role": "user", "content": "Hello!"}], max_tokens=60)

    max_tokens: NumTokens
    """Cut to the room that the context window leaves."""
    stop_sequences: (
        Annotated[
            list[Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]],
            Field(max_length=MAX_STOPS, fail_fast=True),
        ]
        | None
    ) = None
    stream: bool | None = None
