"""The checkpoint's tokenizer, loaded from files as they come."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.errors import RequestRejected
from engine.text.tokenizer import DecoderKind, SpecialTokens, Tokenizer, TokenizerError, decoder_rule
from engine.types import TextCut
from tests.engine import small_tokenizers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    backend = small_tokenizers.byte_level_backend()
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=3)
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_prompt_gets_the_special_tokens_of_the_post_processor_and_a_rendered_chat_does_not(folder) -> None:
    tokenizer = Tokenizer.load(folder)
    prompt, chat = tokenizer.encode_prompt("hello world"), tokenizer.encode_rendered_chat("<s>hello world")
    assert prompt == chat
    assert [tokenizer.token_string(token_id) for token_id in prompt] == ["<s>", "hello", " world"]


@pytest.mark.parametrize(
    "encode",
    [
        Tokenizer.encode_prompt,
        lambda tokenizer, text: tokenizer.encode_text(text, TextCut(param="input")),
        lambda tokenizer, text: tokenizer.encode_text("a", TextCut(param="input", max_tokens=9), second=text),
    ],
    ids=["prompt", "to pool", "cut"],
)
def test_a_long_text_does_not_hold_up_other_threads(folder, encode) -> None:
    tokenizer = Tokenizer.load(folder)
    with ThreadPoolExecutor(1) as pool:
        started_s = last_s = time.perf_counter()
        encoding = pool.submit(encode, tokenizer, "hello world, hello there " * 20_000)
        longest_gap_s = 0.0
        while not encoding.done():
            time.sleep(0.001)
            last_s, before_s = time.perf_counter(), last_s
            longest_gap_s = max(longest_gap_s, last_s - before_s)
        assert longest_gap_s < (last_s - started_s) / 2


def test_truncation_and_padding_left_over_from_training_are_switched_off(folder) -> None:
    tokenizer = Tokenizer.load(folder)
    text = "hello world, hello there " * 20
    assert tokenizer.decode(tokenizer.encode_prompt(text), special=SpecialTokens.SKIP) == text
    assert len(tokenizer.encode_rendered_chat("hello")) == 1


def test_special_tokens_are_read_from_the_older_file_unless_the_newer_describes_its_tokens(folder) -> None:
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    settings = {"bos_token": {"content": "</s>"}, "pad_token": None}
    for newer, expected in (
        ({}, {"bos_token": "<s>", "eos_token": "</s>"}),
        ({"added_tokens_decoder": {}}, {"bos_token": "</s>"}),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | newer))
        tokenizer = Tokenizer.load(folder)
        assert tokenizer.special_tokens == expected
        assert tokenizer.bos_token_id == (1 if newer else 0)
        assert tokenizer.is_special(1)
        assert not tokenizer.is_special(5)


def test_a_checkpoint_that_names_no_special_tokens_has_none(folder) -> None:
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.special_tokens, tokenizer.bos_token_id) == ({}, None)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, "no readable tokenizer.json"),
        ("tokenizer.json", "{broken", "cannot be read"),
        ("tokenizer.json", "{}", "not a valid tokenizer"),
        ("tokenizer_config.json", "[1]", "holds no JSON object"),
        ("tokenizer_config.json", "{", "cannot be read"),
    ],
)
def test_an_unusable_file_is_named_with_what_to_do_about_it(folder, name, content, words) -> None:
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=words) as caught:
        Tokenizer.load(folder)
    assert caught.value.fix


@pytest.mark.parametrize("text", ["\ud800", "fine so far \udfff and on", "\udc00\ud800"])
def test_half_a_surrogate_pair_is_the_callers_fault(text) -> None:
    tokenizer = small_tokenizers.byte_level()
    with pytest.raises(RequestRejected, match="surrogate") as caught:
        tokenizer.encode_prompt(text)
    assert caught.value.param == "prompt"
    with pytest.raises(RequestRejected) as caught:
        tokenizer.encode_rendered_chat(text)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("text", ["", "\x00", "a\x00b", "\ufeff", "e\u0301" * 50, "\U0010ffff"])
def test_odd_but_valid_text_survives_the_way_there_and_back(text) -> None:
    tokenizer = small_tokenizers.byte_level()
    assert tokenizer.decode(tokenizer.encode_prompt(text), special=SpecialTokens.SKIP) == text


def test_token_bytes_are_exact_for_parts_of_characters() -> None:
    for tokenizer in (small_tokenizers.byte_level(), small_tokenizers.sentencepiece()):
        ids = tokenizer.encode_rendered_chat("é😀日")
        joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
        assert joined.removeprefix(b" ").decode() == "é😀日"
        assert tokenizer.token_string(ids[-1]) == "�"


def test_token_strings_are_what_a_token_adds_in_the_middle_of_a_text() -> None:
    pieces = small_tokenizers.word_piece()
    lazy, ending = (pieces.encode_rendered_chat(word)[-1] for word in ("lazy", "lazys"))
    assert (pieces.token_string(lazy), pieces.token_string(ending)) == (" lazy", "s")
    spaced = small_tokenizers.sentencepiece()
    assert spaced.token_string(spaced.encode_rendered_chat("fox")[0]) == " fox"


def test_an_id_without_a_token_has_no_text() -> None:
    tokenizer = small_tokenizers.byte_level()
    assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""
    assert tokenizer.decode([tokenizer.vocab_size + 7], special=SpecialTokens.KEEP) == ""


def test_encoding_in_several_threads_gives_the_same_tokens() -> None:
    tokenizer = small_tokenizers.byte_level()
    text = "the quick brown fox 日本 😀 " * 50
    with ThreadPoolExecutor(4) as pool:
        results = set(pool.map(tokenizer.encode_prompt, [text] * 32))
    assert results == {tokenizer.encode_prompt(text)}


def test_a_decoder_is_taken_apart_only_if_every_step_of_it_is_understood() -> None:
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    fallback, fuse = {"type": "ByteFallback"}, {"type": "Fuse"}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}

    def kind_of(*steps):
        return decoder_rule({"type": "Sequence", "decoders": list(steps)}).kind

    assert kind_of(replace, fallback, fuse, strip) is DecoderKind.BYTE_FALLBACK
    assert kind_of({"type": "ByteLevel"}) is DecoderKind.BYTE_LEVEL
    opaque = [
        (replace, fallback, fuse, {**strip, "stop": 1}),
        (replace, fallback, strip, fuse),
        (fallback, replace, fuse),
        ({**replace, "pattern": {"Regex": "▁"}}, fallback, fuse),
        ({"type": "ByteLevel"}, fuse, strip),
        (),
    ]
    assert {kind_of(*steps) for steps in opaque} == {DecoderKind.OPAQUE}
    assert decoder_rule(None).kind is DecoderKind.OPAQUE
