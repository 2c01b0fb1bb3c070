"""Requests to POST /v1/responses exactly as OpenAI documents them, as far as text goes.

Source: OpenAI's reference of the Responses API; the types of its Python SDK.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from server.api.chat.protocol import MAX_CONTENT_PARTS, MAX_MESSAGES
from server.api.chat.tool_protocol import MAX_TOOLS, as_choice
from server.edge.refusals import REFUSED_OF_OTHER_SERVERS, Hint
from server.edge.wire_model import WireModel, shown_as, text_or_list
from server.reply.generate.protocol import (
    INT32_MAX,
    MAX_LOGPROBS,
    WITHOUT_EFFECT,
    LogitBias,
    NumTokens,
    ReasoningEffort,
    SamplingFields,
    Stop,
    TemplateKwargs,
    Text,
)
from server.reply.generate.structured_output import StructuredOutputsField

MAX_INCLUDES = 16
_ELSEWHERE: Final = (
    *("web_search", "file_search", "code_interpreter", "image_generation"),
    *("computer", "mcp", "tool_search"),
)
"""Beginnings of the types of tools and items of others' work."""
LOGPROBS_INCLUDE: Final = "message.output_text.logprobs"

_Word = Annotated[str, StringConstraints(max_length=64)]
_ToolName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
_Id = Annotated[str, StringConstraints(min_length=1, max_length=128)]
_Summary = Literal["auto", "concise", "detailed"]


_as_parts = text_or_list("content parts", lambda text: {"type": "input_text", "text": text})


def runs_elsewhere(kind: str) -> bool:
    """True for the type of a tool, or of an item, whose work a provider, or a server of its choice, does."""
    return kind.startswith(_ELSEWHERE)


def is_left_out(kind: str | None) -> bool:
    """True for an item of work done elsewhere, and for a compaction, which only its author can read."""
    return kind is not None and (kind == "compaction" or runs_elsewhere(kind))


_as_items = text_or_list("items", lambda text: {"role": "user", "content": text}, is_left_out)


class ItemPart(WireModel):
    """A piece of an item's content."""

    type: _Word
    """input_text, input_image, output_text or text; summary_text and reasoning_text in a reasoning item."""
    text: Text | None = None
    refusal: Text | None = None
    image_url: Text | None = None
    """A picture as a data URL, or an address on one of the hosts that the server fetches from."""
    file_id: _Id | None = None
    """A picture that is a file of this key's."""
    detail: _Word | None = None
    """Detail of the picture: `low` reads it with few tokens."""


_PartList = Annotated[list[ItemPart], Field(max_length=MAX_CONTENT_PARTS, fail_fast=True)]
_Content = Annotated[_PartList, BeforeValidator(_as_parts, json_schema_input_type=Text | _PartList)]


class CustomFormat(WireModel):
    """The form of the text that a custom tool takes."""

    type: _Word
    syntax: _Word | None = None
    definition: Text | None = None
    """Shown to the model, which keeps to it by itself."""


class ResponseTool(WireModel):
    """A tool that the caller can run, or some other that is left out."""

    type: _Word
    """function, namespace (of functions), custom (with free text) or local_shell."""
    name: _ToolName | None = None
    description: Annotated[str, StringConstraints(max_length=16_384)] | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema; absent: no parameters."""
    strict: bool | None = None
    tools: Annotated[list["ResponseTool"], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Functions of a namespace."""
    format: CustomFormat | None = None


class InputItem(WireModel):
    """One step of a conversation. Which of the fields count, `type` says."""

    type: _Word | None = None
    """message (or absent), reasoning, additional_tools, a call (function_call, custom_tool_call,
    local_shell_call) or its output."""
    role: _Word | None = None
    """Role of a message: user, assistant, system or developer (the same)."""
    content: _Content | None = None
    call_id: _Id | None = None
    """Id that a function call shares with its output."""
    name: _ToolName | None = None
    """Name of the tool that is called."""
    namespace: _ToolName | None = None
    """Namespace of the function that is called."""
    arguments: Text | None = None
    """Arguments of the call, as JSON text."""
    input: Text | None = None
    """Text of the call of a custom tool."""
    action: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """Command of a call of the local shell."""
    output: _Content | None = None
    """Return value of the tool."""
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """More tools of the caller, from here on."""
    summary: _PartList | None = None
    """Summary of a reasoning item; its content is a field of its own."""
    encrypted_content: Text | None = None
    """Left out: only its author can read it."""

    # Fields that items of a reply have; nothing depends on them.
    id: Annotated[str, StringConstraints(max_length=128)] | None = None
    status: _Word | None = None
    phase: _Word | None = None


