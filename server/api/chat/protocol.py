"""The body of POST /v1/chat/completions as OpenAI documents it, with extensions of other local servers."""

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from server.api.chat.tool_protocol import CallId, ToolCalls, ToolChoice, Tools
from server.edge.refusals import EMPTY, OFF, REFUSED_OF_OPENAI, REFUSED_OF_OTHER_SERVERS, Hint
from server.edge.wire_model import WireModel, shown_as, text_or_list
from server.reply.generate.protocol import (
    INT32_MAX,
    GenerationFields,
    NumLogprobs,
    NumTokens,
    ReasoningEffort,
    TemplateKwargs,
    Text,
)
from server.reply.pictures.media_parts import ContentPart

MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 1024
THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
"""Names of the variable that turns reasoning off and on, in Qwen's and DeepSeek's templates."""
_ALSO_WRITTEN: Final = {
    "enable_thinking": (("thinking", "type"), ("reasoning", "enabled")),
    "thinking_token_budget": (("thinking", "budget_tokens"), ("reasoning", "max_tokens")),
}
"""Parts of fields of other servers that stand for one of ours."""
_NO_TOOL_CHOICE: Final = ("none", "auto")

_CHAT_ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "audio": (),
    "function_call": _NO_TOOL_CHOICE,
    "functions": EMPTY,
    "modalities": (["text"],),
    "verbosity": Hint(("medium",)),
    "web_search_options": (),
}
CHAT_REFUSALS: Final = {
    **REFUSED_OF_OPENAI,
    **_CHAT_ONLY,
    **{name: none for name, none in REFUSED_OF_OTHER_SERVERS.items() if name != "thinking_token_budget"},
    "add_special_tokens": OFF,
    "best_of": (1,),
}
"""Fields refused by name, unless set to one of these values, or to null."""


_as_parts = text_or_list("content parts", lambda text: {"type": "text", "text": text})
_ContentShapes = Text | Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_CONTENT_PARTS)]
_Content = Annotated[
    list[ContentPart],
    Field(min_length=1, max_length=MAX_CONTENT_PARTS, fail_fast=True),
    BeforeValidator(_as_parts, json_schema_input_type=_ContentShapes),
]


class ChatMessage(WireModel):
    role: Annotated[str, StringConstraints(max_length=64)]
    """system, developer (the same), user, assistant or tool."""
    content: _Content | None = None
    name: Annotated[str, StringConstraints(max_length=64)] | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: CallId | None = None
    """The call that a message with role tool answers."""
    refusal: Text | None = None
    """The text of an assistant that refused to answer."""
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    """The newer name of reasoning_content. Whether the model sees it again, its chat template decides."""
    # Refused by name if they are set.
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


class Prediction(WireModel):
    """Text that the client expects: a hint for speed, without an effect on what is generated."""

    type: Literal["content"]
    content: _Content


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ThinkingSwitch(WireModel):
    """DeepSeek's, GLM's and Kimi's switch of reasoning."""

    type: Annotated[str, StringConstraints(max_length=64)] | None = None
    """`enabled` or `disabled`; any other word leaves it to the template."""
    budget_tokens: NumTokens | None = None


class ReasoningSwitch(WireModel):
    """OpenRouter's options of reasoning."""

    effort: ReasoningEffort | None = None
    enabled: bool | None = None
    max_tokens: NumTokens | None = None
    exclude: bool | None = None
    """The reply does not show it."""


class ReasoningFields(WireModel):
    """Fields that turn reasoning on, off and down, in the words of several servers."""

    thinking: ThinkingSwitch | None = None
    reasoning: ReasoningSwitch | None = None
    enable_thinking: bool | None = None
    """Sets the variable that turns reasoning on and off, for a template that reads one."""
    reasoning_effort: ReasoningEffort | None = None
    """Read by some templates; none and minimal also switch thinking off where a template has a switch."""

    @model_validator(mode="before")
    @classmethod
    def _in_our_words(cls, body: Any) -> Any:
        """Add the fields that mean the same as those of other servers; a field that is given wins."""
        if not isinstance(body, dict):
            return body
        thinking, reasoning = (
            given if isinstance(given := body.get(name), dict) else {} for name in ("thinking", "reasoning")
        )
        kind = thinking.get("type")
        ours = {
            "enable_thinking": kind == "enabled"
            if kind in ("enabled", "disabled")
            else reasoning.get("enabled"),
            "thinking_token_budget": thinking.get("budget_tokens") or reasoning.get("max_tokens"),
            "reasoning_effort": reasoning.get("effort"),
            "include_reasoning": False if reasoning.get("exclude") is True else None,
        }
        known = {
            name: value for name, value in ours.items() if name in cls.model_fields and value is not None
        }
        return {**known, **body}

    def as_written(self, name: str) -> str:
        """Return the field that the caller wrote for one of ours, which may be this one."""
        for field, part in _ALSO_WRITTEN[name]:
            if getattr(getattr(self, field), part, None) is not None:
                return f"{field}.{part}"
        return name


class ChatCompletionRequest(ReasoningFields, GenerationFields):
    """The body of POST /v1/chat/completions."""

    model_config = shown_as(
        messages=[{"role": "user", "content": "What is the capital of France?"}], max_completion_tokens=60
    )

    messages: Messages
    max_completion_tokens: NumTokens | None = None
    """The newer name of max_tokens; one of the two, or both alike."""
    prediction: Prediction | None = None
    """Verified several tokens at a time as far as the reply goes the same way; usage counts both kinds."""
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Go on with the last message instead of answering it."""
    echo: bool | None = None
    """Begin the reply with the last message, if that is the assistant's."""
    chat_template_kwargs: TemplateKwargs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    """`auto` where there are tools. For a required or named call, a grammar keeps to the schemas."""
    parallel_tool_calls: bool | None = None
    """Off: one call at most."""
    include_reasoning: bool | None = None
    """Off: reasoning is counted, but not shown."""
    thinking_token_budget: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """Tokens of thoughts after which the answer begins, where the mark that ends them is one token."""
