"""The messages between the API process and a process that renders chats (both)."""

from enum import StrEnum
from typing import Any

import msgspec

MAX_RENDERING_S = 10.0
MAX_MEMORY_BYTES = 512 * 2**20
"""Limit for the interpreter and all that a rendering makes: the longest prompt that is allowed takes half."""
CODE_OUT_OF_MEMORY = 3
"""Exit code, which its parent reads."""


class FinalMessage(StrEnum):
    """The end of the prompt, which decides how the model goes on."""

    ANSWER = "answer"  # a new assistant message
    CONTINUE = "continue"  # the rest of the last message, which is left open
    NOTHING = "nothing"  # no generation prompt: the messages as they are


class MergeReason(StrEnum):
    """Reason for which turns of a chat were merged."""

    REFUSED = "refused"  # the template raises an error
    LEFT_OUT = "left_out"  # it drops the text of a message
    WELDED = "welded"  # it glues a later system message to the text before it


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """Templates and special tokens of the checkpoint, sent to each process once."""

    templates: dict[str, str]
    """Sources by name: `default`, and possibly `tool_use` for requests with tools."""
    special_tokens: dict[str, str] = {}
    reserved_names: tuple[str, ...] = ()
    """Names of special tokens, set or not, which no request may set."""


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation to be rendered: plain JSON data."""

    messages: list[dict[str, Any]]
    tools: tuple[dict[str, Any], ...] = ()
    final: FinalMessage = FinalMessage.ANSWER
    kwargs: dict[str, Any] = {}
    """Variables of the template from the caller, such as `enable_thinking`."""
    hints: dict[str, Any] = {}
    """The same from the server, which `kwargs` override."""


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a Program and to each Chat."""

    text: bytes = b""
    """UTF-8 but for halves of surrogate pairs, which arguments of calls can hold: they are refused later."""
    refusal: str = ""
    """The reason, which may be shown to clients; empty if there is none."""
    param: str = ""
    """The parameter at fault."""
    merged_for: MergeReason | None = None
    variables: list[str] = []
    """Names that requests may set with an effect; in the answer to a Program only."""
