"""Prompts for fill in the middle: prefix and suffix, arranged as code models were trained.

Source: fill in the middle, arXiv:2207.14255; the marks are from the models' own cards.
"""

from typing import NamedTuple

from engine.errors import RequestRejected
from engine.text.tokenizer import DecoderKind, Tokenizer


class _Marks(NamedTuple):
    prefix: str
    suffix: str
    middle: str


_KNOWN_MARKS = (
    _Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    _Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    _Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    _Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)


def encode_infill(prefix: str, suffix: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Encode a prompt that the middle continues. Raises RequestRejected if the tokenizer has no marks."""
    marks = _marks_of(tokenizer)
    if marks is None:
        raise RequestRejected(
            "suffix: this model's tokenizer has no tokens for text with a hole; leave suffix out",
            param="suffix",
            code="unsupported_parameter",
        )
    before, after, middle = marks
    return (
        *_leading(tokenizer),
        before,
        *_encode_inside(prefix, tokenizer, param="prompt"),
        after,
        *_encode_inside(suffix, tokenizer, param="suffix"),
        middle,
    )


def _marks_of(tokenizer: Tokenizer) -> tuple[int, int, int] | None:
    for marks in _KNOWN_MARKS:
        before, after, middle = (tokenizer.id_of(mark) for mark in marks)
        if before is not None and after is not None and middle is not None:
            return before, after, middle
    return None


def _leading(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token that begins every text of this model, if there is one."""
    around = tokenizer.encode_prompt("")
    return around[:1] if around[:1] == (tokenizer.bos_token_id,) else ()


def _encode_inside(text: str, tokenizer: Tokenizer, *, param: str) -> tuple[int, ...]:
    """Encode as in the middle of a text: many tokenizers put a space before its beginning."""
    if tokenizer.rule.kind is DecoderKind.BYTE_LEVEL:
        return tokenizer.encode_plain(text, param=param)
    guard = tokenizer.encode_plain("\n", param=param)
    guarded = tokenizer.encode_plain(f"\n{text}", param=param)
    # A line break merges with nothing in known vocabularies; if it does, the plain encoding is used.
    has_guard = guarded[: len(guard)] == guard
    return guarded[len(guard) :] if has_guard else tokenizer.encode_plain(text, param=param)
