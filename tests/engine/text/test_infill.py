"""Prompts with a hole, in the order and with the marks that code models know."""

import orjson
import pytest
import tokenizers

from engine.errors import RequestRejected
from engine.text.infill import encode_infill
from engine.text.tokenizer import SpecialTokens, Tokenizer, decoder_rule
from tests.engine import small_tokenizers

MARKS = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>"),
}


def with_marks(backend: tokenizers.Tokenizer, marks: tuple[str, ...], *, bos: str = "") -> Tokenizer:
    backend.add_special_tokens(list(marks))
    rule = decoder_rule(orjson.loads(backend.to_str())["decoder"])
    return Tokenizer(backend, rule=rule, special_tokens={"bos_token": bos} if bos else {})


@pytest.mark.parametrize("family", sorted(MARKS))
def test_prefix_suffix_and_middle_come_in_this_order(family: str) -> None:
    tokenizer = with_marks(small_tokenizers.byte_level_backend(), MARKS[family])
    ids = encode_infill("def f(x):\n", "\n# stop\n", tokenizer)
    before, after, middle = MARKS[family]
    assert (
        tokenizer.decode(ids, special=SpecialTokens.KEEP) == f"{before}def f(x):\n{after}\n# stop\n{middle}"
    )


def test_the_token_that_begins_every_text_begins_this_one() -> None:
    tokenizer = with_marks(small_tokenizers.byte_level_backend(), MARKS["qwen"], bos="<s>")
    assert tokenizer.decode(encode_infill("a", "b", tokenizer), special=SpecialTokens.KEEP) == (
        "<s><|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )


def test_no_space_is_put_where_the_parts_are_cut() -> None:
    tokenizer = with_marks(small_tokenizers.sentencepiece_backend(), MARKS["codellama"])
    before, *prefix_and_on = encode_infill("hello", "over", tokenizer)
    after = prefix_and_on.index(tokenizer.id_of("▁<SUF>"))
    parts = (prefix_and_on[:after], prefix_and_on[after + 1 : -1])
    spelt = ["".join(tokenizer.vocabulary_string(each) for each in part) for part in parts]
    assert spelt == ["hello", "over"]
    assert tokenizer.vocabulary_string(before) == "▁<PRE>"


def test_an_empty_part_is_no_mistake() -> None:
    tokenizer = with_marks(small_tokenizers.byte_level_backend(), MARKS["starcoder"])
    assert len(encode_infill("", "", tokenizer)) == 3


def test_a_model_without_the_marks_refuses_by_the_name_of_the_field() -> None:
    with pytest.raises(RequestRejected) as caught:
        encode_infill("a", "b", small_tokenizers.byte_level())
    assert (caught.value.param, caught.value.code) == ("suffix", "unsupported_parameter")
