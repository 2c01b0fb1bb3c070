"""Log-probabilities of tokens that are not whole characters, and of the impossible."""

from dataclasses import replace

import pytest

from engine.types import ChosenLogprob, LogprobEntry
from server.reply.generate.wire_logprobs import EchoOffsets, TokenOffsets, chat_logprobs, completion_logprobs
from tests.engine import small_tokenizers


def token(token_bytes: bytes, logprob: float = -1.0) -> ChosenLogprob:
    text = token_bytes.decode(errors="replace")
    chosen = LogprobEntry(token_id=0, token=text, token_bytes=token_bytes, logprob=logprob)
    return ChosenLogprob(chosen=chosen, top=(chosen,))


def test_halves_of_a_character_are_named_by_their_bytes_and_begin_where_it_begins():
    tokens = [token("aß".encode()), token(b"\xf0\x9f"), token(b"\x98\x80"), token(b"b")]
    lists = completion_logprobs(tokens, TokenOffsets(0))
    assert lists["tokens"] == ["aß", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "b"]
    assert lists["text_offset"] == [0, 2, 2, 3]
    assert list(lists["top_logprobs"][1]) == ["bytes:\\xf0\\x9f"]


def test_a_token_that_the_text_leaves_out_takes_no_room_in_it():
    hidden = replace(token(b"<|reserved_7|>"), is_hidden=True)
    tokens = [token(b"a"), token(b" five"), hidden, token(b"b"), token(b"c")]
    lists = completion_logprobs(tokens, TokenOffsets(0))
    assert lists["text_offset"] == [0, 1, 6, 6, 7]
    assert lists["tokens"][2] == "<|reserved_7|>"


def test_a_token_behind_a_character_that_stays_broken_begins_behind_its_mark():
    tokens = [token(b"a"), token(b"\xf0\x9f"), token(b"b"), token(b"\xc3"), token(b"\xc3"), token(b"\xa9c")]
    lists = completion_logprobs(tokens, TokenOffsets(0))
    text = b"".join(each.chosen.token_bytes for each in tokens).decode(errors="replace")
    assert text == "a\ufffdb\ufffdéc"
    assert lists["text_offset"] == [0, 1, 2, 3, 4, 4]


def test_offsets_go_on_from_chunk_to_chunk():
    offsets = TokenOffsets(0)
    completion_logprobs([token(b"abc")], offsets)
    assert completion_logprobs([token(b"d")], offsets)["text_offset"] == [3]


def test_minus_infinity_becomes_openais_floor():
    impossible = [token(b"a", float("-inf"))]
    assert chat_logprobs(impossible)["content"][0]["logprob"] == -9999.0
    assert completion_logprobs(impossible, TokenOffsets(0))["token_logprobs"] == [-9999.0]


def echo_offsets(text: str, *pieces: bytes) -> list[int]:
    offsets = EchoOffsets(text)
    return [offsets.next_offset(piece) for piece in pieces]


def test_a_token_that_begins_every_prompt_takes_no_room_in_its_echo():
    assert echo_offsets("hi there", b"<s>", b"hi", b" there") == [0, 0, 2]
    assert echo_offsets("<s>hi", b"<s>", b"hi") == [0, 3]  # but one that was written does


def test_a_space_that_the_tokenizer_puts_before_the_first_word_is_not_in_the_echo():
    assert echo_offsets("hi there hi", b" hi", b" there", b" hi") == [0, 2, 8]
    assert echo_offsets(" hi", b" hi") == [0]


def test_halves_of_a_character_begin_where_it_begins_in_an_echo_too():
    assert echo_offsets("a😀b", b"a", b"\xf0\x9f", b"\x98\x80", b"b") == [0, 1, 1, 2]


def test_offsets_find_their_way_again_behind_broken_bytes():
    for marks in (1, 2, 3):
        text = "a" + "\ufffd" * marks + "bc d"
        assert echo_offsets(text, b"a", b"\xff", b"\xf0\x9f", b"bc", b" d")[-1] == len(text) - 2


@pytest.mark.parametrize("text", small_tokenizers.SAMPLE)
@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "sentencepiece_without_strip"])
def test_every_whole_token_of_a_real_tokenizer_stands_where_its_offset_says(name, text):
    tokenizer = getattr(small_tokenizers, name)()
    ids = tokenizer.encode_prompt(text)
    offsets = echo_offsets(text, *map(tokenizer.token_bytes, ids))
    assert offsets == sorted(offsets)
    for token_id, offset in zip(ids, offsets, strict=True):
        token = tokenizer.token_string(token_id)
        if "\ufffd" not in token and not tokenizer.is_special(token_id):
            assert text.startswith(token.lstrip() if offset == 0 else token, offset)
    assert offsets[-1] >= len(text) - len(tokenizer.token_bytes(ids[-1]))
