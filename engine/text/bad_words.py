"""Words that must not be said, as the token sequences that would say them.

Owns: that a word is meant at the beginning of a text and after a space alike.
Never: what happens to logits (worker/sampling/bad_word_tokens.py).
"""

from collections.abc import Sequence

from engine.errors import RequestRejected
from engine.text.tokenizer import Tokenizer


def token_sequences(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word with and without a space before it. Raises RequestRejected for one that has no tokens."""
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        param = f"bad_words[{index}]"
        bare = word.lstrip()
        # Many tokenizers have other tokens for a word after a space, and that is where most words stand.
        spellings = [tokenizer.encode_plain(text, param=param) for text in (bare, f" {bare}")]
        if not bare or not all(spellings):
            raise RequestRejected(f"{param} must hold more than blanks", param=param)
        found.update(dict.fromkeys(spellings))
    return tuple(found)
