"""Log-probabilities of tokens that are not whole characters, and of the impossible."""

from dataclasses import replace

from engine.types import LogprobEntry, TokenLogprob
from server.logprobs import TokenOffsets, chat_logprobs, completion_logprobs


def token(token_bytes: bytes, logprob: float = -1.0) -> TokenLogprob:
    text = token_bytes.decode(errors="replace")
    chosen = LogprobEntry(token_id=0, token=text, token_bytes=token_bytes, logprob=logprob)
    return TokenLogprob(chosen=chosen, top=(chosen,))


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


def test_offsets_go_on_from_chunk_to_chunk():
    offsets = TokenOffsets(0)
    completion_logprobs([token(b"abc")], offsets)
    assert completion_logprobs([token(b"d")], offsets)["text_offset"] == [3]


def test_minus_infinity_becomes_openais_floor():
    impossible = [token(b"a", float("-inf"))]
    assert chat_logprobs(impossible)["content"][0]["logprob"] == -9999.0
    assert completion_logprobs(impossible, TokenOffsets(0))["token_logprobs"] == [-9999.0]
