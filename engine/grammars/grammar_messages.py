"""What crosses between the API process and the process that tries grammars.

Owns: the frame, four bytes of length and then msgpack, on the child's standard input and output.
"""

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct(">I")


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """To the child, once: which tokens there are."""

    folder: str
    """The checkpoint's, with its tokenizer.json."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class GrammarVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """From the child, for the tokens and then for each grammar."""

    text: str = ""
    """The grammar as the worker is to get it: in Lark, where it came in GBNF."""
    refusal: str = ""
    """Why it cannot be used, fit for the caller's eyes; empty if it can."""
    cost_s: float = 0.0
    """Processor time that the worker will need for it, once for each sequence, while all others wait."""


def frame(message: Any) -> bytes:
    content = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(content)) + content
