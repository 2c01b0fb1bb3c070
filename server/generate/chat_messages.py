"""Wire messages to messages as chat templates read them.

Owns: what each role may bring, and that what a message cannot have here is refused by name.
Never: types and bounds (protocol.py), or the template itself (the engine).
Source: the shape of messages that `apply_chat_template` of Hugging Face transformers defines.
"""

from collections.abc import Sequence
from typing import Any, Final

from engine.errors import RequestRejected
from server.generate.protocol import ChatMessage, ContentPart
from server.refusals import unsupported

_ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_ONLY_OF: Final = {
    "tool_calls": "assistant",
    "refusal": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "tool_call_id": "tool",
}
"""Field to the one role that has it."""


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Raises RequestRejected."""
    names: dict[str, str] = {}
    """Of the functions that were called so far, by the id of the call."""
    rendered = []
    for index, message in enumerate(messages):
        rendered.append(_template_message(message, f"messages[{index}]", names))
        names |= {call.id: call.function.name for call in message.tool_calls or ()}
    return rendered


def num_chars(messages: Sequence[dict[str, Any]]) -> int:
    """Of all that a template may write down."""
    return sum(
        len(message.get("content") or "")
        + len(message.get("reasoning_content") or "")
        + sum(len(call["function"]["arguments"]) for call in message.get("tool_calls") or ())
        for message in messages
    )


def _template_message(message: ChatMessage, where: str, names: dict[str, str]) -> dict[str, Any]:
    role = _role(message, where)
    _check_fields(message, where)
    rendered: dict[str, Any] = {"role": role, "content": _content(message, where)}
    name = message.name
    if role == "tool":
        if message.tool_call_id is None:
            param = f"{where}.tool_call_id"
            raise RequestRejected(f"{param} is required", param=param, code="missing_field")
        rendered["tool_call_id"] = message.tool_call_id
        name = name or names.get(message.tool_call_id)
    if name is not None:
        rendered["name"] = name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        # Both names that templates read: DeepSeek's and that of gpt-oss.
        rendered |= {"reasoning_content": reasoning, "thinking": reasoning}
    if message.tool_calls:
        rendered["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return rendered


def _role(message: ChatMessage, where: str) -> str:
    role = _ROLES.get(message.role)
    if role is None:
        instead = "tool" if message.role == "function" else "system, user, assistant or tool"
        raise unsupported(f"{where}.role", f"the role {message.role!r} is not supported; use {instead}")
    return role


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


def _content(message: ChatMessage, where: str) -> str | None:
    """None only beside tool calls."""
    texts = [
        _part_text(part, message.role, f"{where}.content[{place}]")
        for place, part in enumerate(message.content or ())
    ]
    if message.refusal:
        texts.append(message.refusal)
    if texts:
        return "\n".join(texts)
    if message.tool_calls:
        return None
    raise RequestRejected(f"{where}.content is required", param=f"{where}.content", code="missing_field")


def _part_text(part: ContentPart, role: str, where: str) -> str:
    if part.type != "text" and (part.type != "refusal" or role != "assistant"):
        raise unsupported(f"{where}.type", f"content parts of type {part.type!r} are not supported; use text")
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise RequestRejected(
            f"{where}.{part.type} is required", param=f"{where}.{part.type}", code="missing_field"
        )
    return text
