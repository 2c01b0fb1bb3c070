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

_OFF: Final = (False,)
_EMPTY: Final[tuple[Any, ...]] = ([],)
_NO_TOOL_CHOICE: Final = ("none", "auto")

_OPENAI: Final[dict[str, tuple[Any, ...]]] = {
    "moderation": (),
    "prompt_cache_options": (),
    "store": _OFF,
}
_OPENAI_CHAT: Final[dict[str, tuple[Any, ...]]] = {
    "audio": (),
    "function_call": _NO_TOOL_CHOICE,
    "functions": _EMPTY,
    "modalities": (["text"],),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_OTHER_SERVERS: Final[dict[str, tuple[Any, ...]]] = {
    "chat_template": (),  # a template is a program; it comes with the checkpoint only
    "documents": _EMPTY,
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "logits_processors": _EMPTY,
    "logprob_token_ids": _EMPTY,
    "prompt_embeds": (),  # tensors from outside are never read
    "repetition_detection": (),
    "return_token_offsets": _OFF,
    "spaces_between_special_tokens": _OFF,  # special tokens stand in the text as they are
    "stream_interval": (1,),
    "truncation_side": ("left",),
    "use_beam_search": _OFF,
}

_INSTEAD: Final = {
    "function_call": "tool_choice",
    "functions": "tools",
    "grammar": "structured_outputs.grammar",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "json_schema": "response_format",
}
"""What does the same here."""

COMPLETION_REFUSALS: Final = {
    **_OPENAI,
    **_OTHER_SERVERS,
}
CHAT_REFUSALS: Final = {
    **_OPENAI,
    **_OPENAI_CHAT,
    **_OTHER_SERVERS,
    "add_special_tokens": _OFF,
    "best_of": (1,),
    "echo": _OFF,
}
TOKENIZE_REFUSALS: Final[dict[str, tuple[Any, ...]]] = {"chat_template": ()}
"""Field to the values that ask for nothing; null is always one of them."""


def refuse_unsupported(body: Mapping[str, Any], refusals: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise RequestRejected for the first field that asks for what we do not have."""
    for name in body.keys() & refusals.keys():
        value = body[name]
        if value is not None and not any(_is_same(value, harmless) for harmless in refusals[name]):
            advice = f"; use {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise unsupported(name, f"{name} is not supported by this server{advice}")


def unsupported(param: str, message: str) -> RequestRejected:
    return RequestRejected(message, param=param, code="unsupported_parameter")


def _is_same(value: Any, harmless: Any) -> bool:
    # 0 == False and 1 == True in Python, but not in JSON.
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)
