"""Bad words as token sequences, for tokenizers with and without a mark for the space."""

import pytest

from engine.errors import RequestRejected
from engine.text.tokenizer import SpecialTokens, Tokenizer
from tests.engine import small_tokenizers


def texts(words: list[str], tokenizer: Tokenizer) -> list[str]:
    return [
        tokenizer.decode(sequence, special=SpecialTokens.KEEP)
        for sequence in tokenizer.encode_bad_words(words)
    ]


def test_a_word_is_meant_with_and_without_a_space_before_it() -> None:
    tokenizer = small_tokenizers.byte_level()
    assert texts(["lazy", "the dog"], tokenizer) == ["lazy", " lazy", "the dog", " the dog"]
    assert texts([" lazy"], tokenizer) == ["lazy", " lazy"]


def test_spellings_that_come_to_the_same_tokens_are_listed_once() -> None:
    tokenizer = small_tokenizers.word_piece()
    assert texts(["lazy", "lazy"], tokenizer) == ["lazy"]


@pytest.mark.parametrize("word", ["", " ", "\t\n"])
def test_a_word_of_blanks_is_refused_by_its_place(word: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        small_tokenizers.byte_level().encode_bad_words(["ok", word])
    assert caught.value.param == "bad_words[1]"


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestRejected, match="surrogate"):
        small_tokenizers.byte_level().encode_bad_words(["\ud800"])