_ItemList = Annotated[list[InputItem], Field(max_length=MAX_MESSAGES, fail_fast=True)]
Input = Annotated[_ItemList, BeforeValidator(_as_items, json_schema_input_type=Text | _ItemList)]


class TextFormat(WireModel):
    """The shape of the reply's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: _Word | None = None
    description: Annotated[str, StringConstraints(max_length=4096)] | None = None
    # `schema` is a method of the base class, under which pydantic would hide the field.
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(WireModel):
    format: TextFormat | None = None
    verbosity: _Word | None = None
    """Without effect, and counted as such unless it is `medium`."""


class ReasoningOptions(WireModel):
    """Amount of reasoning before the reply."""

    effort: ReasoningEffort | None = None

    # Accepted without effect, since agents send them unasked: the reasoning is in the reply itself.
    summary: _Summary | None = None
    generate_summary: _Summary | None = None


class ChosenTool(WireModel):
    type: Literal["function", "custom"]
    name: _Word
    namespace: _ToolName | None = None


class ResponseToolChoice(WireModel):
    """A word stands for an object with nothing but that type."""

    type: Literal["none", "auto", "required", "function", "custom", "allowed_tools"]
    name: _Word | None = None
    """The tool to call; of function and custom."""
    namespace: _ToolName | None = None
    mode: Literal["auto", "required"] | None = None
    """Field of allowed_tools, as is `tools`."""
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] | None = (
        None
    )


_ToolChoiceShapes = Literal["none", "auto", "required"] | ResponseToolChoice
ToolChoice = Annotated[
    ResponseToolChoice, BeforeValidator(as_choice, json_schema_input_type=_ToolChoiceShapes)
]


class ResponsesRequest(SamplingFields):
    """The body of POST /v1/responses. Its metadata is returned with the response."""

    model_config = shown_as(input="Count from 3 to 8.", max_output_tokens=60)

    input: Input
    """A text, or the items of a conversation."""
    instructions: Text | None = None
    """A system message before the conversation. It is not carried over by previous_response_id."""
    previous_response_id: _Id | None = None
    """Continue a stored response: its input and output come before `input`."""
    store: bool | None = None
    """On by default, where the server has a store."""
    stream: bool | None = None
    background: bool | None = None
    """Answer at once, and make the response last in line; it is fetched, or followed, by its id."""
    max_output_tokens: NumTokens | None = None
    """Reasoning counts as well; absent: the rest of the context window."""
    truncation: Literal["auto", "disabled"] | None = None
    """auto: leave the oldest turns out until the rest fits the context window."""
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[_Word], Field(max_length=MAX_INCLUDES, fail_fast=True)] | None = None
    """Encrypted reasoning is accepted and not made: the reasoning itself is in the response. What else there
    is belongs to tools that are left out, and is counted as without effect."""
    enable_response_messages: bool | None = None
    """Return prompt and output as the model has them, as text and token ids."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Alternatives to each token; asks for logprobs by itself."""

    # As vLLM has them here too.
    logit_bias: LogitBias | None = None
    stop: Stop | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputsField | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    @property
    def default_priority(self) -> int:
        """The last place in line for a response in the background: no client waits for it."""
        return INT32_MAX if self.background else 0


PASSED_ON: Final = (
    *(name for name in SamplingFields.model_fields if name not in WITHOUT_EFFECT),
    "logit_bias",
    "stop",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "structured_outputs",
    "chat_template_kwargs",
)
"""Fields that mean for a response what they mean for a chat completion."""

_OFF: Final = (False,)

RESPONSES_REFUSALS: Final[dict[str, tuple[Any, ...]]] = {
    **REFUSED_OF_OTHER_SERVERS,
    "access_programs": (),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": Hint(),
    "moderation": (),
    "previous_input_messages": ([],),
    "previous_response": (),
    "prompt": (),
    "prompt_cache_options": Hint(),
    "service_tier": Hint(("auto", "default")),
    "stream_options": Hint(({}, {"include_obfuscation": False})),
    # Of the other endpoints: here they have other names, or no meaning.
    "functions": ([],),
    "logprobs": _OFF,
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": (),
    "n": (1,),
    "reasoning_effort": (),
    "response_format": (),
}
"""Fields refused by name, unless set to one of these values, or to null."""
