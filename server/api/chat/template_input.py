"""A chat request to the input of the chat template: messages, and the template's options.

Owns: the fields that each role may have, and the checks before a template is rendered.
Source: the shape of messages that `apply_chat_template` of Hugging Face transformers defines.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from engine.errors import RequestRejected
from engine.text.template_messages import Chat, FinalMessage
from engine.types import ModelInfo
from server.api.chat.protocol import THINKING_SWITCHES, ChatCompletionRequest, ChatMessage, Prediction
from server.api.chat.shown_tools import with_tools_shown
from server.api.chat.tool_use import ToolMode, ToolUse
from server.edge.refusals import required, unsupported
from server.reply.generate.model_checks import check_num_chars
from server.reply.pictures.media_parts import PICTURE, ContentPart, refuse_part

_ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_A_ROLE: Final = re.compile(r"[\w-]+")
_WRITTEN_ROLE: Final = re.compile(r"""(?:\{\{-?|[+~])\s*message(?:\.role|\[['"]role['"]\])""")
"""The role of a message as a part of a text, not of a comparison."""
_ONLY_OF: Final = {
    "tool_calls": "assistant",
    "refusal": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "tool_call_id": "tool",
}
"""Field to the one role that has it."""
_THOUGHTS: Final = "thinking"
"""Type of a part of an assistant's message."""
_NO_REASONING = ("none", "minimal")
"""Efforts that leave a model no time to think, where all it has is a switch."""


def template_input(body: ChatCompletionRequest, info: ModelInfo, tool_use: ToolUse) -> Chat:
    """Messages and variables, with the tools where this model is shown them. Raises RequestRejected."""
    for name in ("top_logprobs", "logprob_token_ids"):
        if getattr(body, name) and not body.logprobs:
            raise RequestRejected(f"{name} needs logprobs to be true", param=name)
    messages = template_messages(body.messages, info.chat_template)
    tools = tool_use.definitions
    final = _final(body)
    if tool_use.is_shown_in_messages:
        if tools or any(each["role"] == "tool" or each.get("tool_calls") for each in messages):
            messages = [_with_one_text(message) for message in messages]
        messages = with_tools_shown(messages, tools, is_forced=tool_use.mode is not ToolMode.AUTO)
    elif tools and tool_use.dialect is not None and tool_use.dialect.system_field:
        messages = _with_system_field(messages, tool_use.dialect.system_field, tools)
    num_chars = _num_chars(messages)
    check_num_chars(num_chars, info, param="messages")
    return Chat(
        messages=messages,
        tools=() if tool_use.is_shown_in_messages else tools,
        final=final,
        kwargs=dict(body.chat_template_kwargs or {}),
        hints={**info.template_kwargs_of(body.model), **_effort_hints(body)},
    )


def _final(body: ChatCompletionRequest) -> FinalMessage:
    """The end of the prompt. Raises RequestRejected."""
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestRejected(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    if body.continue_final_message:
        return FinalMessage.CONTINUE
    return FinalMessage.NOTHING if body.add_generation_prompt is False else FinalMessage.ANSWER


def predicted_text(prediction: Prediction, info: ModelInfo) -> str:
    """The text that the client expects. Raises RequestRejected."""
    param = "prediction.content"
    if not info.max_drafts:
        raise unsupported(
            "prediction",
            "prediction is not supported by this server: its steps verify no drafts (in pipelines, and for"
            " models without a paged KV cache); leave it out",
        )
    if any(part.type != "text" or part.text is None for part in prediction.content):
        raise RequestRejected(f"the parts of {param} must be text", param=param)
    text = "".join(part.text or "" for part in prediction.content)
    check_num_chars(len(text), info, param=param)
    return text


def turns_reasoning_off(chat: Chat) -> bool:
    """True if the template is asked for an answer without reasoning before it."""
    variables = {**chat.hints, **chat.kwargs}
    return any(variables.get(name) is False for name in THINKING_SWITCHES)


def _effort_hints(body: ChatCompletionRequest) -> dict[str, Any]:
    """Template variables for the effort and the switch of reasoning, which win over the server's own.

    Many clients send an effort unasked: no template must know it.
    """
    effort, switch = body.reasoning_effort, body.enable_thinking
    hints: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if switch is None and effort is not None:
        switch = effort not in _NO_REASONING
    has_switch = any(name in THINKING_SWITCHES for name in body.chat_template_kwargs or {})
    if switch is not None and not has_switch:
        hints |= dict.fromkeys(THINKING_SWITCHES, switch)
    return hints


def template_messages(messages: Sequence[ChatMessage], template: str) -> list[dict[str, Any]]:
    """Make the messages of a chat those that the template reads. Raises RequestRejected."""
    names: dict[str, str] = {}
    """Names of the functions that were called so far, by the id of the call."""
    rendered = []
    for index, message in enumerate(messages):
        rendered.append(_template_message(message, f"messages[{index}]", names, template))
        names |= {call.id: call.function.name for call in message.tool_calls or ()}
    return rendered


def _with_system_field(
    messages: list[dict[str, Any]], name: str, tools: tuple[dict[str, Any], ...]
) -> list[dict[str, Any]]:
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], name: text}, *messages[1:]]
    return [{"role": "system", "content": "", name: text}, *messages]


def _num_chars(messages: Sequence[dict[str, Any]]) -> int:
    """Characters of all texts that a template may write down."""
    return sum(
        sum(map(len, _texts(message)))
        + len(message.get("reasoning_content") or "")
        + sum(len(call["function"]["arguments"]) for call in message.get("tool_calls") or ())
        for message in messages
    )


def _template_message(
    message: ChatMessage, where: str, names: dict[str, str], template: str
) -> dict[str, Any]:
    role = _role(message, where, template)
    _check_fields(message, where)
    rendered: dict[str, Any] = {"role": role, "content": _content(message, where)}
    name = message.name
    if role == "tool":
        rendered["tool_call_id"] = required(message.tool_call_id, f"{where}.tool_call_id")
        name = name or names.get(rendered["tool_call_id"])
    if name is not None:
        rendered["name"] = name
    reasoning = message.reasoning_content or message.reasoning or _thoughts(message)
    if reasoning:
        # Both names that templates read: DeepSeek's and that of gpt-oss.
        rendered |= {"reasoning_content": reasoning, "thinking": reasoning}
    if message.tool_calls:
        rendered["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return rendered


def _thoughts(message: ChatMessage) -> str:
    """The text of the parts that are thoughts."""
    return "".join(part.thinking or "" for part in message.content or () if part.type == _THOUGHTS)


def _role(message: ChatMessage, where: str, template: str) -> str:
    """The role for the template. Of other roles it takes those that it names, or all if it writes any."""
    role = _ROLES.get(message.role)
    if role is None and _A_ROLE.fullmatch(message.role) and _takes(template, message.role):
        return message.role
    if role is None:
        instead = "tool" if message.role == "function" else "system, user, assistant or tool"
        raise unsupported(f"{where}.role", f"the role {message.role!r} is not supported; use {instead}")
    return role


@lru_cache(maxsize=256)
def _takes(template: str, role: str) -> bool:
    """Tell whether a template has this word in quotes, or writes roles as they are.

    Asked once for each of a request's messages.
    """
    return f"'{role}'" in template or f'"{role}"' in template or _WRITTEN_ROLE.search(template) is not None


def _check_fields(message: ChatMessage, where: str) -> None:
    for name in ("function_call", "audio"):
        if getattr(message, name):
            advice = "; use tool_calls" if name == "function_call" else ""
            text = f"{name} in a message is not supported by this server{advice}"
            raise unsupported(f"{where}.{name}", text)
    for name, role in _ONLY_OF.items():
        if getattr(message, name) and message.role != role:
            raise RequestRejected(
                f"{where}.{name} belongs to messages with the role {role}", param=f"{where}.{name}"
            )


def _content(message: ChatMessage, where: str) -> str | list[dict[str, str]] | None:
    """List the texts of a message, since some templates join them, or return its only one.

    None only in messages with calls. Results of tools are one text, unless they have pictures: few templates
    read others.
    """
    shown = [
        _shown_part(part, message.role, f"{where}.content[{place}]")
        for place, part in enumerate(message.content or ())
        if part.type != _THOUGHTS or message.role != "assistant"
    ]
    if message.refusal:
        shown.append({"type": "text", "text": message.refusal})
    texts = [part["text"] for part in shown if "text" in part]
    if len(texts) < len(shown) or (len(texts) > 1 and message.role != "tool"):
        return shown
    if texts:
        return "\n".join(texts)
    if message.tool_calls:
        return None
    # A turn of thoughts alone, one that was empty, and a tool without a result.
    return required("" if message.role in ("assistant", "tool") else None, f"{where}.content")


def _texts(message: dict[str, Any]) -> list[str]:
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def _with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if not isinstance(content, list) or any("text" not in part for part in content):
        return message
    return {**message, "content": "\n".join(_texts(message))}


def _shown_part(part: ContentPart, role: str, where: str) -> dict[str, str]:
    """Return a part as templates know it: a picture is only its place."""
    if part.type == PICTURE:
        return {"type": "image"}
    if part.type != "text" and (part.type != "refusal" or role != "assistant"):
        raise refuse_part(part, where)
    text = part.refusal if part.type == "refusal" else part.text
    return {"type": "text", "text": required(text, f"{where}.{part.type}")}
