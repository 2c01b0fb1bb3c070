"""Items of a conversation to the chat request that means the same.

Owns: the chat message for each kind of item, the turns that may be left out, and the names under which
errors of the chat path reach the caller of /v1/responses.
"""

import asyncio
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from engine.errors import RequestRejected
from server.api.chat.protocol import CHAT_REFUSALS, ChatCompletionRequest
from server.api.chat.tool_protocol import refuse_other_fields
from server.api.responses.protocol import (
    LOGPROBS_INCLUDE,
    PASSED_ON,
    ChosenTool,
    InputItem,
    ItemPart,
    ResponsesRequest,
    ResponseToolChoice,
    TextFormat,
    is_left_out,
)
from server.api.responses.tools import Toolbox, WireForm, call_of
from server.edge.http.json_body import built, without_nones
from server.edge.refusals import in_words, refuse_unsupported, required, unsupported
from server.reply.pictures.media_parts import ContentPart, picture_part, refuse_part

_MAX_INLINE_PARTS: Final = 1024
"""More are converted in a thread, so that other streams go on meanwhile: 4096 took 60 ms."""
_ROLES: Final = ("user", "assistant", "system", "developer")
_INSTRUCTING_ROLES: Final = ("system", "developer")
_AFTER_REASONING: Final = ("content", "tool_calls")
_ALL_OF_A_TURN: Final = ("reasoning_content", *_AFTER_REASONING)
"""The parts of a message in their order: reasoning, text, calls. Each is an item of its own."""
_OUTPUTS: Final = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_FIELDS_OF_CHOICES: Final = {
    **dict.fromkeys(("function", "custom"), ("name", "namespace")),
    "allowed_tools": ("mode", "tools"),
}
_INCLUDES: Final = (LOGPROBS_INCLUDE, "reasoning.encrypted_content")
_TEXT_PARTS: Final = ("input_text", "output_text", "text")

