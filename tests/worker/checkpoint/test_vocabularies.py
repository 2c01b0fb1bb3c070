"""Checkpoints without a tokenizer.json give the ids that their vocabulary defines, or are refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.options.found_model import find_model
from engine.text.tokenizer import SpecialTokens, Tokenizer, TokenizerError
from tests import vocabulary_files
from tests.hostile_values import assert_one_line
from tests.vocabulary_files import WORDS, Piece, encode_bytes, encode_pieces
from worker.checkpoint.tokenizer_files import end_token_id, find_vocabulary, read_tokenizer
from worker.checkpoint.vocabularies.splits import BY_THREE_DIGITS, KIMI
from worker.sampling.grammar_library import open_tokenizer

TEXTS = (
    *("", "the", " hello world", "in the  world!!\n\n12345", "日本語 é 😀", "don't SINGing", " \n x\t"),
    *("".join(WORDS), " ".join(WORDS), "a" * 50),
)
TOKENS = vocabulary_files.byte_ranks()
PIECES = vocabulary_files.pieces()
OF_KIMI = {
    "tokenizer_class": "TikTokenTokenizer",
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "added_tokens_decoder": {
        str(len(TOKENS) + place): {"content": text, "special": True}
        for place, text in ((0, "[BOS]"), (5, "[EOS]"))
    },
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def check(folder: Path, encode: Callable[[str], list[int]]) -> Tokenizer:
    tokenizer = Tokenizer.load(folder)
    for text in TEXTS:
        ids = tokenizer.encode_plain(text, param="prompt")
        assert list(ids) == encode(text), text
        assert tokenizer.decode(ids, special=SpecialTokens.SKIP) == text
    grammars = open_tokenizer(folder, vocab_size=tokenizer.vocab_size, eos_token_ids=(1,))
    assert grammars.tokenize_str(" hello") == encode(" hello")
    return tokenizer


@pytest.mark.parametrize(("settings", "pattern"), [(OF_KIMI, KIMI), ({}, BY_THREE_DIGITS)])
def test_tiktokens_list_gives_its_ranks(tmp_path: Path, settings: dict, pattern: str) -> None:
    lines = vocabulary_files.tiktoken_lines(TOKENS)
    folder = vocabulary_files.write(tmp_path / "model", "tiktoken.model", lines, settings)
    tokenizer = check(folder, lambda text: encode_bytes(text, TOKENS, pattern))
    if settings:
        assert tokenizer.encode_rendered_chat("[BOS]the[EOS]") == (
            len(TOKENS),
            TOKENS.index(b"the"),
            len(TOKENS) + 5,
        )
        assert tokenizer.bos_token_id == len(TOKENS)
        assert end_token_id(folder) == len(TOKENS) + 5


@pytest.mark.parametrize("special", [["<unk>", "<s>", "</s>", "[INST]"], None])
def test_tekken_has_special_tokens_first_and_those_that_it_does_not_name(
    tmp_path: Path, special: list[str] | None
) -> None:
    content = vocabulary_files.tekken(TOKENS, BY_THREE_DIGITS, special or [], 30)
    if special is None:
        del content["special_tokens"]
    folder = vocabulary_files.write(tmp_path / "model", "tekken.json", content)
    tokenizer = check(
        folder, lambda text: [30 + rank for rank in encode_bytes(text, TOKENS, BY_THREE_DIGITS)]
    )
    assert tokenizer.vocab_size == 30 + len(TOKENS)
    assert tokenizer.encode_prompt("the") == (1, 30 + TOKENS.index(b"the"))
    assert tokenizer.encode_rendered_chat("<s>[INST]<SPECIAL_29>") == (1, 3, 29)
    assert end_token_id(folder) == 2


def test_a_sentencepiece_model_gives_its_own_ids(tmp_path: Path) -> None:
    model = vocabulary_files.sentencepiece_model(PIECES)
    folder = vocabulary_files.write(tmp_path / "model", "tokenizer.model", model, {"add_eos_token": True})
    tokenizer = check(folder, lambda text: encode_pieces(text, PIECES))
    the = encode_pieces("the", PIECES)
    assert list(tokenizer.encode_prompt("the")) == [1, *the, 2]
    assert list(tokenizer.encode_rendered_chat("</s>the")) == [2, *the]
    assert tokenizer.special_tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def test_a_vocabulary_is_made_once_for_each_of_its_settings(tmp_path: Path, cache: Path) -> None:
    model = vocabulary_files.sentencepiece_model(PIECES)
    folder = vocabulary_files.write(tmp_path / "model", "tokenizer.model", model, {"add_bos_token": True})
    first = read_tokenizer(folder).text
    [made] = (cache / "tokenyard" / "tokenizers").iterdir()
    os.utime(made / "tokenizer.json", (1, 1))
    assert read_tokenizer(folder).text == first
    assert (made / "tokenizer.json").stat().st_mtime == 1
    vocabulary_files.write(folder, "tokenizer.model", model, {"add_bos_token": False})
    assert read_tokenizer(folder).text != first


def test_a_tokenizer_json_goes_before_other_vocabularies(tmp_path: Path) -> None:
    for name in ("a.tiktoken", "tiktoken.model", "tokenizer.model", "tekken.json", "tokenizer.json"):
        vocabulary_files.write(tmp_path, name, b"{}")
        assert find_vocabulary(tmp_path) == tmp_path / name
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "model.safetensors").touch()
    assert find_model(str(tmp_path), {})[0] == tmp_path


FILES: dict[str, tuple[str, bytes | dict, dict, str]] = {
    "code of its own": (
        "qwen.tiktoken",
        vocabulary_files.tiktoken_lines(TOKENS),
        {"tokenizer_class": "QWenTokenizer"},
        "code of its own, QWenTokenizer, which is not run",
    ),
    "ranks": ("tiktoken.model", b"YQ== 7\n", {}, "ranks are not in order"),
    "no list": ("tiktoken.model", b"\xff\xfe\n", {}, "cannot be read"),
    "far": (
        "tiktoken.model",
        b"YQ== 0\n",
        {"added_tokens_decoder": {"99999999": {"content": "x"}}},
        "far behind",
    ),
    "letters": ("tiktoken.model", vocabulary_files.tiktoken_lines([b"a" * 60_000]), {}, "60000 letters"),
    "many letters": (
        "tiktoken.model",
        vocabulary_files.tiktoken_lines([b"%01000d" % number for number in range(140)]),
        {},
        "too many to be cut",
    ),
    "tekken without a pattern": ("tekken.json", {"config": {}, "vocab": []}, {}, "cannot be read"),
    "tekken with special tokens beyond all": (
        "tekken.json",
        vocabulary_files.tekken(TOKENS, BY_THREE_DIGITS, ["<s>"], 1 << 14),
        {},
        "1 of 16384 special tokens",
    ),
    "tekken with fewer places than special tokens": (
        "tekken.json",
        vocabulary_files.tekken(TOKENS, BY_THREE_DIGITS, ["<s>", "</s>"], 1),
        {},
        "2 of 1 special tokens",
    ),
    "tekken with more special tokens than tokens": (
        "tekken.json",
        {
            "config": {
                "pattern": BY_THREE_DIGITS,
                "default_vocab_size": 5,
                "default_num_special_tokens": 9,
            },
            "vocab": [{"token_bytes": "YQ=="}],
        },
        {},
        "of 9 special tokens",
    ),
    "empty pieces": (
        "tokenizer.model",
        vocabulary_files.sentencepiece_model([Piece(""), Piece(""), *PIECES]) + b"\xff",
        {},
        "same piece twice, ''",
    ),
    "a pattern that is none": (
        "tekken.json",
        vocabulary_files.tekken(TOKENS, "(", [], 1),
        {},
        "cannot be read",
    ),
    "the same piece": (
        "tokenizer.model",
        vocabulary_files.sentencepiece_model([*PIECES, PIECES[-1]]),
        {},
        "twice",
    ),
    "words": (
        "tokenizer.model",
        vocabulary_files.sentencepiece_model(PIECES, model_type=3),
        {},
        "words or letters",
    ),
    "long pieces": (
        "tokenizer.model",
        vocabulary_files.sentencepiece_model([*PIECES, Piece("a" * 60_000, -9.0)]),
        {},
        "60000 letters",
    ),
}


@pytest.mark.parametrize(("name", "content", "settings", "said"), FILES.values(), ids=FILES)
def test_a_vocabulary_that_cannot_be_read_is_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes | dict, settings: dict, said: str
) -> None:
    folder = vocabulary_files.write(tmp_path / "model", name, content, settings)
    with pytest.raises(TokenizerError, match=said) as refused:
        Tokenizer.load(folder)
    assert_one_line(refused.value)
    assert name in str(refused.value)


def test_any_part_of_a_sentencepiece_model_is_read_or_refused(tmp_path: Path) -> None:
    model = vocabulary_files.sentencepiece_model(PIECES[:20])
    for end in range(1, len(model), 7):
        for content in (model[:end], model[:end] + b"\xff" + model[end + 1 :]):
            folder = vocabulary_files.write(tmp_path / "model", "tokenizer.model", content)
            try:
                Tokenizer.load(folder)
            except TokenizerError as refused:
                assert_one_line(refused)


def test_any_part_of_tekken_is_read_or_refused(tmp_path: Path) -> None:
    whole = vocabulary_files.tekken(TOKENS, BY_THREE_DIGITS, ["<s>"], 2)
    for key, parts in (
        ("config", whole["config"]),
        ("vocab", whole["vocab"][3]),
        ("special_tokens", whole["special_tokens"][0]),
    ):
        for name in parts:
            for value in (None, -1, 10**30, "", "\0", [], {}):
                content = json.loads(json.dumps(whole))
                (content[key] if key == "config" else content[key][min(3, len(content[key]) - 1)])[name] = (
                    value
                )
                folder = vocabulary_files.write(tmp_path / "model", "tekken.json", content)
                try:
                    Tokenizer.load(folder)
                except TokenizerError as refused:
                    assert_one_line(refused)
