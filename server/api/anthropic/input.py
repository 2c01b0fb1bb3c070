"""A conversation in Anthropic's words to the chat request that means the same.

Owns: the chat message for each kind of block, and the names under which errors of the chat path reach the
caller of /v1/messages.
"""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import orjson

from server.api.anthropic.client_tools import described, is_others_work, is_run_by_others
from server.api.anthropic.protocol import (
    AnthropicBlock,
    AnthropicSource,
    AnthropicTool,
    AnthropicToolChoice,
    CountTokensRequest,
    MessagesRequest,
)
from server.api.chat.protocol import ChatCompletionRequest
from server.api.chat.tool_protocol import chat_call, refuse_other_fields
from server.edge.http.json_body import built, without_nones
from server.edge.refusals import in_words, required, unsupported
from server.reply.generate.protocol import SamplingFields
from server.reply.pictures.media_parts import data_url, picture_part

_PASSED_ON: Final = frozenset(SamplingFields.model_fields) - {"metadata"}
_PLACE: Final = r"\bmessages\[\d+\](?:\.(?:content|tool_calls)\[\d+\])?"
_UNMARKED: Final = ("thinking", "tool_use")
_TOOL_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_NAMES: Final = (
    (r"\.function\.parameters", ".input_schema"),
    (r"\.function\b", ""),
    (r"\.image_url\b", ".source"),
    (r"\.tool_call_id\b", ".tool_use_id"),
    (r"\.tool_calls\b", ".content of type tool_use"),
    ("max_completion_tokens", "max_tokens"),
    (r"response_format(?:\.json_schema(?=\.schema))?", "output_config.format"),
    ("tool_choice required, or name a function", "tool_choice any or tool"),
)
"""The chat path's words to Anthropic's."""


def chat_request_of(body: CountTokensRequest) -> ChatCompletionRequest:
    """Build the chat request. Raises RequestRejected."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in _PASSED_ON}
    fields["messages"] = _Conversation(body).messages
    if isinstance(body, MessagesRequest):
        fields |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences}
    if body.messages[-1].role == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    tools = body.tools or ()
    fields["tools"] = [_tool(tools[place], f"tools[{place}]") for place in _own_tools(body)] or None
    if body.tool_choice is not None:
        fields |= _tool_choice(body.tool_choice)
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
    if (thinking := body.thinking) is not None:
        fields["thinking"] = {"type": thinking.type, "budget_tokens": thinking.budget_tokens}
        fields["include_reasoning"] = thinking.display != "omitted"
        if thinking.type == "disabled":
            fields["reasoning_effort"] = "none"
    if body.output_config is not None and body.output_config.format is not None:
        schema = body.output_config.format.schema_
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "reply", "schema": schema},
        }
    with in_their_words(body):
        return built(ChatCompletionRequest, fields)


def ignored_names(body: CountTokensRequest) -> list[str]:
    """Names of what is left out of a request: tools and blocks of others' work, marks that have no effect."""
    tools = (f"tools.{tool.type}" for tool in body.tools or () if is_run_by_others(tool.type or ""))
    blocks = [block for turn in body.messages for block in turn.content]
    works = (f"messages.{block.type}" for block in blocks if is_others_work(block.type))
    marked = (block.type for block in blocks if block.cache_control is not None and block.type in _UNMARKED)
    return [*tools, *works, *(f"messages.{kind}.cache_control" for kind in marked)]


def in_their_words(body: CountTokensRequest) -> AbstractContextManager[None]:
    """Make refusals of the chat path name the fields that the caller wrote."""

    def tool(found: re.Match[str]) -> str:
        return f"tools[{_own_tools(body)[int(found[1])]}]"

    def message(found: re.Match[str]) -> str:
        return _Conversation(body).places.get(found[0], found[0])

    return in_words((r"^tools\[(\d+)\]", tool), (_PLACE, message), *_NAMES)


def _own_tools(body: CountTokensRequest) -> list[int]:
    """Places of the tools that the model is shown."""
    return [place for place, tool in enumerate(body.tools or ()) if not is_run_by_others(tool.type or "")]


