"""A conversation in Anthropic's words to the chat request that means the same.

Owns: the chat message for each kind of block, and the names under which errors of the chat path reach the
caller of /v1/messages.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import orjson

from server.api.anthropic.client_tools import described, is_others_work, is_run_by_others
from server.api.anthropic.protocol import (
    AnthropicBlock,
    AnthropicSource,
    AnthropicTool,
    AnthropicToolChoice,
    AnthropicTurn,
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
    fields["messages"] = _messages(body)
    if isinstance(body, MessagesRequest):
        fields |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences}
    if body.messages[-1].role == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    tools = body.tools or ()
    fields["tools"] = [_tool(tools[place], f"tools[{place}]") for place in _own_tools(body)] or None
    choice = {} if body.tool_choice is None else _tool_choice(body.tool_choice)
    if fields["tools"]:
        fields |= choice
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
        return dict(_places(body)).get(found[0], found[0])

    return in_words((r"^tools\[(\d+)\]", tool), (_PLACE, message), *_NAMES)


def _places(body: CountTokensRequest) -> Iterator[tuple[str, str]]:
    """Places of the chat's messages, their parts and calls, each with the one that the caller wrote."""
    written: list[tuple[str, list[str], list[str]]] = []
    if body.system is not None:
        written.append(("system", _numbered("system", body.system), []))
    for place, turn in enumerate(body.messages):
        where = f"messages[{place}]"
        blocks = _numbered(f"{where}.content", turn.content)
        calls = [at for at, block in zip(blocks, turn.content, strict=True) if block.type == "tool_use"]
        for group in _groups(turn):
            at, parts = where, [blocks[number] for number in group]
            if group and turn.content[group[0]].type == "tool_result":
                at, parts = parts[0], _numbered(f"{parts[0]}.content", turn.content[group[0]].content or ())
            written.append((at, parts, calls))
    for number, (where, parts, calls) in enumerate(written):
        yield f"messages[{number}]", where
        yield from zip(_numbered(f"messages[{number}].content", parts), parts, strict=True)
        yield from zip(_numbered(f"messages[{number}].tool_calls", calls), calls, strict=True)


def _numbered(where: str, items: Sequence[object]) -> list[str]:
    return [f"{where}[{place}]" for place in range(len(items))]


def _own_tools(body: CountTokensRequest) -> list[int]:
    """Places of the tools that the model is shown."""
    return [place for place, tool in enumerate(body.tools or ()) if not is_run_by_others(tool.type or "")]


def _groups(turn: AnthropicTurn) -> list[list[int]]:
    """Places of the blocks of each message that a turn becomes, but for calls and thoughts.

    Results of tools are messages of their own, in the order of the blocks.
    """
    groups: list[list[int]] = [[]]
    for place, block in enumerate(turn.content):
        if block.type == "tool_result" and turn.role == "user":
            groups += [[place], []]
        elif not is_others_work(block.type) and (turn.role == "user" or block.type not in _UNMARKED):
            groups[-1].append(place)
    return [group for group in groups if group] or [[]]


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _text_parts(body.system, "system")})
        if messages[0]["content"] and any(tool.cache_control is not None for tool in body.tools or ()):
            messages[0]["content"][-1]["cache_control"] = {}  # templates write tools there
    for place, turn in enumerate(body.messages):
        where = f"messages[{place}].content"
        if turn.role == "assistant":
            messages.append(_assistant_message(turn, where))
        elif turn.role == "system":
            messages.append({"role": "system", "content": _text_parts(turn.content, where)})
        else:
            messages += _user_messages(turn, where)
    return messages


def _user_messages(turn: AnthropicTurn, where: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for group in _groups(turn):
        blocks = [(turn.content[place], f"{where}[{place}]") for place in group]
        if blocks and blocks[0][0].type == "tool_result":
            messages.append(_tool_message(*blocks[0]))
        else:
            messages.append({"role": "user", "content": [_part(*block) for block in blocks] or ""})
    return messages


def _tool_message(block: AnthropicBlock, at: str) -> dict[str, Any]:
    parts = [_part(inner, f"{at}.content[{place}]") for place, inner in enumerate(block.content or ())]
    call_id = required(block.tool_use_id, f"{at}.tool_use_id")
    if block.is_error:  # a template has no place for the mark of a failure: the word is for the model
        text = next((part for part in parts if part["type"] == "text"), None)
        if text is None:  # behind the others, which keep their places
            parts.append(text := {"type": "text", "text": ""})
        text["text"] = f"Error: {text['text']}"
    if parts and block.cache_control is not None:
        parts[-1]["cache_control"] = block.cache_control
    return {"role": "tool", "tool_call_id": call_id, "content": parts or ""}


def _assistant_message(turn: AnthropicTurn, where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(turn.content):
        at = f"{where}[{place}]"
        match block.type:
            case "thinking":
                thoughts.append(required(block.thinking, f"{at}.thinking"))
            case "tool_use":
                calls.append(_call(block, at))
            case kind if not is_others_work(kind):
                texts.append(_text_part(block, at))
    message: dict[str, Any] = {"role": "assistant"}
    if texts or not calls:
        message["content"] = texts or ""
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: AnthropicBlock, at: str) -> dict[str, Any]:
    call_id, name = required(block.id, f"{at}.id"), required(block.name, f"{at}.name")
    return chat_call(call_id, name, orjson.dumps(block.input or {}).decode())


def _texts(blocks: Sequence[AnthropicBlock], where: str) -> list[str]:
    return [_plain_text(block, f"{where}[{place}]") for place, block in enumerate(blocks)]


def _text_parts(blocks: Sequence[AnthropicBlock], where: str) -> str | list[dict[str, Any]]:
    """Return the content of a chat's message; no text is an empty one."""
    return [_text_part(block, f"{where}[{place}]") for place, block in enumerate(blocks)] or ""


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
