"""Conversations as templates need them that take a message for granted: system first, roles in turn.

Owns: the ways of merging messages, tried one after the other where a template refuses a conversation or
leaves a text of it out, and the search for what it left out.
Never: renders, or touches a conversation that the template takes as it is.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
Content = str | list[dict[str, Any]]

_NUM_PROBED_CHARS = 64
_SWITCHES = re.compile(r"/(?:no_)?think\b|/system_override\b")
"""Words that templates read and take out of a text."""
_KEPT_IN = ("system", "user")
"""Roles whose texts must be in the prompt: templates drop old thoughts, and rightly."""


def merged(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Ways to say the same with fewer turns, the gentlest first, as far as they differ."""
    plain = list(messages)
    later = [message for message in plain[1:] if message["role"] == "system"]
    first = [message for message in plain if message["role"] == "system"]
    others = [message for message in plain if message["role"] != "system"]
    joined = _joined(plain)
    if joined != plain:
        yield joined
    if later:
        yield _joined([*first, *others])
    user = next((place for place, message in enumerate(others) if message["role"] == "user"), None)
    if first and user is not None:
        said = [{**message, "role": "user"} for message in first]
        yield _joined([*others[:user], *said, *others[user:]])


def has_later_system(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "system" for message in messages[1:])


def left_out(messages: Sequence[Message], text: str) -> int | None:
    """Return the number of the first message whose text a prompt has not.

    None if it has them all; or none of them, as of a template that is no conversation's.
    """
    at, missing, num_found = 0, None, 0
    for number, message in enumerate(messages):
        texts = [part.strip() for each in _texts(message) for part in _SWITCHES.split(each) if part.strip()]
        if not texts or not (message["role"] in _KEPT_IN or _is_beside_its_like(messages, number)):
            continue
        begin, end = texts[0][:_NUM_PROBED_CHARS].strip(), texts[-1][-_NUM_PROBED_CHARS:].strip()
        found = text.find(begin, at)
        at = max(at, found)
        if found != -1 or any(probe in text for each in (begin, end) for probe in (each, _escaped(each))):
            num_found += 1
        elif missing is None:
            missing = number
    return missing if num_found else None


def _is_beside_its_like(messages: Sequence[Message], number: int) -> bool:
    """Whether a turn of the assistant alone, without calls, has another one before or behind it."""
    beside = [*messages[max(number - 1, 0) : number], *messages[number + 1 : number + 2]]
    is_said = messages[number]["role"] == "assistant" and not messages[number].get("tool_calls")
    return is_said and any(each["role"] == "assistant" for each in beside)


def _escaped(text: str) -> str:
    """The text as templates have it that write messages as JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, list):
        return [part["text"] for part in content if isinstance(part.get("text"), str)]
    return [content] if isinstance(content, str) else []


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Make one turn of neighbours of one role; results of tools stay apart."""
    found: list[Message] = []
    for message in messages:
        if found and found[-1]["role"] == message["role"] != "tool":
            found[-1] = _as_one(found[-1], message)
        else:
            found.append(message)
    return found


def _as_one(first: Message, second: Message) -> Message:
    one = {**first, **second}
    contents = [each["content"] for each in (first, second) if each.get("content")]
    if contents:
        one["content"] = contents[0] if len(contents) == 1 else both(*contents)
    for name in ("reasoning_content", "thinking"):
        texts = [each[name] for each in (first, second) if each.get(name)]
        if texts:
            one[name] = "\n\n".join(texts)
    calls = [*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())]
    return {**one, "tool_calls": calls} if calls else one


def both(first: Content, second: Content, *, glue: str = "\n\n") -> Content:
    """Join two contents; lists of parts, which have pictures, stay lists."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{glue}{second}"
    parts = [each if isinstance(each, list) else [{"type": "text", "text": each}] for each in (first, second)]
    return [*parts[0], *parts[1]]