class _Conversation:
    """Messages of a chat, and the places in them, each with the one that the caller wrote.

    Results of tools are messages of their own, in the order of the blocks. Work of others is left out.
    """

    def __init__(self, body: CountTokensRequest) -> None:
        """Raises RequestRejected."""
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}
        if body.system is not None:
            self._add_turn("system", "system", body.system, "system")
            if body.system and any(tool.cache_control is not None for tool in body.tools or ()):
                self.messages[0]["content"][-1]["cache_control"] = {}  # templates write tools there
        for place, turn in enumerate(body.messages):
            where = f"messages[{place}]"
            self._add_turn(turn.role, where, turn.content, f"{where}.content")
        for message in self.messages:  # one that has said nothing
            if "content" not in message and "tool_calls" not in message:
                message["content"] = ""

    def _add_turn(self, role: str, where: str, blocks: Sequence[AnthropicBlock], places: str) -> None:
        self._begin(role, where)
        for place, block in enumerate(blocks):
            at = f"{places}[{place}]"
            if role == "assistant":
                self._add_block(block, at)
            elif role == "user" and block.type == "tool_result":
                self._add_result(block, at)
            elif role == "system" or not is_others_work(block.type):
                if self.messages[-1]["role"] != role:
                    self._begin(role, where)
                self._put("content", _part(block, at) if role == "user" else _text_part(block, at), at)

    def _begin(self, role: str, where: str) -> None:
        self.places[f"messages[{len(self.messages)}]"] = where
        self.messages.append({"role": role})

    def _put(self, name: str, item: dict[str, Any], at: str) -> None:
        """Put a part or a call into the last message."""
        items = self.messages[-1].setdefault(name, [])
        self.places[f"messages[{len(self.messages) - 1}].{name}[{len(items)}]"] = at
        items.append(item)

    def _add_block(self, block: AnthropicBlock, at: str) -> None:
        """Add a block of the assistant."""
        message = self.messages[-1]
        match block.type:
            case "thinking":
                thoughts = (message.get("reasoning_content"), required(block.thinking, f"{at}.thinking"))
                message["reasoning_content"] = "\n".join(filter(None, thoughts))
            case "tool_use":
                self._put("tool_calls", _call(block, at), at)
            case kind if not is_others_work(kind):
                self._put("content", _text_part(block, at), at)

    def _add_result(self, block: AnthropicBlock, at: str) -> None:
        if self.messages[-1] == {"role": "user"}:
            self.messages.pop()
        self._begin("tool", at)
        message = self.messages[-1]
        message["tool_call_id"] = required(block.tool_use_id, f"{at}.tool_use_id")
        for place, inner in enumerate(block.content or ()):
            self._put("content", _part(inner, f"{at}.content[{place}]"), f"{at}.content[{place}]")
        if block.is_error:  # a template has no place for the mark of a failure: the word is for the model
            parts = message.setdefault("content", [])
            text = next((part for part in parts if part["type"] == "text"), None)
            if text is None:  # behind the others, which keep their places
                parts.append(text := {"type": "text", "text": ""})
            text["text"] = f"Error: {text['text']}"
        if "content" in message and block.cache_control is not None:
            message["content"][-1]["cache_control"] = block.cache_control


def _call(block: AnthropicBlock, at: str) -> dict[str, Any]:
    call_id, name = required(block.id, f"{at}.id"), required(block.name, f"{at}.name")
    return chat_call(call_id, name, orjson.dumps(block.input or {}).decode())


def _texts(blocks: Sequence[AnthropicBlock], where: str) -> list[str]:
    return [_plain_text(block, f"{where}[{place}]") for place, block in enumerate(blocks)]


def _text_part(block: AnthropicBlock, at: str) -> dict[str, Any]:
    return {"type": "text", "text": _text(block, at), "cache_control": block.cache_control}


def _part(block: AnthropicBlock, at: str) -> dict[str, Any]:
    if block.type != "image":
        return _text_part(block, at)
    picture = _picture(required(block.source, f"{at}.source"), f"{at}.source")
    return {**picture, "cache_control": block.cache_control}


def _picture(source: AnthropicSource, at: str) -> dict[str, Any]:
    if source.type == "base64":
        return picture_part(data_url(source.media_type or "", required(source.data, f"{at}.data")))
    if source.type == "url":
        return picture_part(required(source.url, f"{at}.url"))
    raise unsupported(f"{at}.type", f"{at}: pictures are of type base64 or url, not {source.type!r}")


def _text(block: AnthropicBlock, at: str) -> str:
    match block.type:
        case "tool_reference":
            return required(block.tool_name, f"{at}.tool_name")
        case "document":
            text = _document(required(block.source, f"{at}.source"), f"{at}.source")
            return "\n".join(filter(None, (block.title, block.context, text)))
        case "search_result":
            source = block.source.data if block.source is not None else None
            text = "\n".join(_texts(required(block.content, f"{at}.content"), f"{at}.content"))
            return "\n".join(filter(None, (block.title, source, text)))
    return _plain_text(block, at)


def _plain_text(block: AnthropicBlock, at: str) -> str:
    if block.type != "text":
        raise unsupported(
            f"{at}.type",
            f"{at}: content blocks of type {block.type!r} are not supported here; use text, image, document,"
            " thinking, tool_use or tool_result, each in its place",
        )
    return required(block.text, f"{at}.text")


def _document(source: AnthropicSource, at: str) -> str:
    if source.type == "content":
        return "\n".join(_texts(required(source.content, f"{at}.content"), f"{at}.content"))
    if source.type != "text":
        raise unsupported(f"{at}.type", f"{at}: documents must be text, not of type {source.type!r}")
    return required(source.data, f"{at}.data")


def _tool(tool: AnthropicTool, where: str) -> dict[str, Any]:
    """The function that the model sees. `where`: its place among those of the chat."""
    kind = tool.type or "custom"
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    if kind != "custom":
        of_callers = described(kind)
        if of_callers is None:
            raise unsupported(
                f"{where}.type", f"{where}: tools of type {kind!r} are not supported; use tools of your own"
            )
        function = {"name": tool.name, **of_callers}
    return {"type": "function", "function": without_nones(function)}


def _tool_choice(choice: AnthropicToolChoice) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    everywhere = ("disable_parallel_tool_use",)
    kinds = {**dict.fromkeys(_TOOL_CHOICES, everywhere), "tool": ("name", *everywhere)}
    refuse_other_fields(choice, kinds)
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if choice.type != "tool":
        return {**fields, "tool_choice": _TOOL_CHOICES[choice.type]}
    name = required(choice.name, "tool_choice.name")
    return {**fields, "tool_choice": {"type": "function", "function": {"name": name}}}
