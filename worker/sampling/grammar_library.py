"""llguidance as this server uses it: the model's tokens, the cost limits of a grammar, the languages.

Owns: the limits, and the options for JSON Schema. The process that tries grammars
(engine/grammars/process.py) and the worker call the same functions: a grammar that compiles in one
compiles in the other.
Never: torch, so that the process which only tries grammars starts in a fraction of a second.
Source: llguidance, a parser over a lexer of regex derivatives that walks the vocabulary as a trie.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from scheduler.messages import Grammar, GrammarKind
from worker.checkpoint.tokenizer_files import read_tokenizer
from worker.worker_errors import StartupError

Bitmask = NDArray[np.int32]
"""One bit for each token, the lowest of a word first; 1 is allowed."""

_LIMITS = LLParserLimits(
    # A mask cannot be interrupted, so these bound what one may take. The time grows with the square of the
    # items: an ambiguous rule (s: "a" | s s | s s s) takes 0.6 s at 20,000 and 0.03 s at 5,000.
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=5_000,
    max_grammar_size=100_000,
    # Above the library's own: an object of 500 optional properties is that deep where its next one begins.
    max_items_in_row=4_000,
    # 1 to 2 KiB each.
    max_lexer_states=20_000,
    verbose_errors=False,
)
_JSON_OPTIONS = {
    # Without a bound, a model that is fond of line breaks never comes to the next brace.
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}",
    # A keyword that cannot be enforced is refused, not ignored.
    "lenient": False,
    # "Exactly one of" would need to distinguish alternatives while they are written.
    "coerce_one_of": True,
}

_SLICES = [r'[^"\\\x00-\x1F\x7F]{1,10}']
"""Tokens that are allowed, or not, all at once where text is as free as this. Each such set is a tree of its
own: of 152,000 tokens, the library's four take 40 MiB and this one 12. The others save no time that could be
measured, since most tokens are as short as this."""


class GrammarRefused(Exception):
    """A grammar, or a tokenizer, that cannot be used. Its text is fit for the caller's eyes."""


def open_tokenizer(folder: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Read the checkpoint's tokens as a trie: 20 ms for 2,500 tokens, 1.3 s for 150,000, with the GIL held.

    vocab_size is that of the model, whose logits may have lines for tokens that do not exist. Raises
    GrammarRefused.
    """
    try:
        text = read_tokenizer(folder).text.decode()
    except StartupError as error:
        raise GrammarRefused(f"this model's tokenizer cannot be constrained: {error}") from error
    ends = [token_id for token_id in eos_token_ids if token_id < vocab_size]
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=ends, slices=_SLICES)
    except ValueError:
        pass  # a tokenizer may also know more tokens than the model
    try:
        return LLTokenizer(text, eos_token=ends, slices=_SLICES)
    except ValueError as error:
        raise GrammarRefused(f"this model's tokenizer cannot be constrained: {error}") from error


def new_matcher(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Open a matcher at the beginning of the text. Raises GrammarRefused."""
    matcher = LLMatcher(tokenizer, _definition(grammar), limits=_LIMITS, log_level=0)
    if matcher.is_error():
        raise GrammarRefused(matcher.get_error())
    return matcher


def new_bitmasks(tokenizer: LLTokenizer, num: int) -> Bitmask:
    """Allocate masks, uninitialized, one line for each of `num` matchers."""
    return np.empty((num, -(-tokenizer.vocab_size // 32)), np.int32)


def as_lark(text: str) -> str:
    """Translate GBNF to Lark; a Lark grammar stays as it is.

    Raises any error of the translator, and may take minutes: only for a process that can be killed.
    """
    return any_to_lark(text)


def _definition(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                return LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON_OPTIONS)  # type: ignore[arg-type]
            except ValueError as error:
                raise GrammarRefused(str(error)) from error
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)
