"""The messages between the API process and the process that tries grammars."""

import msgspec


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The vocabulary, sent to the child once."""

    folder: str
    """The checkpoint folder, which holds tokenizer.json."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class GrammarVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The child's answer to Tokens and to each grammar."""

    text: str = ""
    """The grammar for the worker: in Lark if it came in GBNF."""
    refusal: str = ""
    """Reason why it cannot be used, which may be shown to clients; empty if it can."""
    cost_s: float = 0.0
    """Processor time that the worker needs to compile it, for each sequence, while all others wait."""
    mask_s: float = 0.0
    """Processor time of the dearest token after the first, for each sequence, while all others wait."""