_NAMES: Final = (
    # Items are numbered differently: the place says nothing here. "messages" is also a word.
    (r"^messages(?=$|:)|\bmessages\[\d+\][\w.\[\]]*", "input"),
    (r"(?<=tool_choice)\.(?:function|allowed_tools)|(?<=\])\.function\b", ""),
    ("max_completion_tokens", "max_output_tokens"),
    (r"response_format(?:\.json_schema)?", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("use text or image_url", "use input_text or input_image"),
)
"""The chat path's names of fields to ours."""


async def chat_of(
    body: ResponsesRequest, items: Sequence[InputItem], tools: Toolbox
) -> ChatCompletionRequest:
    """Build the chat request, in a thread where that takes long. Raises what `chat_request_of` raises."""
    if num_parts(items) > _MAX_INLINE_PARTS:
        return await asyncio.to_thread(chat_request_of, body, items, tools)
    return chat_request_of(body, items, tools)


def chat_request_of(
    body: ResponsesRequest, items: Sequence[InputItem], tools: Toolbox
) -> ChatCompletionRequest:
    """Build the chat request of the whole conversation, `items`; of `body` all the rest counts.

    Raises RequestRejected, in part in the words of a chat (`in_our_words`).
    """
    fields: dict[str, Any] = {name: getattr(body, name) for name in PASSED_ON}
    fields["messages"] = _messages(body, items, tools)
    fields["max_completion_tokens"] = body.max_output_tokens
    if wants_logprobs(body):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.text is not None and body.text.format is not None and body.text.format.type != "text":
        fields["response_format"] = _response_format(body.text.format)
    if tools.tools:
        shown = [tool.function for tool in tools.tools.values()]
        fields["tools"] = [{"type": "function", "function": function} for function in shown]
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    if body.tool_choice is not None and (tools.tools or body.tool_choice.type not in ("none", "auto")):
        fields["tool_choice"] = _tool_choice(body.tool_choice, tools)
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    refuse_unsupported(fields, CHAT_REFUSALS)
    return built(ChatCompletionRequest, fields)


def ignored_names(body: ResponsesRequest, tools: Toolbox) -> list[str]:
    """Names of what is left out of a request: tools and items of others' work, and hints within fields."""
    names = [f"tools.{kind}" for kind in tools.left_out]
    names += [f"input.{item.type}" for item in body.input if is_left_out(item.type)]
    names += ["input.encrypted_content" for item in body.input if item.encrypted_content is not None]
    names += [f"include.{name}" for name in body.include or () if name not in _INCLUDES]
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        names.append("text.verbosity")
    return names


def said_item(item: dict[str, Any]) -> InputItem:
    """An item of a response's output, as input of the next. Never refused: a model keeps to no bounds."""
    parts = [
        ItemPart.model_construct(type=part["type"], text=part["text"]) for part in item.get("content") or ()
    ]
    names = ("type", "id", "status", "role", "call_id", "name", "namespace", "arguments", "input", "action")
    return InputItem.model_construct(
        content=parts or None, **{name: item[name] for name in names if name in item}
    )


def wants_logprobs(body: ResponsesRequest) -> bool:
    return LOGPROBS_INCLUDE in (body.include or ()) or bool(body.top_logprobs)


def turns(items: Sequence[InputItem]) -> list[int]:
    """Places where the conversation can be cut: each message of the user.

    A template, and the answer to a function call, need what came before them in their turn.
    """
    return [place for place, item in enumerate(items) if _is_message(item) and item.role == "user"]


def cut_before(items: Sequence[InputItem], place: int) -> tuple[InputItem, ...]:
    """The conversation from `place` on, with the system messages that stand before it."""
    return (*(item for item in items[:place] if _is_instructing(item)), *items[place:])


def num_parts(items: Sequence[InputItem]) -> int:
    """Number of parts, with which the work on the items grows."""
    return sum(1 + len(item.content or ()) + len(item.output or ()) for item in items)


def in_our_words(tools: Toolbox) -> AbstractContextManager[None]:
    """Make refusals of the chat path name the fields of the response."""

    def place_of(found: re.Match[str]) -> str:
        return list(tools.tools.values())[int(found[1])].place

    return in_words((r"^tools\[(\d+)\](?:\.function)?", place_of), *_NAMES)


def _messages(body: ResponsesRequest, items: Sequence[InputItem], tools: Toolbox) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    num_earlier = len(items) - len(body.input)
    for place, item in enumerate(items):
        where = f"input[{place - num_earlier}]" if place >= num_earlier else "input"
        _append(messages, item, tools, where)
    for message in messages:  # a turn of reasoning alone has said nothing
        if "content" not in message and "tool_calls" not in message:
            message["content"] = ""
    return messages


def _append(messages: list[dict[str, Any]], item: InputItem, tools: Toolbox, where: str) -> None:
    if _is_message(item):
        if item.role not in _ROLES:
            raise unsupported(f"{where}.role", f"the role must be one of {', '.join(_ROLES)}")
        content = _chat_parts(item.content, f"{where}.content") or ""
        if item.role == "assistant":
            _assistant_turn(messages, before=_AFTER_REASONING)["content"] = content
        else:
            messages.append({"role": item.role, "content": content})
    elif item.type == "reasoning":
        text = "\n".join(part.text or "" for part in (*(item.summary or ()), *(item.content or ())))
        if text:
            _assistant_turn(messages, before=_ALL_OF_A_TURN)["reasoning_content"] = text
    elif item.type in tuple(WireForm):
        calls = _assistant_turn(messages, before=()).setdefault("tool_calls", [])
        calls.append(call_of(item, tools, where))
    elif item.type in _OUTPUTS:
        of_shell = item.id if item.type == "local_shell_call_output" else None
        call_id = required(item.call_id or of_shell, f"{where}.call_id")
        content = _chat_parts(item.output, f"{where}.output") or ""
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    elif item.type != "additional_tools" and not is_left_out(item.type):
        raise unsupported(
            f"{where}.type",
            f"items of type {item.type!r} are not supported; use message, function_call,"
            " function_call_output or reasoning",
        )


def _assistant_turn(messages: list[dict[str, Any]], *, before: Sequence[str]) -> dict[str, Any]:
    """The message under way, or a new one if it is past this point already."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in before):
        messages.append({"role": "assistant"})
    return messages[-1]


def _is_message(item: InputItem) -> bool:
    return item.type == "message" or (item.type is None and item.role is not None)


def _is_instructing(item: InputItem) -> bool:
    return _is_message(item) and item.role in _INSTRUCTING_ROLES


def has_pictures(items: Sequence[InputItem]) -> bool:
    parts = (part for item in items for part in (*(item.content or ()), *(item.output or ())))
    return any(part.type == "input_image" for part in parts)


def _chat_parts(parts: Sequence[ItemPart] | None, where: str) -> list[dict[str, Any]]:
    return [_chat_part(part, f"{where}[{place}]") for place, part in enumerate(required(parts, where))]


def _chat_part(part: ItemPart, where: str) -> dict[str, Any]:
    if part.type == "input_image":
        detail = "low" if part.detail == "low" else "auto"
        return picture_part(required(part.image_url, f"{where}.image_url"), detail)
    if part.type == "refusal":
        return {"type": "text", "text": required(part.refusal, f"{where}.refusal")}
    if part.type not in _TEXT_PARTS:
        raise refuse_part(ContentPart.model_construct(type=part.type), where)
    return {"type": "text", "text": required(part.text, f"{where}.text")}


def _response_format(asked: TextFormat) -> dict[str, Any]:
    if asked.type != "json_schema":
        return {"type": asked.type}
    described = {
        "name": asked.name or "response",
        "description": asked.description,
        "schema": required(asked.json_schema, "text.format.schema"),
        "strict": asked.strict,
    }
    return {"type": "json_schema", "json_schema": without_nones(described)}


def _tool_choice(
    choice: ResponseToolChoice | ChosenTool, tools: Toolbox, at: str = "tool_choice"
) -> str | dict[str, Any]:
    refuse_other_fields(choice, _FIELDS_OF_CHOICES)
    if isinstance(choice, ResponseToolChoice) and choice.type == "allowed_tools":
        mode, asked = required(choice.mode, "tool_choice.mode"), required(choice.tools, "tool_choice.tools")
        chosen = [_tool_choice(tool, tools, f"{at}.tools[{place}]") for place, tool in enumerate(asked)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}}
    if choice.type not in ("function", "custom"):
        return choice.type
    name = tools.shown(required(choice.name, "tool_choice.name"), choice.namespace)
    if name in tools.tools and (tools.tools[name].form is WireForm.CUSTOM) != (choice.type == "custom"):
        why = f"{at}.type: the tool {choice.name!r} is no tool of type {choice.type}"
        raise RequestRejected(why, param=f"{at}.type")
    return {"type": "function", "function": {"name": name}}
