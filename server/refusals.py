"""What other servers do and this one does not: each such field is refused by name, never ignored.

Owns: the list of these fields, and the values of theirs that ask for nothing.
Never: the fields that have an effect (protocol.py).
"""

from collections.abc import Mapping
from typing import Any, Final

from engine.errors import RequestRejected

ACCEPTED_WITHOUT_EFFECT: Final = frozenset(
    {"metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"}
)
"""Declared in protocol.py with their bounds. They speak to a provider's billing, storage and routing."""

_TEXT_FORMAT: Final = ({"type": "text"},)
_OFF: Final = (False,)
_EMPTY: Final[tuple[Any, ...]] = ([],)
_NO_TOOLS: Final = ("none", "auto")

_OPENAI: Final[dict[str, tuple[Any, ...]]] = {
    "moderation": (),
    "prompt_cache_options": (),
    "store": _OFF,
}
_OPENAI_COMPLETION: Final[dict[str, tuple[Any, ...]]] = {"suffix": ("",)}
_OPENAI_CHAT: Final[dict[str, tuple[Any, ...]]] = {
    "audio": (),
    "function_call": _NO_TOOLS,
    "functions": _EMPTY,
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # says how to use tools, of which there are none
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": _TEXT_FORMAT,
    "tool_choice": _NO_TOOLS,
    "tools": _EMPTY,
    "verbosity": ("medium",),
    "web_search_options": (),
}
_OTHER_SERVERS: Final[dict[str, tuple[Any, ...]]] = {
    "allowed_token_ids": _EMPTY,
    "bad_words": _EMPTY,
    "chat_template": (),  # a template is a program; it comes with the checkpoint only
    "documents": _EMPTY,
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "prompt_logprobs": _OFF,
    "return_token_ids": _OFF,
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": _OFF,
}

COMPLETION_REFUSALS: Final = {
    **_OPENAI,
    **_OPENAI_COMPLETION,
    **_OTHER_SERVERS,
    "add_special_tokens": (True,),
    "response_format": _TEXT_FORMAT,
}
CHAT_REFUSALS: Final = {
    **_OPENAI,
    **_OPENAI_CHAT,
    **_OTHER_SERVERS,
    "add_special_tokens": _OFF,
    "best_of": (1,),
    "echo": _OFF,
}
"""Field to the values that ask for nothing; null is always one of them."""


def refuse_unsupported(body: Mapping[str, Any], refusals: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise RequestRejected for the first field that asks for what we do not have."""
    for name in body.keys() & refusals.keys():
        value = body[name]
        if value is not None and not any(_is_same(value, harmless) for harmless in refusals[name]):
            raise unsupported(name, f"{name} is not supported by this server")


def unsupported(param: str, message: str) -> RequestRejected:
    return RequestRejected(message, param=param, code="unsupported_parameter")


def _is_same(value: Any, harmless: Any) -> bool:
    # 0 == False and 1 == True in Python, but not in JSON.
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)
