"""Fields of other servers that are not supported: refused by name, or ignored by name if they are hints.

Owns: the lists that endpoints share, and the check. A field may have values that ask for nothing.
"""

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from engine.errors import ContextLengthExceeded, RequestRejected

ValueT = TypeVar("ValueT")
OFF: Final = (False,)
ON: Final = (True,)
EMPTY: Final[tuple[Any, ...]] = ([],)


class Hint(tuple[Any, ...]):
    """Values of a field whose absence promises no other tokens: with any other it is ignored and counted."""

    __slots__ = ()


REFUSED_OF_OPENAI: Final[dict[str, tuple[Any, ...]]] = {
    "moderation": (),
    "prompt_cache_options": Hint(),
    "service_tier": Hint(("auto", "default")),
    "store": Hint(OFF),
}
REFUSED_OF_OTHER_SERVERS: Final[dict[str, tuple[Any, ...]]] = {
    "chat_template": (),  # a template is a program; it comes with the checkpoint only
    "documents": EMPTY,
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "ebnf": (),
    "extra_body": ({},),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "logits_processors": EMPTY,
    "mirostat": (0,),
    "n_predict": (-1,),
    "prompt_embeds": (),  # tensors from outside are never read
    "regex": (),
    "repeat_penalty": (1, 1.0),
    "repetition_detection": (),
    "return_hidden_states": OFF,
    "return_prompt_text": OFF,
    "return_token_offsets": OFF,
    "spaces_between_special_tokens": (*ON, *OFF),  # special tokens stand in the text as they are
    "stream_interval": (1,),
    "structural_tag": (),
    "thinking_token_budget": (),
    "top_a": (0, 0.0),
    "top_n_sigma": (-1, -1.0, 0, 0.0),
    "typical_p": (1, 1.0),
    "use_beam_search": OFF,
    "watermarking": OFF,
    "xtc_probability": (0, 0.0),
}

_REASONS: Final = {
    "extra_body": "it is an argument of a client, whose members are fields of the body itself",
    "chat_template": "a template is a program, and comes with the checkpoint only",
    "logits_processors": "code from outside is never run",
    "prompt_embeds": "tensors from outside are never read",
    "thinking_token_budget": "it is for chats",
    "use_beam_search": "every choice is sampled by itself: ask for several with n, or best_of in completions",
}
_INSTEAD: Final = {
    "ebnf": "structured_outputs.grammar",
    "function_call": "tool_choice",
    "functions": "tools",
    "grammar": "structured_outputs.grammar",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "json_schema": "response_format, or text.format in responses",
    "n_predict": "max_tokens, or max_output_tokens in responses",
    "regex": "structured_outputs.regex",
    "repeat_penalty": "repetition_penalty",
    "return_prompt_text": "return_token_ids, and /detokenize",
}
"""Fields that do the same here."""


def refuse_unsupported(body: Mapping[str, Any], refusals: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise RequestRejected for the first field that asks for a feature that is not there."""
    for name in body.keys() & refusals.keys():
        if not isinstance(refusals[name], Hint) and _asks(body[name], refusals[name]):
            advice = f"; use {_INSTEAD[name]}" if name in _INSTEAD else ""
            reason = f": {_REASONS[name]}" if name in _REASONS else ""
            raise unsupported(name, f"{name} is not supported by this server{advice}{reason}")


def hints_of(body: Mapping[str, Any], refusals: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Names of the fields that are only hints, and ask for something."""
    names = (name for name in body if isinstance(refusals.get(name), Hint))
    return [name for name in names if _asks(body[name], refusals[name])]


def unsupported(param: str, message: str) -> RequestRejected:
    return RequestRejected(message, param=param, code="unsupported_parameter")


def required(value: ValueT | None, param: str) -> ValueT:
    if value is None:
        raise RequestRejected(f"{param} is required", param=param, code="missing_field")
    return value


Renaming = tuple[str, str | Callable[[re.Match[str]], str]]
"""A pattern, and what stands for it in another protocol."""


@contextmanager
def in_words(*renamings: Renaming) -> Generator[None, None, None]:
    """Raise refusals of another protocol's path with the names of the caller's, in message and field."""
    try:
        yield
    except RequestRejected as error:
        message, param = str(error), error.param or ""
        for pattern, theirs in renamings:
            message, param = re.sub(pattern, theirs, message), re.sub(pattern, theirs, param)
        if isinstance(error, ContextLengthExceeded):
            raise ContextLengthExceeded(message, param=param) from error
        raise RequestRejected(message, param=param or None, code=error.code) from error


def _asks(value: Any, harmless: tuple[Any, ...]) -> bool:
    return value is not None and not any(_is_same(value, each) for each in harmless)


def _is_same(value: Any, harmless: Any) -> bool:
    # 0 == False and 1 == True in Python, but not in JSON.
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)


def whole_number(query: Mapping[str, str], name: str, *, least: int = 0, most: int, default: int) -> int:
    """Read a number of the query of a URL. Raises RequestRejected."""
    text = query.get(name, str(default))
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not is_number or not least <= int(text) <= most:
        raise RequestRejected(
            f"{name} must be a whole number from {least} to {most}, not {text!r}", param=name
        )
    return int(text)
