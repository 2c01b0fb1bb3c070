"""The process that tries grammars: `python -m engine.grammar_process PARENT_PID`.

Owns: what happens to a grammar before anybody relies on it: it is translated, compiled against the model's
tokens, and asked for its first token. All of that may take for ever, or more memory than there is.
Never: keeps a grammar; the worker compiles it again for each sequence.
"""

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from engine.child_process import die_with_parent, leave_signals_to_parent
from engine.grammar_messages import LENGTH, Tokens, Verdict, frame
from engine.tokenizer import DecoderKind, Tokenizer, TokenizerError
from scheduler.messages import Grammar, GrammarKind
from worker.grammar_library import GrammarRefused, as_lark, new_bitmasks, new_matcher, open_tokenizer

_MAX_MEMORY_BYTES = 2 * 2**30
_NICENESS = 5
_MAX_REFUSAL_CHARS = 240
_NEVER_IN_TEXT = b"\xff"
"""No character of UTF-8 has this byte: the library marks special tokens with it."""

_MessageT = TypeVar("_MessageT")


def main(parent_pid: int) -> None:
    """Answer until standard input ends."""
    die_with_parent(parent_pid)
    leave_signals_to_parent()
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    # Whatever a library prints goes to the log instead of between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    tokens = _read(sys.stdin.buffer, Tokens)
    if tokens is None:
        return
    try:
        tokenizer = _open(tokens)
    except (GrammarRefused, TokenizerError, OSError) as error:
        known = isinstance(error, GrammarRefused)  # the others name folders of this machine
        reason = error if known else "this model's tokenizer cannot be read"
        _answer(answers, Verdict(refusal=_shortened(reason)))
        return
    _answer(answers, Verdict())
    while (grammar := _read(sys.stdin.buffer, Grammar)) is not None:
        _answer(answers, _try(tokenizer, grammar))


def _read(stream: BinaryIO, kind: type[_MessageT]) -> _MessageT | None:
    """None where the stream ends."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return msgspec.msgpack.decode(stream.read(LENGTH.unpack(head)[0]), type=kind)


def _answer(stream: BinaryIO, verdict: Verdict) -> None:
    stream.write(frame(verdict))
    stream.flush()


def _open(tokens: Tokens) -> Any:
    """Raises GrammarRefused."""
    folder = Path(tokens.folder)
    opened = open_tokenizer(folder, vocab_size=tokens.vocab_size, eos_token_ids=tokens.eos_token_ids)
    ours = Tokenizer.load(folder)
    if ours.rule.kind is DecoderKind.OPAQUE:
        # The library may take such tokens for other text than clients will see.
        for token_id in range(ours.vocab_size):
            text = ours.token_bytes(token_id)
            is_ordinary = not ours.is_special(token_id) and text != _NEVER_IN_TEXT
            if is_ordinary and opened.decode_bytes([token_id]) != text:
                raise GrammarRefused("this model's tokenizer cannot be constrained: its decoder is unknown")
    return opened


def _try(tokenizer: Any, grammar: Grammar) -> Verdict:
    try:
        if grammar.kind is GrammarKind.LARK:
            grammar = Grammar(kind=grammar.kind, text=as_lark(grammar.text))
        began_s = time.process_time()
        matcher = new_matcher(tokenizer, grammar)
    except GrammarRefused as error:
        return Verdict(refusal=_shortened(error))
    except Exception as error:  # noqa: BLE001 -- the translator raises whatever its parser stumbles over
        return Verdict(refusal=_shortened(error) or type(error).__name__)
    masks = new_bitmasks(tokenizer, 1)
    matcher.unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
    if matcher.is_error():
        return Verdict(refusal=_shortened(matcher.get_error()))
    return Verdict(text=grammar.text, cost_s=time.process_time() - began_s)


def _shortened(reason: object) -> str:
    """One line, and not longer than a message may be."""
    return " ".join(str(reason).split())[:_MAX_REFUSAL_CHARS]


if __name__ == "__main__":
    main(parent_pid=int(sys.argv[1]))
