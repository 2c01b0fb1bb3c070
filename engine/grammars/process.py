"""The process that tries grammars: `python -m engine.grammars.process PARENT_PID`.

Owns: the trial of a grammar: it is translated, compiled against the model's tokens, and made to write the
beginning of a plain text. Each of these may take for ever, or more memory than there is.
Never: keeps a grammar; the worker compiles it again for each sequence.
"""

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from engine.grammars.contradictions import doubled_property
from engine.grammars.messages import GrammarVerdict, Tokens
from engine.processes.child_process import die_with_parent, leave_signals_to_parent
from engine.processes.frames import answer, read_message, take_standard_output
from engine.text.tokenizer import DecoderKind, Tokenizer, TokenizerError
from scheduler.messages import Grammar, GrammarKind
from worker.sampling.grammar_library import (
    Bitmask,
    GrammarRefused,
    as_lark,
    new_bitmasks,
    new_matcher,
    open_tokenizer,
)
from worker.sampling.mask_budget import RowAccount

_MAX_MEMORY_BYTES = 2 * 2**30
_NICENESS = 5
_MAX_REFUSAL_CHARS = 240
_NEVER_IN_TEXT = b"\xff"
"""The byte that marks special tokens in the library; UTF-8 never has it."""
_PLAIN_CHARS = '",' + "".join(map(chr, range(0x21, 0x7F)))
"""Characters in order of preference: text that soon closes its strings shows most of a schema."""
_MAX_PLAIN_TOKENS = 24
_MAX_PLAIN_S = 0.25
"""Processor time for the trial text. A grammar that has not shown by then that it can write it is refused."""


def main(parent_pid: int) -> None:
    """Answer messages until standard input ends."""
    die_with_parent(parent_pid)
    leave_signals_to_parent()
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    answers = take_standard_output()
    tokens = read_message(Tokens)
    if tokens is None:
        return
    try:
        tokenizer = _open(tokens)
    except (GrammarRefused, TokenizerError, OSError) as error:
        known = isinstance(error, GrammarRefused)  # other errors name folders of this machine
        reason = error if known else "this model's tokenizer cannot be read"
        answer(answers, GrammarVerdict(refusal=_shortened(reason)))
        return
    answer(answers, GrammarVerdict())
    plain_ids = _plain_ids(tokenizer)
    while (grammar := read_message(Grammar)) is not None:
        answer(answers, _try(tokenizer, grammar, plain_ids))


def _open(tokens: Tokens) -> Any:
    """Open the tokenizer for the grammar library. Raises GrammarRefused."""
    folder = Path(tokens.folder)
    opened = open_tokenizer(folder, vocab_size=tokens.vocab_size, eos_token_ids=tokens.eos_token_ids)
    ours = Tokenizer.load(folder)
    if ours.rule.kind is DecoderKind.OPAQUE:
        # The library may read such tokens as other text than clients see.
        for token_id in range(ours.vocab_size):
            text = ours.token_bytes(token_id)
            is_ordinary = not ours.is_special(token_id) and text != _NEVER_IN_TEXT
            if is_ordinary and opened.decode_bytes([token_id]) != text:
                raise GrammarRefused("this model's tokenizer cannot be constrained: its decoder is unknown")
    return opened


def _plain_ids(tokenizer: Any) -> list[int]:
    """List the tokens of one plain character each, in the order of preference."""
    ids = [(char, tokenizer.tokenize_str(char)) for char in _PLAIN_CHARS]
    return [each[0] for char, each in ids if len(each) == 1 and tokenizer.decode_str(each) == char]


def _try(tokenizer: Any, grammar: Grammar, plain_ids: list[int]) -> GrammarVerdict:
    try:
        if grammar.kind is GrammarKind.LARK:
            grammar = Grammar(kind=grammar.kind, text=as_lark(grammar.text))
        if reason := doubled_property(grammar):
            raise GrammarRefused(reason)
        began_s = time.process_time()
        matcher = new_matcher(tokenizer, grammar)
    except GrammarRefused as error:
        return GrammarVerdict(refusal=_shortened(error))
    except Exception as error:  # noqa: BLE001 -- the translator raises any error of its parser
        return GrammarVerdict(refusal=_shortened(error) or type(error).__name__)
    mask = new_bitmasks(tokenizer, 1)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if matcher.is_error():
        reason = f"its first token fails; make it simpler: {matcher.get_error()}"
        return GrammarVerdict(refusal=_shortened(reason))
    cost_s = time.process_time() - began_s
    try:
        mask_s = _write_plain_text(matcher, mask, plain_ids)
    except GrammarRefused as obstacle:
        return GrammarVerdict(refusal=_shortened(obstacle))
    return GrammarVerdict(text=grammar.text, cost_s=cost_s, mask_s=mask_s)


def _write_plain_text(matcher: Any, mask: Bitmask, plain_ids: list[int]) -> float:
    """Write a plain text as far as the trial goes; return the processor time of its dearest token.

    `mask` is the first token's, and is overwritten. Raises GrammarRefused if the text fails, or costs more
    than the worker allows. A grammar that passes may still grow too complex in a model's text: the worker
    keeps the same account.
    """
    account = RowAccount()
    dearest_s = 0.0
    began_s = before_s = time.process_time()
    for num_tokens in range(1, _MAX_PLAIN_TOKENS + 1):
        is_allowed_V = np.unpackbits(mask.view(np.uint8), bitorder="little")
        plain = next((token_id for token_id in plain_ids if is_allowed_V[token_id]), None)
        matcher.consume_token(int(is_allowed_V.argmax()) if plain is None else plain)
        if not matcher.is_error():
            if matcher.is_stopped():
                break
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            reason = matcher.get_error()
            raise GrammarRefused(
                f"the plainest text fails at its token {num_tokens + 1}; make it simpler: {reason}"
            )
        now_s = time.process_time()
        account.pay_mask(now_s - before_s)
        dearest_s, before_s = max(dearest_s, now_s - before_s), now_s
        if account.is_overdrawn or now_s - began_s > _MAX_PLAIN_S:
            raise GrammarRefused(
                f"the plainest text takes {now_s - began_s:.2f} s of processor time for {num_tokens} tokens;"
                " make it simpler"
            )
    return dearest_s


def _shortened(reason: object) -> str:
    """Fit a reason into one line of bounded length."""
    return " ".join(str(reason).replace("<non-verbose/>", "").split())[:_MAX_REFUSAL_CHARS]


if __name__ == "__main__":
    main(parent_pid=int(sys.argv[1]))
