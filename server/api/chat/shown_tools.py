"""Tools for models without a dialect: shown in the prompt.

Owns: the text that shows the tools, and earlier calls and results as plain text.
Source: the marks are those of Hermes' function-calling format, the most common one.
"""

import json
from collections.abc import Sequence
from typing import Any

from engine.text.merged_turns import Content, both

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
_RESULT = "<tool_response>\n{}\n</tool_response>"
_FORM = (
    f"To call a function, write {OPENING}"
    '{"name": <name of the function>, "arguments": <JSON object>}'
    f"{CLOSING} and nothing behind it. If no function is needed, answer in plain text."
)


def with_tools_shown(
    messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]], *, is_forced: bool
) -> list[dict[str, Any]]:
    """Put the tools into the system message, or else before the first message of the user.

    `is_forced`: a grammar makes the form of calls, so that the prompt need not say it.
    Not every template takes a system message, or a role for results: those become messages of the user.
    """
    plain = _as_plain_turns(messages)
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    shown = f"You can call these functions:\n<tools>\n{lines}\n</tools>"
    if not is_forced:
        shown += f"\n{_FORM}"
    for place, message in enumerate(plain):
        if message["role"] == "system":
            return _replaced(plain, place, both(message["content"], shown))
        if message["role"] == "user":
            return _replaced(plain, place, both(shown, message["content"]))
    return [{"role": "user", "content": shown}, *plain]


def _as_result(content: Content) -> Content:
    if isinstance(content, str):
        return _RESULT.format(content)
    begin, end = _RESULT.split("{}")
    return [{"type": "text", "text": begin}, *content, {"type": "text", "text": end}]


def _replaced(messages: list[dict[str, Any]], place: int, content: Content) -> list[dict[str, Any]]:
    return [*messages[:place], {**messages[place], "content": content}, *messages[place + 1 :]]


def _as_plain_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write calls and results as text; the results of one turn, and what follows them, are one message."""
    plain: list[dict[str, Any]] = []
    has_results = False
    for message in messages:
        if message["role"] == "tool":
            turn = {"role": "user", "content": _as_result(message["content"])}
        else:
            turn = _with_calls_written(message)
        if has_results and turn["role"] == "user":
            plain[-1] = {**plain[-1], "content": both(plain[-1]["content"], turn["content"], glue="\n")}
        else:
            plain.append(turn)
        has_results = message["role"] == "tool" or (has_results and turn["role"] == "user")
    return plain


def _with_calls_written(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    written = [_written(call["function"]) for call in message["tool_calls"]]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    texts = [message["content"]] if message["content"] else []
    return {**kept, "content": "\n".join([*texts, "".join(written)])}


def _written(function: dict[str, Any]) -> str:
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'{OPENING}{{"name": {name}, "arguments": {function["arguments"] or "{}"}}}{CLOSING}'
